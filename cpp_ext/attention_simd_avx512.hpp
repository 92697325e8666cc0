// Vectors of 16 floats with AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "attention_exp2.hpp"

namespace triton_inflight {
namespace {

struct Avx512Simd {
  static constexpr int kWidth = 16;
  static constexpr int kMaxRows = 6;
  static constexpr int kMaxVecs = 4;  // 6 x 4 sums, 4 vectors of cells and a broadcast fit into 32 registers

  using Vec = __m512;
  struct VecPair {
    Vec first;
    Vec second;
  };

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec broadcast(float value) { return _mm512_set1_ps(value); }
  static Vec load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Vec a) { _mm512_storeu_ps(to, a); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec subtract(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec multiply(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  static Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vec absolute(Vec a) { return _mm512_abs_ps(a); }
  static Vec copy_sign(Vec magnitude, Vec sign) {
    const Vec mask = _mm512_set1_ps(-0.0F);
    return _mm512_or_ps(_mm512_andnot_ps(mask, magnitude), _mm512_and_ps(mask, sign));
  }
  static Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
  static Vec exp2(Vec a) { return exp2_of<Avx512Simd>(a); }
  static Vec tanh(Vec a) { return tanh_of<Avx512Simd>(a); }
  static float reduce_max(Vec a) { return _mm512_reduce_max_ps(a); }
  static float reduce_add(Vec a) { return _mm512_reduce_add_ps(a); }

  // GCC would rather load a vector of cells anew for every row than keep it, and run out of load ports.
  template <typename Panel>
  static Panel keep(Panel panel) {
    __asm__("" : "+v"(panel));
    return panel;
  }

  // a0 b0 a1 b1 ... -> (a0 a1 ..., b0 b1 ...)
  static VecPair load_bf16_pairs(const std::uint16_t* from) {
    const __m512i pairs = _mm512_loadu_si512(from);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, upper))};
  }
};

}  // namespace
}  // namespace triton_inflight

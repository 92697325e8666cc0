// Vectors of 8 floats with AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "attention_exp2.hpp"

namespace triton_inflight {
namespace {

struct Avx2Simd {
  static constexpr int kWidth = 8;
  static constexpr int kMaxRows = 4;
  static constexpr int kMaxVecs = 2;  // 4 x 2 sums, 4 widened vectors and a broadcast fit into 16 registers

  using Vec = __m256;
  struct VecPair {
    Vec first;
    Vec second;
  };

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec broadcast(float value) { return _mm256_set1_ps(value); }
  static Vec load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Vec a) { _mm256_storeu_ps(to, a); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec subtract(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec multiply(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  static Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vec absolute(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), a); }
  static Vec copy_sign(Vec magnitude, Vec sign) {
    const Vec mask = _mm256_set1_ps(-0.0F);
    return _mm256_or_ps(_mm256_andnot_ps(mask, magnitude), _mm256_and_ps(mask, sign));
  }
  // a x 2^n for whole n up to 127; 0 where the result would not be a normal number.
  static Vec scale_by_power(Vec a, Vec n) {
    const Vec normal = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0F), _CMP_GE_OQ);
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const Vec power = _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
    return _mm256_and_ps(normal, _mm256_mul_ps(a, power));
  }
  static Vec exp2(Vec a) { return exp2_of<Avx2Simd>(a); }
  static Vec tanh(Vec a) { return tanh_of<Avx2Simd>(a); }

  static float reduce_max(Vec a) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  static float reduce_add(Vec a) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }

  template <typename Panel>
  static Panel keep(Panel panel) {
    return panel;
  }

  // a0 b0 a1 b1 ... -> (a0 a1 ..., b0 b1 ...)
  static VecPair load_bf16_pairs(const std::uint16_t* from) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, upper))};
  }
};

}  // namespace
}  // namespace triton_inflight

// Sums of four products of bytes in vectors of 8, with AVX2, FMA and F16C; AVX-VNNI where the file is
// compiled with it.
#pragma once

#include <cstring>

#include "attention_simd_avx2.hpp"
#include "integer_panel.hpp"

namespace triton_inflight {
namespace {

struct Avx2Common {
  using Simd = Avx2Simd;
  using Int = __m256i;
  using Weights = __m256i;

  static Int broadcast(std::int32_t value) { return _mm256_set1_epi32(value); }
  static Int broadcast_quad(const std::int8_t* quad) {
    std::int32_t word;
    std::memcpy(&word, quad, sizeof word);
    return broadcast(word);
  }
  static Weights load(const std::uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static void load_int4(const std::uint8_t* from, Weights* weights) {
    const __m256i both = load(from);
    const __m256i mask = _mm256_set1_epi8(0x0f);
    weights[0] = _mm256_and_si256(both, mask);
    weights[1] = _mm256_and_si256(_mm256_srli_epi32(both, 4), mask);
  }
  static Simd::Vec as_float(Int sum) { return _mm256_cvtepi32_ps(sum); }
  static Simd::Vec load_float16(const std::uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
};

#if defined(__AVXVNNI__)

struct AvxVnniDot : Avx2Common {
  using Left = __m256i;
  static constexpr int kInt8Rows = 3;
  static constexpr int kInt4Rows = 2;

  // The weights are stored with 128 added.
  static Int int8_start(std::int32_t offset) { return broadcast(offset); }
  static Left left(const std::int8_t* quad) { return broadcast_quad(quad); }
  static Weights load_int8(const std::uint8_t* from) { return load(from); }
  static Int add_int8(Int sum, Weights weights, Left left) {
    return _mm256_dpbusd_avx_epi32(sum, weights, left);
  }
  static Int add_int4(Int sum, Weights weights, Left left) {
    return _mm256_dpbusd_avx_epi32(sum, weights, left);
  }
};

#else

// The instruction for products of bytes adds two of them in 16 bits and wants one side without signs. Whole
// signs move to the other side, |left| x (weight with left's sign): 2 x 127 x 127 still fits.
struct Avx2Dot : Avx2Common {
  struct Left {
    __m256i quad;
    __m256i magnitude;
  };
  static constexpr int kInt8Rows = 2;
  static constexpr int kInt4Rows = 2;

  static Int int8_start(std::int32_t) { return _mm256_setzero_si256(); }
  static Left left(const std::int8_t* quad) {
    const __m256i values = broadcast_quad(quad);
    return {values, _mm256_abs_epi8(values)};
  }
  static Weights load_int8(const std::uint8_t* from) {
    return _mm256_xor_si256(load(from), _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  static Int add_int8(Int sum, Weights weights, Left left) {
    return add_pairs(sum, _mm256_maddubs_epi16(left.magnitude, _mm256_sign_epi8(weights, left.quad)));
  }
  static Int add_int4(Int sum, Weights weights, Left left) {
    return add_pairs(sum, _mm256_maddubs_epi16(weights, left.quad));
  }
  static Int add_pairs(Int sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

#endif

}  // namespace
}  // namespace triton_inflight

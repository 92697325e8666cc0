// Numbers of bfloat16 with AVX-512's dot product of pairs.
#pragma once

#include "attention_product.hpp"
#include "attention_simd_avx512.hpp"

namespace triton_inflight {
namespace {

// Pools of bfloat16 with the instruction that multiplies and adds pairs of them: queries and weights are
// rounded to bfloat16, sums are float32.
struct DotBf16Cells {
  using Cell = std::uint16_t;
  using Left = std::uint16_t;
  using Panel = __m512bh;
  static constexpr Index kPair = 2;

  static Panel load(const Cell* cells) {
    return Avx512Simd::keep(reinterpret_cast<Panel>(_mm512_loadu_si512(cells)));
  }
  static __m512 multiply_add(__m512 sum, const Left* left, Panel panel) {
    int pair;
    std::memcpy(&pair, left, sizeof pair);
    return _mm512_dpbf16_ps(sum, reinterpret_cast<Panel>(_mm512_set1_epi32(pair)), panel);
  }
  static Left left_from(float value) { return float_to_bf16(value); }
  static void store_left(Left* left, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(left),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
  }
};

}  // namespace
}  // namespace triton_inflight

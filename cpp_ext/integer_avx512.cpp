#include <cstring>

#include "attention_simd_avx512.hpp"
#include "integer_panel.hpp"

namespace triton_inflight {
namespace {

// AVX-512 with VNNI.
struct Avx512Dot {
  using Simd = Avx512Simd;
  using Int = __m512i;
  using Weights = __m512i;
  using Left = __m512i;
  // Twice 2 x 7 sums, two vectors of weights and a broadcast fit into 32 registers; int4 needs a mask, too.
  static constexpr int kInt8Rows = 7;
  static constexpr int kInt4Rows = 6;

  static Int broadcast(std::int32_t value) { return _mm512_set1_epi32(value); }
  // The weights are stored with 128 added.
  static Int int8_start(std::int32_t offset) { return broadcast(offset); }
  static Left left(const std::int8_t* quad) {
    std::int32_t word;
    std::memcpy(&word, quad, sizeof word);
    return broadcast(word);
  }
  static Weights load_int8(const std::uint8_t* from) { return Simd::keep(_mm512_loadu_si512(from)); }
  static void load_int4(const std::uint8_t* from, Weights* weights) {
    const __m512i both = _mm512_loadu_si512(from);
    const __m512i mask = _mm512_set1_epi8(0x0f);
    weights[0] = _mm512_and_si512(both, mask);
    weights[1] = _mm512_and_si512(_mm512_srli_epi32(both, 4), mask);
  }
  static Int add_int8(Int sum, Weights weights, Left left) { return _mm512_dpbusd_epi32(sum, weights, left); }
  static Int add_int4(Int sum, Weights weights, Left left) { return _mm512_dpbusd_epi32(sum, weights, left); }
  static Simd::Vec as_float(Int sum) { return _mm512_cvtepi32_ps(sum); }
  static Simd::Vec load_float16(const std::uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
};

}  // namespace

IntegerKernel avx512_vnni_integer() { return integer_table<Avx512Dot>(); }

}  // namespace triton_inflight

#include "attention_simd_avx512.hpp"
#include "fused_table.hpp"

namespace triton_inflight {
namespace {

template <>
struct FusedTile<Avx512Simd> {
  template <typename Cells>
  static constexpr int kRows = sizeof(typename Cells::Left) == sizeof(typename Cells::Cell) ? 14 : 12;
  static constexpr int kVecs = 2;
};

}  // namespace

FusedKernel avx512_fused(bool bf16_weights) {
  return bf16_weights ? fused_table<Avx512Simd, WidenedBf16Cells<Avx512Simd>>()
                      : fused_table<Avx512Simd, Float32Cells<Avx512Simd>>();
}

}  // namespace triton_inflight

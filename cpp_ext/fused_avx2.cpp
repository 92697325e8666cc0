#include "attention_simd_avx2.hpp"
#include "fused_table.hpp"

namespace triton_inflight {
namespace {

template <>
struct FusedTile<Avx2Simd> {
  template <typename Cells>
  static constexpr int kRows = 4;
  static constexpr int kVecs = 2;
};

}  // namespace

FusedKernel avx2_fused(bool bf16_weights) {
  return bf16_weights ? fused_table<Avx2Simd, WidenedBf16Cells<Avx2Simd>>()
                      : fused_table<Avx2Simd, Float32Cells<Avx2Simd>>();
}

}  // namespace triton_inflight

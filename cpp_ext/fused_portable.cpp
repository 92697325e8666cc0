#include "attention_simd_portable.hpp"
#include "fused_table.hpp"

namespace triton_inflight {
namespace {

template <>
struct FusedTile<PortableSimd> {
  template <typename Cells>
  static constexpr int kRows = 4;
  static constexpr int kVecs = 4;
};

}  // namespace

FusedKernel portable_fused(bool bf16_weights) {
  return bf16_weights ? fused_table<PortableSimd, WidenedBf16Cells<PortableSimd>>()
                      : fused_table<PortableSimd, Float32Cells<PortableSimd>>();
}

}  // namespace triton_inflight

#include "attention_cells_bf16.hpp"
#include "fused_table.hpp"

namespace triton_inflight {
namespace {

template <>
struct FusedTile<Avx512Simd> {
  template <typename Cells>
  static constexpr int kRows = 14;
  static constexpr int kVecs = 2;
};

}  // namespace

FusedKernel avx512_bf16_fused() { return fused_table<Avx512Simd, DotBf16Cells>(); }

}  // namespace triton_inflight

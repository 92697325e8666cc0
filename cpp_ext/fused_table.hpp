// Puts the parts of one instruction set together.
#pragma once

#include "fused_panel.hpp"
#include "fused_rows.hpp"

namespace triton_inflight {
namespace {

template <typename Simd, typename Cells>
FusedKernel fused_table() {
  using Left = typename Cells::Left;
  return {sizeof(Left) == 2, &convert_row<Left>, &PanelProduct<Simd, Cells>::multiply,
          &norm_any_row,     &add_row,           &rotate_token};
}

}  // namespace
}  // namespace triton_inflight

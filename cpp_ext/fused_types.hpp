// What the fused operations of a forward pass work on: linear layers, gated MLPs, RMSNorm, rotary positions.
//
// Files compiled for different instruction sets share these types. Their functions are always inlined, so
// that the linker has no copy of one of them to choose, which might need instructions that are not there.
#pragma once

#include <cstdint>

namespace triton_inflight {

using Index = std::int64_t;

// RowsView of float32 or bfloat16; numbers of a row follow one another, `stride` counts elements.
struct RowsView {
  void* data;
  Index stride;
  bool bf16;
};

// Columns of a packed weight that lie together.
inline constexpr Index kPanelColumns = 32;

// The weight of a linear layer, one column per output: [column / 32][depth / pair][32][pair], where a pair is
// 2 numbers in bfloat16, as the dot-product instruction wants them, and 1 in float32. A panel of 32 columns
// is read once from memory, front to back, whatever the number of rows.
//
// In a gated weight, each panel has 16 columns of the gate and then the 16 columns of "up" that they scale.
struct PackedWeight {
  const void* data;
  const float* bias;  // [columns], or null
  Index columns;      // multiple of 32
  Index depth;        // multiple of the pair
  bool bf16;

  [[gnu::always_inline]] Index pair() const { return bf16 ? 2 : 1; }
  [[gnu::always_inline]] Index panels() const { return columns / kPanelColumns; }
  [[gnu::always_inline]] const void* panel(Index number) const {
    return static_cast<const char*>(data) + number * kPanelColumns * depth * (bf16 ? 2 : 4);
  }
};

// (tokens, heads, width) numbers; the innermost stride is 1, the others count elements.
struct HeadsView {
  void* data;
  Index token_stride;
  Index head_stride;
  Index heads;
};

}  // namespace triton_inflight

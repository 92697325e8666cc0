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

// What the numbers of a packed weight are. Whole numbers are multiplied with rows that are turned into whole
// numbers as well (QuantizedRows), the others with rows of floats.
enum class WeightType { kFloat32, kBf16, kInt8, kInt4 };

// Inputs, along the depth, that share a scale.
inline constexpr Index kGroup = 32;
// Numbers of the depth that lie together in weights of whole numbers, as the dot-product instructions want
// them.
inline constexpr Index kQuad = 4;

// The weight of a linear layer, one column per output, in panels of 32 columns. A panel is read once from
// memory, front to back, whatever the number of rows. Inside it:
//
//   float32  [depth][32]
//   bf16     [depth / 2][32][2]
//   int8     [depth / 4][32][4] bytes: number + 128, times the column's own scale
//   int4     [depth / 32] groups of [8][16][4] bytes, [32] scales and [32] minima, float16: four bits q each
//   mean
//            minimum + scale * q; the lower ones of a byte are of one of the first 16 columns, the upper ones
//            of the column 16 after it
//
// In a gated weight, each panel has 16 columns of the gate and then the 16 columns of "up" that they scale.
struct PackedWeight {
  const void* data;
  const float* bias;    // [columns], or null
  const float* scales;  // [columns] of int8; else null
  Index columns;        // multiple of 32
  Index depth;          // multiple of depth_multiple()
  WeightType type;

  [[gnu::always_inline]] bool whole_numbers() const {
    return type == WeightType::kInt8 || type == WeightType::kInt4;
  }
  [[gnu::always_inline]] Index depth_multiple() const {
    if (whole_numbers()) return kGroup;
    return type == WeightType::kBf16 ? 2 : 1;
  }
  [[gnu::always_inline]] Index panels() const { return columns / kPanelColumns; }
  [[gnu::always_inline]] Index panel_bytes() const {
    switch (type) {
      case WeightType::kFloat32:
        return kPanelColumns * depth * 4;
      case WeightType::kBf16:
        return kPanelColumns * depth * 2;
      case WeightType::kInt8:
        return kPanelColumns * depth;
      case WeightType::kInt4:
        break;
    }
    return kPanelColumns * (depth / 2 + depth / kGroup * 4);
  }
  [[gnu::always_inline]] const void* panel(Index number) const {
    return static_cast<const char*>(data) + number * panel_bytes();
  }
};

// Rows whose every group of 32 numbers has a scale of its own: number = scale * value, with values from -127
// to 127. A row's numbers depend on nothing but that row.
struct QuantizedRows {
  std::int8_t* values;    // [row][stride]
  Index stride;           // multiple of the group
  float* scales;          // [row][groups]
  std::int32_t* offsets;  // [row][groups]: -128 times the sum of the group's values
  float* sums;            // [row][groups]: scale times the sum of the group's values
  Index groups;
};

// Where the sums of a panel go: (sum * scale + bias) of its columns, as rows.
struct PanelOutput {
  const float* scales;  // of these columns, or null for 1
  const float* bias;    // of these columns, or null
  RowsView out;         // at the first of these columns
  Index columns;        // to write: 32, or fewer in the last panel
  bool gated;           // writes 16 columns silu(gate) * up
};

// (tokens, heads, width) numbers; the innermost stride is 1, the others count elements.
struct HeadsView {
  void* data;
  Index token_stride;
  Index head_stride;
  Index heads;
};

}  // namespace triton_inflight

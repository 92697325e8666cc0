// A panel of a weight of whole numbers times rows: templates over Dot, what an instruction set offers
// (integer_dot_*.hpp).
//
// The products of a group of 32 inputs are summed exactly, in 32 bits; the sums of groups, times their
// scales, are added up as floats in one register and one order: a row's result does not depend on how many
// rows there are, nor on which thread took the panel.
#pragma once

#include "integer_kernel.hpp"
#include "integer_rows.hpp"
#include "panel_output.hpp"

namespace triton_inflight {
namespace {

template <typename Dot, bool kInt4>
class IntegerProduct {
  using Simd = typename Dot::Simd;
  using Vec = typename Simd::Vec;
  using Int = typename Dot::Int;
  // Sums held in registers: of so many rows, for a vector of columns in each half of the panel.
  static constexpr int kMaxRows = kInt4 ? Dot::kInt4Rows : Dot::kInt8Rows;
  static constexpr int kHalves = 2;
  static constexpr Index kHalf = kPanelColumns / kHalves;
  static constexpr Index kQuads = kGroup / kQuad;
  static constexpr Index kQuadBytes = kInt4 ? kHalf * kQuad : kPanelColumns * kQuad;
  static constexpr Index kGroupBytes = kQuads * kQuadBytes + (kInt4 ? 2 * kPanelColumns * 2 : 0);
  static constexpr Index kLine = 64;
  static constexpr Index kGroupLines = kGroupBytes / kLine;
  static_assert(kHalf % Simd::kWidth == 0);

 public:
  static void multiply(const IntegerPanelCall& call) {
    const Index tiles = (call.rows + kMaxRows - 1) / kMaxRows;
    // The next panel is fetched while this one is multiplied, a part of each of its groups with each tile.
    // With one tile there is nothing to hide behind: reading ahead is then left to the processor.
    const Index share = tiles > 1 ? (kGroupLines + tiles - 1) / tiles : 0;
    for (Index tile = 0; tile < tiles; ++tile) {
      // Dealt out evenly, 6 + 5 + 5 rather than 7 + 7 + 2.
      const Index row = tile * call.rows / tiles;
      const Index rows = (tile + 1) * call.rows / tiles - row;
      const Index first = tile * share;
      const Fetch fetch{static_cast<const char*>(call.panel) + call.left.groups * kGroupBytes + first * kLine,
                        first < kGroupLines ? share : 0};
      alignas(64) float sums[kMaxRows * kPanelColumns];
      multiply_rows<kMaxRows>(call, row, rows, fetch, sums);
      for (Index r = 0; r < rows; ++r) write_sums<Simd>(call.output, row + r, sums + r * kPanelColumns);
    }
  }

 private:
  struct Fetch {
    const char* from;
    Index lines;
  };

  template <int kRows>
  static void multiply_rows(const IntegerPanelCall& call, Index row, Index rows, Fetch fetch, float* sums) {
    if constexpr (kRows > 1) {
      if (rows < kRows) {
        multiply_rows<kRows - 1>(call, row, rows, fetch, sums);
        return;
      }
    }
    for (Index column = 0; column < kHalf; column += Simd::kWidth) {
      multiply_tile<kRows>(call, row, column, fetch, sums);
      fetch.lines = 0;
    }
  }

  template <int kRows>
  static void multiply_tile(const IntegerPanelCall& call, Index row, Index column, Fetch fetch, float* out) {
    const Index groups = call.left.groups;
    const Index stride = call.left.stride;
    const std::int8_t* values = call.left.values + row * stride;
    const float* scales = call.left.scales + row * groups;
    const float* row_sums = call.left.sums + row * groups;
    const std::int32_t* offsets = call.left.offsets + row * groups;
    const auto* panel = static_cast<const std::uint8_t*>(call.panel) + column * kQuad;
    Vec sums[kRows][kHalves];
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < kHalves; ++h) sums[r][h] = Simd::zero();
    }
    for (Index group = 0; group < groups; ++group) {
      for (Index line = 0; line < fetch.lines; ++line)
        __builtin_prefetch(fetch.from + group * kGroupBytes + line * kLine, 0, 2);
      Int dots[kRows][kHalves];
      for (int r = 0; r < kRows; ++r) {
        for (int h = 0; h < kHalves; ++h) {
          dots[r][h] = kInt4 ? Dot::broadcast(0) : Dot::int8_start(offsets[r * groups + group]);
        }
      }
#pragma GCC unroll 8
      for (Index quad = 0; quad < kQuads; ++quad) {
        typename Dot::Weights weights[kHalves];
        load(panel + quad * kQuadBytes, weights);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const typename Dot::Left left = Dot::left(values + r * stride + group * kGroup + quad * kQuad);
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) {
            dots[r][h] = kInt4 ? Dot::add_int4(dots[r][h], weights[h], left)
                               : Dot::add_int8(dots[r][h], weights[h], left);
          }
        }
      }
      panel += kQuads * kQuadBytes;
      if constexpr (kInt4) {
        const auto* halves = reinterpret_cast<const std::uint16_t*>(panel - column * kQuad) + column;
        for (int h = 0; h < kHalves; ++h) {
          const Vec scale = Dot::load_float16(halves + h * kHalf);
          const Vec minimum = Dot::load_float16(halves + kPanelColumns + h * kHalf);
          for (int r = 0; r < kRows; ++r) {
            const Vec of_group = Simd::multiply(Dot::as_float(dots[r][h]), scale);
            const Vec of_values = Simd::broadcast(scales[r * groups + group]);
            const Vec of_minimum = Simd::broadcast(row_sums[r * groups + group]);
            sums[r][h] = Simd::fma(minimum, of_minimum, Simd::fma(of_group, of_values, sums[r][h]));
          }
        }
        panel += 2 * kPanelColumns * 2;
      } else {
        for (int r = 0; r < kRows; ++r) {
          const Vec scale = Simd::broadcast(scales[r * groups + group]);
          for (int h = 0; h < kHalves; ++h)
            sums[r][h] = Simd::fma(Dot::as_float(dots[r][h]), scale, sums[r][h]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < kHalves; ++h) Simd::store(out + r * kPanelColumns + column + h * kHalf, sums[r][h]);
    }
  }

  static void load(const std::uint8_t* panel, typename Dot::Weights* weights) {
    if constexpr (kInt4) {
      Dot::load_int4(panel, weights);
    } else {
      for (int h = 0; h < kHalves; ++h) weights[h] = Dot::load_int8(panel + h * kHalf * kQuad);
    }
  }
};

template <typename Dot>
IntegerKernel integer_table() {
  return {&quantize_row, &IntegerProduct<Dot, false>::multiply, &IntegerProduct<Dot, true>::multiply};
}

}  // namespace
}  // namespace triton_inflight

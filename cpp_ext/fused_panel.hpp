// A panel of a packed weight times rows: templates over Simd and Cells (see attention_product.hpp).
//
// Each sum runs over the whole depth in one register, in one order: a row's result does not depend on how
// many rows there are, nor on which thread took the panel.
#pragma once

#include "attention_product.hpp"
#include "fused_kernel.hpp"
#include "panel_output.hpp"

namespace triton_inflight {
namespace {

// RowsView and columns of the sums that fit into the registers, beside a step of the panel and a broadcast.
template <typename Simd>
struct FusedTile;

template <typename Simd, typename Cells>
class PanelProduct {
  using Cell = typename Cells::Cell;
  using Left = typename Cells::Left;
  using Vec = typename Simd::Vec;
  static constexpr int kMaxRows = FusedTile<Simd>::template kRows<Cells>;
  static constexpr int kVecs = FusedTile<Simd>::kVecs;
  static constexpr Index kTileColumns = kVecs * Simd::kWidth;
  static constexpr Index kStep = kPanelColumns * Cells::kPair;  // numbers of a panel at one step of the depth
  static_assert(kPanelColumns % kTileColumns == 0);

 public:
  static void multiply(const PanelCall& call) {
    const Index tiles = (call.rows + kMaxRows - 1) / kMaxRows;
    for (Index tile = 0; tile < tiles; ++tile) {
      // Dealt out evenly, 11 + 11 + 10 rather than 14 + 14 + 4: a tile of few rows waits for its own sums.
      const Index row = tile * call.rows / tiles;
      const Index rows = (tile + 1) * call.rows / tiles - row;
      alignas(64) float sums[kMaxRows * kPanelColumns];
      // The memory's share of the next panel is fetched while this one is multiplied: a cache line of each
      // step in the first tile, the other one in the second.
      const char* ahead = tiles > 1 && tile < 2
                              ? static_cast<const char*>(call.panel) +
                                    kStep * call.depth / Cells::kPair * kCellSize + tile * 64
                              : nullptr;
      multiply_rows<kMaxRows>(call, row, rows, ahead, sums);
      for (Index r = 0; r < rows; ++r) write_sums<Simd>(call.output, row + r, sums + r * kPanelColumns);
    }
  }

 private:
  static constexpr Index kCellSize = static_cast<Index>(sizeof(Cell));

  template <int kRows>
  static void multiply_rows(const PanelCall& call, Index row, Index rows, const char* ahead, float* sums) {
    if constexpr (kRows > 1) {
      if (rows < kRows) {
        multiply_rows<kRows - 1>(call, row, rows, ahead, sums);
        return;
      }
    }
    for (Index column = 0; column < kPanelColumns; column += kTileColumns) {
      if (ahead != nullptr && column == 0) {
        multiply_tile<kRows, true>(call, row, column, ahead, sums);
      } else {
        multiply_tile<kRows, false>(call, row, column, ahead, sums);
      }
    }
  }

  template <int kRows, bool kFetches>
  static void multiply_tile(const PanelCall& call, Index row, Index column, const char* ahead, float* out) {
    const Left* left = static_cast<const Left*>(call.left) + row * call.left_stride;
    const Cell* cells = static_cast<const Cell*>(call.panel) + column * Cells::kPair;
    const Index steps = call.depth / Cells::kPair;
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) sums[r][v] = Simd::zero();
    }
    for (Index k = 0; k < steps; ++k) {
      typename Cells::Panel panel[kVecs];
      if constexpr (kFetches) __builtin_prefetch(ahead + k * kStep * kCellSize, 0, 2);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v)
        panel[v] = Cells::load(cells + k * kStep + v * Simd::kWidth * Cells::kPair);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          sums[r][v] =
              Cells::multiply_add(sums[r][v], left + r * call.left_stride + k * Cells::kPair, panel[v]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v)
        Simd::store(out + r * kPanelColumns + column + v * Simd::kWidth, sums[r][v]);
    }
  }
};

}  // namespace
}  // namespace triton_inflight

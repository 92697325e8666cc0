// The one product behind scores and output: out[row][column] = sum over k of left[row][k] x cells[k][column].
//
// Templates over Simd (what an instruction set offers, attention_simd_*.hpp) and Cells (how numbers of the
// pool are stored and multiplied). All in an unnamed namespace: the linker must never merge a copy compiled
// for one instruction set with that of another.
#pragma once

#include "attention_types.hpp"
#include "bf16.hpp"

namespace triton_inflight {
namespace {

// How many blocks before its turn a block is fetched into the cache.
inline constexpr Index kFetchAhead = FETCH_AHEAD;

// Pools of float32.
template <typename Simd>
struct Float32Cells {
  using Cell = float;
  using Left = float;
  using Panel = typename Simd::Vec;
  static constexpr Index kPair = 1;

  static Panel load(const Cell* cells) { return Simd::load(cells); }
  static typename Simd::Vec multiply_add(typename Simd::Vec sum, const Left* left, Panel panel) {
    return Simd::fma(Simd::broadcast(*left), panel, sum);
  }
  static Left left_from(float value) { return value; }
  static void store_left(Left* left, typename Simd::Vec values) { Simd::store(left, values); }
};

// Pools of bfloat16 for processors without a bfloat16 dot product: widened to float32, then multiplied.
template <typename Simd>
struct WidenedBf16Cells {
  using Cell = std::uint16_t;
  using Left = float;
  using Panel = typename Simd::VecPair;
  static constexpr Index kPair = 2;

  static Panel load(const Cell* cells) { return Simd::load_bf16_pairs(cells); }
  static typename Simd::Vec multiply_add(typename Simd::Vec sum, const Left* left, Panel panel) {
    return Simd::fma(Simd::broadcast(left[1]), panel.second,
                     Simd::fma(Simd::broadcast(left[0]), panel.first, sum));
  }
  static Left left_from(float value) { return value; }
  static void store_left(Left* left, typename Simd::Vec values) { Simd::store(left, values); }
};

template <typename Cells>
struct Product {
  const typename Cells::Left* left;  // [row][k]
  Index left_stride;
  Index rows;
  // Cells in blocks of [steps_per_block][columns][pair]. kFetchAhead entries more than are multiplied: those
  // are only fetched into the cache.
  const typename Cells::Cell* const* blocks;
  Index steps_per_block;
  Index steps;  // pairs of k to sum over, through as many blocks as it takes
  Index columns;
  float* out;  // [row][column]
  Index out_stride;
};

// kRows x (kVecs vectors) sums held in registers over all steps.
template <typename Simd, typename Cells, int kRows, int kVecs, bool kPrefetch>
void multiply_tile(const Product<Cells>& product, Index row, Index column) {
  const Index step = product.columns * Cells::kPair;
  const Index offset = column * Cells::kPair;
  const typename Cells::Left* left = product.left + row * product.left_stride;
  typename Simd::Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sums[r][v] = Simd::zero();
  }
  Index remaining = product.steps;
  for (Index b = 0; remaining > 0; ++b) {
    const typename Cells::Cell* cells = product.blocks[b] + offset;
    const typename Cells::Cell* next = product.blocks[b + kFetchAhead] + offset;
    const Index steps = remaining < product.steps_per_block ? remaining : product.steps_per_block;
    for (Index k = 0; k < steps; ++k, cells += step, next += step, left += Cells::kPair) {
      typename Cells::Panel panels[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        panels[v] = Cells::load(cells + v * Simd::kWidth * Cells::kPair);
        if constexpr (kPrefetch) __builtin_prefetch(next + v * Simd::kWidth * Cells::kPair, 0, FETCH_HINT);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          sums[r][v] = Cells::multiply_add(sums[r][v], left + r * product.left_stride, panels[v]);
        }
      }
    }
    remaining -= steps;
  }
  for (int r = 0; r < kRows; ++r) {
    float* out = product.out + (row + r) * product.out_stride + column;
    for (int v = 0; v < kVecs; ++v) Simd::store(out + v * Simd::kWidth, sums[r][v]);
  }
}

template <typename Simd, typename Cells, int kRows, int kVecs, bool kPrefetch>
void multiply_rows(const Product<Cells>& product, Index row, Index rows, Index column) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      multiply_rows<Simd, Cells, kRows - 1, kVecs, kPrefetch>(product, row, rows, column);
      return;
    }
  }
  multiply_tile<Simd, Cells, kRows, kVecs, kPrefetch>(product, row, column);
}

// All rows of kVecs vectors of columns. Rows are dealt out evenly, 4 + 4 rather than 6 + 2: a tile of few
// rows waits for its own sums.
template <typename Simd, typename Cells, int kVecs>
void multiply_columns(const Product<Cells>& product, Index column) {
  const Index tiles = (product.rows + Simd::kMaxRows - 1) / Simd::kMaxRows;
  for (Index tile = 0; tile < tiles; ++tile) {
    const Index row = tile * product.rows / tiles;
    const Index rows = (tile + 1) * product.rows / tiles - row;
    if (tile == 0) {
      multiply_rows<Simd, Cells, Simd::kMaxRows, kVecs, true>(product, row, rows, column);
    } else {
      multiply_rows<Simd, Cells, Simd::kMaxRows, kVecs, false>(product, row, rows, column);
    }
  }
}

// The columns must be a multiple of 16.
template <typename Simd, typename Cells, int kVecs = Simd::kMaxVecs>
void multiply(const Product<Cells>& product, Index column = 0) {
  constexpr Index kColumns = kVecs * Simd::kWidth;
  for (; column + kColumns <= product.columns; column += kColumns) {
    multiply_columns<Simd, Cells, kVecs>(product, column);
  }
  if constexpr (kColumns > 16) multiply<Simd, Cells, kVecs / 2>(product, column);
}

}  // namespace
}  // namespace triton_inflight

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

// Pools of float32.
template <typename Simd>
struct Float32Cells {
  using Cell = float;
  using Left = float;
  using Panel = typename Simd::Vec;
  static constexpr Index kPair = 1;

  static Panel load(const Cell* cells) { return Simd::keep(Simd::load(cells)); }
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

// The cells come in blocks of [block_steps][block_columns][pair], which continue each other along k or along
// the columns, whichever of the two is larger than a block.
template <typename Cells>
struct Product {
  const typename Cells::Left* left;  // [row][k]
  Index left_stride;
  Index rows;
  const typename Cells::Cell* const* blocks;
  Index blocks_ahead;  // while a block is multiplied, the one so many places behind it is fetched
  Index block_steps;
  Index block_columns;  // multiple of 16
  Index steps;          // pairs of k to sum over
  Index columns;        // multiple of 16
  float* out;           // [row][column]
  Index out_stride;
};

// What else has to be done for cells that are multiplied: nothing, or fetching others into the cache, to be
// read many times or once (and then not to push others out).
enum class Fetch { kNothing, kKeep, kOnce };

// kRows x (kVecs vectors) sums held in registers over all steps.
template <typename Simd, typename Cells, int kRows, int kVecs, Fetch kFetch>
void multiply_tile(const Product<Cells>& product, Index row, Index column) {
  const Index step = product.block_columns * Cells::kPair;
  const typename Cells::Left* left = product.left + row * product.left_stride;
  const typename Cells::Cell* cells[kVecs];
  const typename Cells::Cell* ahead[kVecs];
  typename Simd::Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sums[r][v] = Simd::zero();
  }
  Index remaining = product.steps;
  for (Index depth = 0; remaining > 0; ++depth) {
    for (int v = 0; v < kVecs; ++v) {
      const auto at = static_cast<std::uint32_t>(column + v * Simd::kWidth);
      const auto width = static_cast<std::uint32_t>(product.block_columns);
      const auto* const* block = product.blocks + depth + at / width;
      cells[v] = *block + at % width * Cells::kPair;
      ahead[v] = block[product.blocks_ahead] + at % width * Cells::kPair;
    }
    const Index steps = remaining < product.block_steps ? remaining : product.block_steps;
    for (Index k = 0; k < steps; ++k, left += Cells::kPair) {
      typename Cells::Panel panels[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        panels[v] = Cells::load(cells[v] + k * step);
        if constexpr (kFetch == Fetch::kKeep) __builtin_prefetch(ahead[v] + k * step, 0, 3);
        if constexpr (kFetch == Fetch::kOnce) __builtin_prefetch(ahead[v] + k * step, 0, 0);
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

template <typename Simd, typename Cells, int kRows, int kVecs, Fetch kFetch>
void multiply_rows(const Product<Cells>& product, Index row, Index rows, Index column) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      multiply_rows<Simd, Cells, kRows - 1, kVecs, kFetch>(product, row, rows, column);
      return;
    }
  }
  multiply_tile<Simd, Cells, kRows, kVecs, kFetch>(product, row, column);
}

// All rows of kVecs vectors of columns. Rows are dealt out evenly, 4 + 4 rather than 6 + 2: a tile of few
// rows waits for its own sums.
template <typename Simd, typename Cells, int kVecs>
void multiply_columns(const Product<Cells>& product, Index column) {
  const Index tiles = (product.rows + Simd::kMaxRows - 1) / Simd::kMaxRows;
  if (tiles == 1) {
    multiply_rows<Simd, Cells, Simd::kMaxRows, kVecs, Fetch::kOnce>(product, 0, product.rows, column);
    return;
  }
  for (Index tile = 0; tile < tiles; ++tile) {
    const Index row = tile * product.rows / tiles;
    const Index rows = (tile + 1) * product.rows / tiles - row;
    if (tile == 0) {
      multiply_rows<Simd, Cells, Simd::kMaxRows, kVecs, Fetch::kKeep>(product, row, rows, column);
    } else {
      multiply_rows<Simd, Cells, Simd::kMaxRows, kVecs, Fetch::kNothing>(product, row, rows, column);
    }
  }
}

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

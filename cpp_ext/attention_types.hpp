// What paged attention works on.
//
// Files compiled for different instruction sets share these types. Their functions are always inlined, so
// that the linker has no copy of one of them to choose, which might need instructions that are not there.
#pragma once

#include <cstdint>

namespace triton_inflight {

using Index = std::int64_t;

// (tokens, heads, width) numbers, float32 or bfloat16; the innermost stride is 1, the others count elements.
struct TensorView {
  void* data;
  Index token_stride;
  Index head_stride;
  bool bf16;
};

// The pool of one attention call: [block][head][keys, then values of that head].
//
//   keys    [key_width / pair][tokens_per_block][pair]       one column per cell
//   values  [tokens_per_block / pair][value_width][pair]     one column per number
//
// so that scores = queries x keys and output = weights x values are the same product. The pair is 2 numbers
// in bfloat16, as the dot-product instruction wants them, and 1 in float32. Widths are padded with zeros.
struct PoolLayout {
  Index num_blocks;
  Index tokens_per_block;  // multiple of 16
  Index heads;
  Index key_width;    // without padding
  Index value_width;  // without padding
  bool bf16;

  [[gnu::always_inline]] Index pair() const { return bf16 ? 2 : 1; }
  [[gnu::always_inline]] Index padded_key_width() const { return (key_width + pair() - 1) / pair() * pair(); }
  [[gnu::always_inline]] Index padded_value_width() const { return (value_width + 15) / 16 * 16; }
  [[gnu::always_inline]] Index keys_size() const { return padded_key_width() * tokens_per_block; }
  [[gnu::always_inline]] Index head_size() const {
    return keys_size() + padded_value_width() * tokens_per_block;
  }
  [[gnu::always_inline]] Index block_size() const { return heads * head_size(); }  // in elements
};

// Cells are attended over in spans that start at multiples of the span length, each with a softmax of its
// own; then the spans are folded in order. So a token's result depends on its own position and history
// alone: not on how its prompt was cut, who shares the step, or which thread took which span.
inline constexpr Index kSpanCells = 256;
[[gnu::always_inline]] inline Index blocks_per_span(Index tokens_per_block) {
  return tokens_per_block < kSpanCells ? kSpanCells / tokens_per_block : 1;
}

// Rows of one product at most; a row is one query head of one token.
inline constexpr Index kTileRows = 48;

// One sequence of a step.
struct SequenceRun {
  Index first_token;     // row in the flat batch
  Index count;           // tokens it runs
  Index first_position;  // position of its first token of this step
  const std::int32_t* blocks;

  [[gnu::always_inline]] Index length() const { return first_position + count; }
};

// A share of the work of a step: some rows of one key head of one sequence over some of its spans. The rows
// of a key head are its query heads stacked: row r is query head r % heads_per_kv of token r / heads_per_kv.
struct WorkItem {
  std::int32_t sequence;
  std::int32_t kv_head;
  Index first_row;
  Index num_rows;
  Index first_span;
  Index end_span;
  std::int32_t group;  // of the items that share these rows, or -1: it takes all spans, and writes the result
  bool stores;         // it is the only item of this key head, and stores its new keys and values first
};

// One attention call of a forward pass.
struct LayerCall {
  TensorView queries;
  TensorView keys;
  TensorView values;
  TensorView out;
  void* pool;
  PoolLayout layout;
  Index heads_per_kv;
  Index window;        // tokens seen, the own one included; 0 is all
  float scale;         // above 0
  float softcap;       // 0 is none
  const float* sinks;  // one logit per query head, or null
};

}  // namespace triton_inflight

// Attention for one work item: the algorithm, as templates over Simd and Cells (see attention_product.hpp).
#pragma once

#include <cmath>
#include <limits>

#include "attention_kernel.hpp"
#include "attention_product.hpp"

namespace triton_inflight {
namespace {

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();
// How many cells ahead keys and values are fetched: enough to cover the time that memory takes to answer, few
// enough to wait in the nearest cache.
inline constexpr Index kFetchCells = 64;
inline constexpr float kLog2E = 1.442695041F;

template <typename Simd, typename Cells>
class ItemAttention {
  using Vec = typename Simd::Vec;
  using Cell = typename Cells::Cell;
  using Left = typename Cells::Left;

 public:
  static void attend(const LayerCall& call, const SequenceRun& run, const WorkItem& item, float* scratch,
                     float* partials) {
    const ItemAttention self(call, run, item, scratch);
    self.gather_queries();
    const bool whole = item.group < 0;
    const Index state_size = SpanState::size(item.num_rows, self.value_width_);
    if (whole) self.start(self.total_);
    for (Index span = item.first_span; span < item.end_span; ++span) {
      const SpanState state =
          whole ? self.part_
                : SpanState::over(partials + (span - item.first_span) * state_size, item.num_rows);
      self.attend_span(span, state);
      if (whole) self.fold(state);
    }
    if (whole) self.write_result();
  }

  static void finish(const LayerCall& call, const SequenceRun& run, const WorkItem& item, float* scratch,
                     float* partials, Index num_spans) {
    const ItemAttention self(call, run, item, scratch);
    const Index state_size = SpanState::size(item.num_rows, self.value_width_);
    self.start(self.total_);
    for (Index span = 0; span < num_spans; ++span) {
      self.fold(SpanState::over(partials + span * state_size, item.num_rows));
    }
    self.write_result();
  }

 private:
  // Scratch memory: queries [kTileRows][key width], scores [kTileRows][span], two states.
  ItemAttention(const LayerCall& call, const SequenceRun& run, const WorkItem& item, float* scratch)
      : call_(call),
        run_(run),
        item_(item),
        key_width_(call.layout.padded_key_width()),
        value_width_(call.layout.padded_value_width()),
        block_(call.layout.tokens_per_block),
        span_blocks_(blocks_per_span(block_)),
        blocks_ahead_(max(kFetchCells / block_, 1)),
        // Scores become weights in place, so a row of either is as long in bytes.
        left_per_float_(static_cast<Index>(sizeof(float) / sizeof(Left))),
        factor_(call.softcap > 0 ? kLog2E : call.scale * kLog2E),
        queries_(reinterpret_cast<Left*>(scratch)),
        scores_(scratch + kTileRows * key_width_),
        part_(SpanState::over(scores_ + kTileRows * span_blocks_ * block_, kTileRows)),
        total_(SpanState::over(part_.maxima + SpanState::size(kTileRows, value_width_), kTileRows)) {}

  Index position_of(Index row) const {
    return run_.first_position + (item_.first_row + row) / call_.heads_per_kv;
  }
  Index token_of(Index row) const { return run_.first_token + (item_.first_row + row) / call_.heads_per_kv; }
  Index head_of(Index row) const {
    return item_.kv_head * call_.heads_per_kv + (item_.first_row + row) % call_.heads_per_kv;
  }

  void gather_queries() const {
    const TensorView& view = call_.queries;
    const Index width = call_.layout.key_width;
    for (Index row = 0; row < item_.num_rows; ++row) {
      const Index offset = token_of(row) * view.token_stride + head_of(row) * view.head_stride;
      Left* to = queries_ + row * key_width_;
      if (view.bf16) {
        const std::uint16_t* from = static_cast<const std::uint16_t*>(view.data) + offset;
        for (Index i = 0; i < width; ++i) to[i] = Cells::left_from(bf16_to_float(from[i]));
      } else {
        const float* from = static_cast<const float*>(view.data) + offset;
        for (Index i = 0; i < width; ++i) to[i] = Cells::left_from(from[i]);
      }
      for (Index i = width; i < key_width_; ++i) to[i] = Cells::left_from(0.0F);
    }
  }

  const Cell* keys_of(Index block) const {
    return static_cast<const Cell*>(call_.pool) + run_.blocks[block] * call_.layout.block_size() +
           item_.kv_head * call_.layout.head_size();
  }
  const Cell* values_of(Index block) const { return keys_of(block) + call_.layout.keys_size(); }

  // The blocks of a span that some row sees, in the order in which they are read: keys, values, and then
  // what the next span begins with, so that it can be fetched ahead.
  struct ReadingOrder {
    Index first_block;
    Index num_blocks;
    const Cell* keys_and_values[2 * (kSpanCells / 16) + kFetchCells / 16];
  };

  void arrange(Index span, ReadingOrder& order) const {
    const Index last = position_of(item_.num_rows - 1) / block_;
    const Index oldest = call_.window > 0 ? max(position_of(0) - call_.window + 1, 0) / block_ : 0;
    order.first_block = max(span * span_blocks_, oldest);
    const Index end = min((span + 1) * span_blocks_, last + 1);
    order.num_blocks = end - order.first_block;
    const Cell** next = order.keys_and_values;
    for (Index block = order.first_block; block < end; ++block) *next++ = keys_of(block);
    for (Index block = order.first_block; block < end; ++block) *next++ = values_of(block);
    for (Index i = 0; i < blocks_ahead_; ++i) *next++ = keys_of(min(end + i, last));
  }

  // Softmax and output of the rows over one span. Only cells that some row sees are read from the values:
  // what lies behind them belongs to nobody, and must not spread even if it is not a number.
  void attend_span(Index span, SpanState state) const {
    ReadingOrder order;
    arrange(span, order);
    const Index base = order.first_block * block_;
    const Index cells = min(order.num_blocks * block_, position_of(item_.num_rows - 1) + 1 - base);
    multiply_keys(order);
    softmax(base, (cells + 15) / 16 * 16, state);
    multiply_values(order, cells, state.output);
  }

  void multiply_keys(const ReadingOrder& order) const {
    const Index steps = key_width_ / Cells::kPair;
    multiply<Simd, Cells>({.left = queries_,
                           .left_stride = key_width_,
                           .rows = item_.num_rows,
                           .blocks = order.keys_and_values,
                           .blocks_ahead = blocks_ahead_,
                           .block_steps = steps,
                           .block_columns = block_,
                           .steps = steps,
                           .columns = order.num_blocks * block_,
                           .out = scores_,
                           .out_stride = span_blocks_ * block_});
  }

  void multiply_values(const ReadingOrder& order, Index cells, float* output) const {
    multiply<Simd, Cells>({.left = reinterpret_cast<const Left*>(scores_),
                           .left_stride = span_blocks_ * block_ * left_per_float_,
                           .rows = item_.num_rows,
                           .blocks = order.keys_and_values + order.num_blocks,
                           .blocks_ahead = blocks_ahead_,
                           .block_steps = block_ / Cells::kPair,
                           .block_columns = value_width_,
                           .steps = (cells + Cells::kPair - 1) / Cells::kPair,
                           .columns = value_width_,
                           .out = output,
                           .out_stride = value_width_});
  }

  // Scores of `cells` cells from position `base` on -> weights, their maxima and their sums.
  void softmax(Index base, Index cells, SpanState state) const {
    for (Index row = 0; row < item_.num_rows; ++row) {
      float* scores = scores_ + row * span_blocks_ * block_;
      const Index position = position_of(row);
      const Index end = min(max(position + 1 - base, 0), cells);
      const Index begin = call_.window > 0 ? min(max(position - call_.window + 1 - base, 0), end) : 0;
      if (call_.softcap > 0) cap(scores, cells);
      for (Index i = 0; i < begin; ++i) scores[i] = kNothing;
      for (Index i = end; i < cells; ++i) scores[i] = kNothing;
      Vec largest = Simd::broadcast(kNothing);
      for (Index i = 0; i < cells; i += Simd::kWidth) largest = Simd::max(largest, Simd::load(scores + i));
      const float maximum = Simd::reduce_max(largest);
      state.maxima[row] = begin < end ? maximum : kNothing;
      // A row that sees nothing: any number will do to make all its weights exp(-inf) = 0.
      state.sums[row] = weigh(scores, cells, begin < end ? maximum : 0.0F);
    }
  }

  void cap(float* scores, Index cells) const {
    const Vec before = Simd::broadcast(call_.scale / call_.softcap);
    const Vec after = Simd::broadcast(call_.softcap);
    for (Index i = 0; i < cells; i += Simd::kWidth) {
      const Vec capped = Simd::tanh(Simd::multiply(Simd::load(scores + i), before));
      Simd::store(scores + i, Simd::multiply(capped, after));
    }
  }

  // A row's scores -> exp(scores - maximum), in place, as the left side of a product; returns their sum.
  float weigh(float* scores, Index cells, float maximum) const {
    const Vec shift = Simd::broadcast(maximum);
    const Vec factor = Simd::broadcast(factor_);
    Left* weights = reinterpret_cast<Left*>(scores);
    Vec sum = Simd::zero();
    for (Index i = 0; i < cells; i += Simd::kWidth) {
      const Vec weight = Simd::exp2(Simd::multiply(Simd::subtract(Simd::load(scores + i), shift), factor));
      sum = Simd::add(sum, weight);
      Cells::store_left(weights + i, weight);
    }
    return Simd::reduce_add(sum);
  }

  // Before any span: the sinks, which take part in the softmax and have no value, or nothing.
  void start(SpanState state) const {
    for (Index row = 0; row < item_.num_rows; ++row) {
      state.maxima[row] = kNothing;
      state.sums[row] = 0.0F;
      if (call_.sinks != nullptr) {
        state.maxima[row] = call_.sinks[head_of(row)] * kLog2E / factor_;
        state.sums[row] = 1.0F;
      }
    }
    for (Index i = 0; i < item_.num_rows * value_width_; ++i) state.output[i] = 0.0F;
  }

  // Adds a span to the total, both brought to the larger of their maxima.
  void fold(SpanState span) const {
    for (Index row = 0; row < item_.num_rows; ++row) {
      if (span.maxima[row] == kNothing) continue;
      const float before = total_.maxima[row];
      const float maximum = before > span.maxima[row] ? before : span.maxima[row];
      const float keep = ::exp2f((before - maximum) * factor_);
      const float take = ::exp2f((span.maxima[row] - maximum) * factor_);
      total_.maxima[row] = maximum;
      total_.sums[row] = total_.sums[row] * keep + span.sums[row] * take;
      const Vec keeps = Simd::broadcast(keep);
      const Vec takes = Simd::broadcast(take);
      float* to = total_.output + row * value_width_;
      const float* from = span.output + row * value_width_;
      for (Index i = 0; i < value_width_; i += Simd::kWidth) {
        const Vec kept = Simd::multiply(Simd::load(to + i), keeps);
        Simd::store(to + i, Simd::fma(Simd::load(from + i), takes, kept));
      }
    }
  }

  void write_result() const {
    const TensorView& view = call_.out;
    const Index width = call_.layout.value_width;
    for (Index row = 0; row < item_.num_rows; ++row) {
      const Index offset = token_of(row) * view.token_stride + head_of(row) * view.head_stride;
      const float* from = total_.output + row * value_width_;
      const float factor = 1.0F / total_.sums[row];
      if (view.bf16) {
        std::uint16_t* to = static_cast<std::uint16_t*>(view.data) + offset;
        for (Index i = 0; i < width; ++i) to[i] = float_to_bf16(from[i] * factor);
      } else {
        float* to = static_cast<float*>(view.data) + offset;
        for (Index i = 0; i < width; ++i) to[i] = from[i] * factor;
      }
    }
  }

  static Index min(Index a, Index b) { return a < b ? a : b; }
  static Index max(Index a, Index b) { return a > b ? a : b; }

  const LayerCall& call_;
  const SequenceRun& run_;
  const WorkItem& item_;
  const Index key_width_;
  const Index value_width_;
  const Index block_;
  const Index span_blocks_;
  const Index blocks_ahead_;
  const Index left_per_float_;
  const float factor_;  // of the differences of scores, to powers of 2
  Left* const queries_;
  float* const scores_;
  const SpanState part_;
  const SpanState total_;
};

template <typename Simd, typename Cells>
constexpr AttentionKernel item_attention() {
  return {&ItemAttention<Simd, Cells>::attend, &ItemAttention<Simd, Cells>::finish};
}

}  // namespace
}  // namespace triton_inflight

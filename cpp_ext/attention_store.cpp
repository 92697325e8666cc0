#include "attention_store.hpp"

#include "bf16.hpp"

namespace triton_inflight {
namespace {

template <typename To, typename From>
To convert(From value) {
  if constexpr (sizeof(To) == sizeof(From)) {
    return value;
  } else if constexpr (sizeof(To) < sizeof(From)) {
    return float_to_bf16(value);
  } else {
    return bf16_to_float(value);
  }
}

template <typename Cell>
constexpr Index kPair = sizeof(Cell) == 2 ? 2 : 1;

template <typename Cell, typename From>
void store_key(Cell* keys, const PoolLayout& layout, Index cell, const From* from) {
  constexpr Index pair = kPair<Cell>;
  Cell* column = keys + cell * pair;
  const Index step = layout.tokens_per_block * pair;
  for (Index i = 0; i < layout.key_width; ++i) column[i / pair * step + i % pair] = convert<Cell>(from[i]);
  if (layout.key_width % pair != 0) column[layout.key_width / pair * step + 1] = Cell{0};
}

// The next cell of the pair is not taken yet; it is cleared, since whatever a former sequence left there is
// multiplied by a weight of 0, which only a finite number survives.
template <typename Cell, typename From>
void store_value(Cell* values, const PoolLayout& layout, Index cell, const From* from) {
  constexpr Index pair = kPair<Cell>;
  Cell* row = values + cell / pair * layout.padded_value_width() * pair;
  for (Index i = 0; i < layout.value_width; ++i) row[i * pair + cell % pair] = convert<Cell>(from[i]);
  if (pair == 2 && cell % 2 == 0) {
    for (Index i = 0; i < layout.value_width; ++i) row[i * 2 + 1] = Cell{0};
  }
}

template <typename Cell, typename Key, typename Value>
void store(const LayerCall& call, const SequenceRun& run, Index kv_head, Index first, Index end) {
  const PoolLayout& layout = call.layout;
  for (Index token = first; token < end; ++token) {
    const Index position = run.first_position + token;
    const Index block = run.blocks[position / layout.tokens_per_block];
    const Index cell = position % layout.tokens_per_block;
    Cell* keys = static_cast<Cell*>(call.pool) + block * layout.block_size() + kv_head * layout.head_size();
    const Index row = run.first_token + token;
    store_key(keys, layout, cell,
              static_cast<const Key*>(call.keys.data) + row * call.keys.token_stride +
                  kv_head * call.keys.head_stride);
    store_value(keys + layout.keys_size(), layout, cell,
                static_cast<const Value*>(call.values.data) + row * call.values.token_stride +
                    kv_head * call.values.head_stride);
  }
}

template <typename Cell>
void store_any(const LayerCall& call, const SequenceRun& run, Index kv_head, Index first, Index end) {
  if (call.keys.bf16) {
    store<Cell, std::uint16_t, std::uint16_t>(call, run, kv_head, first, end);
  } else {
    store<Cell, float, float>(call, run, kv_head, first, end);
  }
}

}  // namespace

void store_tokens(const LayerCall& call, const SequenceRun& run, Index kv_head, Index first, Index end) {
  if (call.layout.bf16) {
    store_any<std::uint16_t>(call, run, kv_head, first, end);
  } else {
    store_any<float>(call, run, kv_head, first, end);
  }
}

}  // namespace triton_inflight

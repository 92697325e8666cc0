// The KV-state store: which blocks hold the keys and values of each sequence. The tensors are the caller's.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "block_pool.hpp"

namespace triton_inflight {

using SequenceId = std::uint64_t;
using Choice = std::uint32_t;

// A key that has no table.
class UnknownKey : public std::out_of_range {
 public:
  using std::out_of_range::out_of_range;
};

// The rows of a step: row i runs `counts[i]` tokens of its key, the first at position `starts[i]`.
struct Rows {
  std::span<const SequenceId> sequences;
  std::span<const Choice> choices;
  std::span<const std::int64_t> starts;
  std::span<const std::int64_t> counts;
};

// The size of a step's arrays: all cells together, and the widest table among the rows.
struct LayoutShape {
  std::int64_t num_cells = 0;
  std::int64_t table_width = 0;
};

// A key (sequence ID, choice) has a table of blocks; position p of the key lives in
//
//   cell = table[p / tokens_per_block] * tokens_per_block + p % tokens_per_block
//
// Blocks are shared between the choices of a sequence (fork) and between sequences (equal prefixes). What two
// tables share is always a common beginning. Errors: std::invalid_argument for a bad argument, UnknownKey for
// a key without table, std::out_of_range for cells that were never reserved. Not thread-safe.
class KVStore {
 public:
  using Copies = std::vector<std::pair<BlockId, BlockId>>;

  KVStore(std::int64_t num_blocks, std::int64_t tokens_per_block, bool reuse, BlockHash hash = &hash_block);

  // Makes cells [start, length) exist, and everything from `start` on writable: blocks that others share, or
  // that content still leads to, are replaced by copies. Returns the (source, destination) pairs to copy
  // before anything is written, or nothing, with nothing changed, when the blocks do not suffice.
  std::optional<Copies> reserve(SequenceId sequence, Choice choice, std::int64_t start, std::int64_t length);
  // The most blocks that reserve() would take for the same arguments.
  std::int64_t blocks_needed(SequenceId sequence, Choice choice, std::int64_t start,
                             std::int64_t length) const;

  // First the shape (which checks every row), then the arrays: cells has num_cells entries, tables is
  // rows x table_width, zero where a row is shorter.
  LayoutShape layout_shape(const Rows& rows) const;
  void fill_layout(const Rows& rows, LayoutShape shape, std::int64_t* cells, BlockId* tables) const;

  void trim(SequenceId sequence, Choice choice, std::int64_t length);
  void fork(SequenceId sequence, Choice source, Choice destination);
  // Both return how many blocks nobody references any more; an unknown key gives back 0.
  std::int64_t drop(SequenceId sequence, Choice choice);
  std::int64_t free(SequenceId sequence);

  // Makes the full blocks among the first `computed` of `tokens` findable. A block whose content is already
  // findable elsewhere is exchanged for that one, in every choice that shares it.
  void publish(SequenceId sequence, Choice choice, TokenView tokens, std::int64_t computed);
  // Gives a new key the longest findable beginning of `tokens`, always leaving the last token to compute.
  // Returns its number of tokens; at 0 the key stays unknown.
  std::int64_t match_prefix(SequenceId sequence, Choice choice, TokenView tokens);

  const std::vector<BlockId>& blocks(SequenceId sequence, Choice choice) const;
  std::vector<SequenceId> live() const;
  std::int64_t num_blocks() const { return pool_.num_blocks(); }
  std::int64_t num_free() const { return pool_.num_free(); }
  std::int64_t num_held() const { return pool_.num_blocks() - pool_.num_free(); }
  std::int64_t num_cached() const { return pool_.num_cached(); }
  std::int64_t tokens_per_block() const { return tokens_per_block_; }
  bool reuse() const { return reuse_; }

  // Verifies every invariant, O(all); throws std::runtime_error naming the broken one.
  void check() const;

 private:
  struct Table {
    std::vector<BlockId> blocks;
    std::int64_t length = 0;        // reserved cells; blocks.size() blocks cover them
    std::size_t num_published = 0;  // leading blocks that publish() is done with
  };
  using Choices = std::map<Choice, Table>;

  const Table* lookup(SequenceId sequence, Choice choice) const;
  const Table& table_of(SequenceId sequence, Choice choice) const;
  Table& table_of(SequenceId sequence, Choice choice);
  std::size_t blocks_covering(std::int64_t length) const;
  Copies make_writable(Table& table, std::size_t first);
  std::int64_t copies_needed(const Table& table, std::size_t first) const;
  std::int64_t release_past(Table& table, std::size_t keep);
  static void check_table(const Table& table, const BlockPool& pool, SequenceId sequence, Choice choice);

  std::int64_t tokens_per_block_;
  bool reuse_;
  BlockPool pool_;
  std::unordered_map<SequenceId, Choices> sequences_;
};

}  // namespace triton_inflight

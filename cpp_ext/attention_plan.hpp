// The work of one step, shared by all attention calls with the same heads and window.
#pragma once

#include <span>
#include <vector>

#include "attention_types.hpp"

namespace triton_inflight {

// What is asked of a plan; the arrays are read during construction only.
struct PlanRequest {
  std::span<const std::int32_t> tables;  // one row of blocks per sequence
  Index table_width;
  std::span<const Index> starts;   // rows of the flat batch: sequence i has starts[i] to starts[i + 1]
  std::span<const Index> lengths;  // cells of each sequence after the step
  Index num_blocks;
  Index tokens_per_block;
  Index query_heads;
  Index kv_heads;
  Index window;  // 0 is all
  int threads;
};

// Tokens to store before anything attends: a piece of a sequence that several items read.
struct StorePiece {
  Index sequence;
  Index first;
  Index end;
};

// Items that share rows: each leaves its spans' states, and the last to end folds them all.
struct ItemGroup {
  WorkItem item;  // any of them, for its rows
  Index num_items;
  Index first_span;
  Index num_spans;
  Index first_state;  // in units of one row's state
};

class AttentionPlan {
 public:
  // Throws std::invalid_argument for arrays that do not fit together, blocks that do not exist, or heads and
  // block sizes that the kernels cannot work with.
  explicit AttentionPlan(const PlanRequest& request);
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  const std::vector<SequenceRun>& runs() const { return runs_; }
  const std::vector<StorePiece>& pieces() const { return pieces_; }
  const std::vector<WorkItem>& items() const { return items_; }
  const std::vector<ItemGroup>& groups() const { return groups_; }
  Index num_tokens() const { return num_tokens_; }
  Index num_state_rows() const { return num_state_rows_; }
  Index num_blocks() const { return num_blocks_; }
  Index tokens_per_block() const { return tokens_per_block_; }
  Index query_heads() const { return query_heads_; }
  Index kv_heads() const { return kv_heads_; }
  Index window() const { return window_; }
  int threads() const { return threads_; }

 private:
  // Rows of one key head that attend together, and the cells that any of them sees.
  struct Tile {
    std::int32_t sequence;
    Index first_row;
    Index num_rows;
    Index first_span;
    Index end_span;
    Index cost;
    bool only;  // no other tile has the same sequence
  };

  void read_runs(const PlanRequest& request);
  std::vector<Tile> make_tiles() const;
  void make_items(const std::vector<Tile>& tiles);
  void split(const Tile& tile, std::int32_t head, Index parts);

  std::vector<std::int32_t> blocks_;
  std::vector<SequenceRun> runs_;
  std::vector<StorePiece> pieces_;
  std::vector<WorkItem> items_;  // costliest first
  std::vector<ItemGroup> groups_;
  Index num_tokens_;
  Index num_state_rows_ = 0;
  Index num_blocks_;
  Index tokens_per_block_;
  Index query_heads_;
  Index kv_heads_;
  Index window_;
  int threads_;
};

}  // namespace triton_inflight

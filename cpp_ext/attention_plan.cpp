#include "attention_plan.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace triton_inflight {
namespace {

// Tokens of a piece to store; even, as store_tokens wants.
constexpr Index kStorePiece = 64;

// Fetching a cell costs about as much as multiplying it with this many rows.
constexpr Index kFetchRows = 8;

// Items per thread that are enough for an even load.
constexpr Index kItemsPerThread = 4;

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument("attention plan: " + message);
}

Index divide_up(Index a, Index b) { return (a + b - 1) / b; }

}  // namespace

AttentionPlan::AttentionPlan(const PlanRequest& request)
    : num_tokens_(request.starts.empty() ? 0 : request.starts.back()),
      num_blocks_(request.num_blocks),
      tokens_per_block_(request.tokens_per_block),
      query_heads_(request.query_heads),
      kv_heads_(request.kv_heads),
      window_(request.window),
      threads_(std::max(request.threads, 1)) {
  require(tokens_per_block_ >= 16 && tokens_per_block_ % 16 == 0,
          "tokens_per_block is " + std::to_string(tokens_per_block_) + ", must be a multiple of 16");
  require(kv_heads_ >= 1 && query_heads_ >= kv_heads_ && query_heads_ % kv_heads_ == 0,
          std::to_string(query_heads_) + " query heads cannot share " + std::to_string(kv_heads_) +
              " key heads evenly");
  require(window_ >= 0, "window is " + std::to_string(window_) + ", must be at least 1, or 0 for none");
  read_runs(request);
  make_items(make_tiles());
}

void AttentionPlan::read_runs(const PlanRequest& request) {
  const std::size_t count = request.lengths.size();
  require(request.starts.size() == count + 1 && request.starts[0] == 0,
          "starts must begin with 0 and have one entry more than lengths");
  require(static_cast<Index>(request.tables.size()) == static_cast<Index>(count) * request.table_width,
          "tables must have one row per sequence");
  std::vector<std::size_t> offsets;
  for (std::size_t i = 0; i < count; ++i) {
    const Index tokens = request.starts[i + 1] - request.starts[i];
    const Index length = request.lengths[i];
    const Index used = divide_up(length, tokens_per_block_);
    require(tokens >= 1 && length >= tokens && used <= request.table_width,
            "sequence " + std::to_string(i) + " runs " + std::to_string(tokens) + " tokens and has " +
                std::to_string(length) + " cells in a table of " + std::to_string(request.table_width) +
                " blocks");
    const auto row = request.tables.subspan(i * static_cast<std::size_t>(request.table_width),
                                            static_cast<std::size_t>(used));
    for (const std::int32_t block : row) {
      require(block >= 0 && block < num_blocks_, "block " + std::to_string(block) + " of sequence " +
                                                     std::to_string(i) + " is not one of the " +
                                                     std::to_string(num_blocks_) + " there are");
    }
    offsets.push_back(blocks_.size());
    blocks_.insert(blocks_.end(), row.begin(), row.end());
    runs_.push_back({request.starts[i], tokens, length - tokens, nullptr});
  }
  for (std::size_t i = 0; i < count; ++i) runs_[i].blocks = blocks_.data() + offsets[i];
}

std::vector<AttentionPlan::Tile> AttentionPlan::make_tiles() const {
  const Index per_head = query_heads_ / kv_heads_;
  const Index span_cells = blocks_per_span(tokens_per_block_) * tokens_per_block_;
  std::vector<Tile> tiles;
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const SequenceRun& run = runs_[i];
    const Index rows = run.count * per_head;
    for (Index row = 0; row < rows; row += kTileRows) {
      const Index num_rows = std::min(kTileRows, rows - row);
      const Index first_position = run.first_position + row / per_head;
      const Index end = run.first_position + (row + num_rows - 1) / per_head + 1;
      const Index begin = window_ > 0 ? std::max<Index>(first_position - window_ + 1, 0) : 0;
      tiles.push_back({static_cast<std::int32_t>(i), row, num_rows, begin / span_cells,
                       divide_up(end, span_cells), (end - begin) * (num_rows + kFetchRows),
                       rows <= kTileRows});
    }
  }
  return tiles;
}

// Splitting along the cells changes no result (see kSpanCells), so it may follow the load alone.
void AttentionPlan::make_items(const std::vector<Tile>& tiles) {
  Index total = 0;
  for (const Tile& tile : tiles) total += tile.cost * kv_heads_;
  const Index target = threads_ == 1 ? total : std::max<Index>(total / (threads_ * kItemsPerThread), 1);

  std::vector<Tile> sorted = tiles;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
  std::vector<bool> stored_first(runs_.size(), false);
  for (const Tile& tile : sorted) {
    const Index parts = std::min(divide_up(tile.cost, target), tile.end_span - tile.first_span);
    const bool alone = tile.only && parts == 1;
    if (!alone) stored_first[static_cast<std::size_t>(tile.sequence)] = true;
    for (std::int32_t head = 0; head < kv_heads_; ++head) {
      if (parts > 1) {
        split(tile, head, parts);
      } else {
        items_.push_back(
            {tile.sequence, head, tile.first_row, tile.num_rows, tile.first_span, tile.end_span, -1, alone});
      }
    }
  }
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    if (!stored_first[i]) continue;
    const SequenceRun& run = runs_[i];
    Index first = 0;
    while (first < run.count) {
      const Index end = std::min(first + kStorePiece - (run.first_position + first) % 2, run.count);
      pieces_.push_back({static_cast<Index>(i), first, end});
      first = end;
    }
  }
}

void AttentionPlan::split(const Tile& tile, std::int32_t head, Index parts) {
  const Index spans = tile.end_span - tile.first_span;
  const std::int32_t group = static_cast<std::int32_t>(groups_.size());
  for (Index part = 0; part < parts; ++part) {
    items_.push_back({tile.sequence, head, tile.first_row, tile.num_rows,
                      tile.first_span + part * spans / parts, tile.first_span + (part + 1) * spans / parts,
                      group, false});
  }
  groups_.push_back({items_.back(), parts, tile.first_span, spans, num_state_rows_});
  num_state_rows_ += spans * tile.num_rows;
}

}  // namespace triton_inflight

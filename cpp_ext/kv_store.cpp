#include "kv_store.hpp"

#include <algorithm>
#include <limits>
#include <string>

namespace triton_inflight {
namespace {

std::string name(SequenceId sequence, Choice choice) {
  return "sequence " + std::to_string(sequence) + ", choice " + std::to_string(choice);
}

std::int32_t positive_int32(std::int64_t value, const char* what) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int32_t>::max();
  if (value < 1 || value > kLargest) {
    throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + ", allowed is 1 to " +
                                std::to_string(kLargest));
  }
  return static_cast<std::int32_t>(value);
}

}  // namespace

KVStore::KVStore(std::int64_t num_blocks, std::int64_t tokens_per_block, bool reuse, BlockHash hash)
    : tokens_per_block_(tokens_per_block),
      reuse_(reuse),
      pool_(positive_int32(num_blocks, "num_blocks"), positive_int32(tokens_per_block, "tokens_per_block"),
            reuse, hash) {}

std::optional<KVStore::Copies> KVStore::reserve(SequenceId sequence, Choice choice, std::int64_t start,
                                                std::int64_t length) {
  if (blocks_needed(sequence, choice, start, length) > pool_.num_free()) return std::nullopt;
  Table& table = sequences_[sequence][choice];
  const auto first = static_cast<std::size_t>(start / tokens_per_block_);
  Copies copies = make_writable(table, first);
  for (std::size_t i = table.blocks.size(); i < blocks_covering(length); ++i)
    table.blocks.push_back(pool_.take());
  table.length = std::max(table.length, length);
  table.num_published = std::min(table.num_published, first);
  return copies;
}

std::int64_t KVStore::blocks_needed(SequenceId sequence, Choice choice, std::int64_t start,
                                    std::int64_t length) const {
  static const Table kEmpty;
  const Table* known = lookup(sequence, choice);
  const Table& table = known != nullptr ? *known : kEmpty;
  if (start < 0 || start > table.length || length < start) {
    throw std::invalid_argument(name(sequence, choice) + ": cannot reserve cells " + std::to_string(start) +
                                " to " + std::to_string(length) + "; the start must be within the " +
                                std::to_string(table.length) +
                                " cells reserved so far, the end not before it");
  }
  const std::size_t wanted = std::max(blocks_covering(length), table.blocks.size());
  const auto first = static_cast<std::size_t>(start / tokens_per_block_);
  return static_cast<std::int64_t>(wanted - table.blocks.size()) + copies_needed(table, first);
}

// A block may be written in place when no other table and no findable child depends on it. From the tail to
// the head, so that a child which stops being findable no longer counts for its parent, and so that the
// sources are given back child first.
KVStore::Copies KVStore::make_writable(Table& table, std::size_t first) {
  Copies copies;
  for (std::size_t i = table.blocks.size(); i-- > first;) {
    BlockId& block = table.blocks[i];
    if (pool_.references(block) > 1 || pool_.children(block) > 0) {
      const BlockId source = block;
      block = pool_.take();
      copies.emplace_back(source, block);
    } else if (pool_.findable(block)) {
      pool_.unpublish(block);
    }
  }
  // Only now, so that no source can become a destination of the same call.
  for (const auto& [source, destination] : copies) pool_.release(source);
  return copies;
}

// The copies make_writable() makes, or more: a child may be evicted meanwhile.
std::int64_t KVStore::copies_needed(const Table& table, std::size_t first) const {
  std::int64_t copies = 0;
  std::int32_t unpublished_children = 0;
  for (std::size_t i = table.blocks.size(); i-- > first;) {
    const BlockId block = table.blocks[i];
    const bool copy = pool_.references(block) > 1 || pool_.children(block) > unpublished_children;
    copies += copy ? 1 : 0;
    unpublished_children = !copy && pool_.findable(block) ? 1 : 0;
  }
  return copies;
}

LayoutShape KVStore::layout_shape(const Rows& rows) const {
  LayoutShape shape;
  for (std::size_t row = 0; row < rows.sequences.size(); ++row) {
    const std::int64_t start = rows.starts[row];
    const std::int64_t count = rows.counts[row];
    const Table& table = table_of(rows.sequences[row], rows.choices[row]);
    if (start < 0 || count < 0 || start > table.length || count > table.length - start) {
      throw std::out_of_range(name(rows.sequences[row], rows.choices[row]) + ": " + std::to_string(count) +
                              " tokens from position " + std::to_string(start) + " are not within the " +
                              std::to_string(table.length) + " cells reserved");
    }
    shape.num_cells += count;
    shape.table_width =
        std::max(shape.table_width, static_cast<std::int64_t>(blocks_covering(start + count)));
  }
  return shape;
}

void KVStore::fill_layout(const Rows& rows, LayoutShape shape, std::int64_t* cells, BlockId* tables) const {
  for (std::size_t row = 0; row < rows.sequences.size(); ++row) {
    const std::vector<BlockId>& blocks = table_of(rows.sequences[row], rows.choices[row]).blocks;
    const std::int64_t end = rows.starts[row] + rows.counts[row];
    for (std::int64_t position = rows.starts[row]; position < end; ++position) {
      const BlockId block = blocks[static_cast<std::size_t>(position / tokens_per_block_)];
      *cells++ = block * tokens_per_block_ + position % tokens_per_block_;
    }
    const auto used = static_cast<std::ptrdiff_t>(blocks_covering(end));
    BlockId* const row_end = tables + shape.table_width;
    std::fill(std::copy(blocks.begin(), blocks.begin() + used, tables), row_end, 0);
    tables = row_end;
  }
}

void KVStore::trim(SequenceId sequence, Choice choice, std::int64_t length) {
  Table& table = table_of(sequence, choice);
  if (length < 0 || length > table.length) {
    throw std::invalid_argument(name(sequence, choice) + ": cannot trim to " + std::to_string(length) +
                                " cells, allowed is 0 to the " + std::to_string(table.length) + " reserved");
  }
  release_past(table, blocks_covering(length));
  table.length = length;
  table.num_published = std::min(table.num_published, static_cast<std::size_t>(length / tokens_per_block_));
}

void KVStore::fork(SequenceId sequence, Choice source, Choice destination) {
  const Table& from = table_of(sequence, source);
  const auto [to, is_new] = sequences_[sequence].try_emplace(destination, from);
  if (!is_new) throw std::invalid_argument(name(sequence, destination) + ": cannot fork onto it, it exists");
  for (const BlockId block : to->second.blocks) pool_.reference(block);
}

std::int64_t KVStore::drop(SequenceId sequence, Choice choice) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return 0;
  Choices& choices = found->second;
  const auto entry = choices.find(choice);
  if (entry == choices.end()) return 0;
  const std::int64_t given_back = release_past(entry->second, 0);
  choices.erase(entry);
  if (choices.empty()) sequences_.erase(found);
  return given_back;
}

std::int64_t KVStore::free(SequenceId sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return 0;
  std::int64_t given_back = 0;
  for (auto& [choice, table] : found->second) given_back += release_past(table, 0);
  sequences_.erase(found);
  return given_back;
}

void KVStore::publish(SequenceId sequence, Choice choice, TokenView tokens, std::int64_t computed) {
  Table& table = table_of(sequence, choice);
  if (computed < 0 || computed > table.length) {
    throw std::invalid_argument(name(sequence, choice) + ": computed is " + std::to_string(computed) +
                                ", allowed is 0 to the " + std::to_string(table.length) + " cells reserved");
  }
  if (!reuse_) return;
  const auto full = static_cast<std::size_t>(std::min(tokens.size(), computed) / tokens_per_block_);
  for (; table.num_published < full; ++table.num_published) {
    const std::size_t i = table.num_published;
    const BlockId mine = table.blocks[i];
    const BlockId parent = i == 0 ? kNoBlock : table.blocks[i - 1];
    const TokenView content =
        tokens.slice(static_cast<std::int64_t>(i) * tokens_per_block_, tokens_per_block_);
    const BlockId known = pool_.find(parent, content);
    if (known == mine) continue;
    if (pool_.findable(mine)) {
      throw std::invalid_argument(name(sequence, choice) + ": the tokens of its block " + std::to_string(i) +
                                  " differ from those another choice published for it");
    }
    if (known == kNoBlock) {
      pool_.publish(mine, parent, content);
      continue;
    }
    // The choices that share the block must all change over: who holds its children has to hold `known`.
    for (auto& [other, sharer] : sequences_.at(sequence)) {
      if (i >= sharer.blocks.size() || sharer.blocks[i] != mine) continue;
      sharer.blocks[i] = known;
      pool_.reference(known);
      pool_.release(mine);
    }
  }
}

std::int64_t KVStore::match_prefix(SequenceId sequence, Choice choice, TokenView tokens) {
  if (lookup(sequence, choice) != nullptr) {
    throw std::invalid_argument(name(sequence, choice) +
                                ": a prefix is matched before anything else, it exists");
  }
  if (!reuse_) return 0;
  Table matched;
  BlockId last = kNoBlock;
  while (matched.length + tokens_per_block_ < tokens.size()) {
    last = pool_.find(last, tokens.slice(matched.length, tokens_per_block_));
    if (last == kNoBlock) break;
    matched.blocks.push_back(last);
    matched.length += tokens_per_block_;
  }
  const std::int64_t length = matched.length;
  if (length == 0) return 0;
  for (const BlockId block : matched.blocks) pool_.reference(block);
  matched.num_published = matched.blocks.size();
  sequences_[sequence].emplace(choice, std::move(matched));
  return length;
}

const std::vector<BlockId>& KVStore::blocks(SequenceId sequence, Choice choice) const {
  return table_of(sequence, choice).blocks;
}

std::vector<SequenceId> KVStore::live() const {
  std::vector<SequenceId> ids;
  ids.reserve(sequences_.size());
  for (const auto& [sequence, choices] : sequences_) ids.push_back(sequence);
  std::sort(ids.begin(), ids.end());
  return ids;
}

void KVStore::check() const {
  std::vector<std::int32_t> references(static_cast<std::size_t>(pool_.num_blocks()), 0);
  for (const auto& [sequence, choices] : sequences_) {
    if (choices.empty())
      throw std::runtime_error("KV store check: sequence " + std::to_string(sequence) + " is empty");
    for (const auto& [choice, table] : choices) {
      if (table.blocks.size() != blocks_covering(table.length)) {
        throw std::runtime_error("KV store check: " + name(sequence, choice) + ": " +
                                 std::to_string(table.blocks.size()) + " blocks for " +
                                 std::to_string(table.length) + " cells");
      }
      check_table(table, pool_, sequence, choice);
      for (const BlockId block : table.blocks) ++references[static_cast<std::size_t>(block)];
    }
  }
  pool_.check(references);
}

// The findable blocks of a table are its beginning, each the parent of the next.
void KVStore::check_table(const Table& table, const BlockPool& pool, SequenceId sequence, Choice choice) {
  BlockId before = kNoBlock;
  bool findable = true;
  for (std::size_t i = 0; i < table.blocks.size(); ++i) {
    const BlockId block = table.blocks[i];
    const bool in_chain = pool.findable(block) && findable && pool.parent(block) == before;
    if (pool.findable(block) != in_chain || (i < table.num_published && !in_chain)) {
      throw std::runtime_error("KV store check: " + name(sequence, choice) + ": block " +
                               std::to_string(block) + " at place " + std::to_string(i) +
                               " breaks the chain of findable blocks");
    }
    findable = in_chain;
    before = block;
  }
}

const KVStore::Table* KVStore::lookup(SequenceId sequence, Choice choice) const {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return nullptr;
  const auto entry = found->second.find(choice);
  return entry == found->second.end() ? nullptr : &entry->second;
}

const KVStore::Table& KVStore::table_of(SequenceId sequence, Choice choice) const {
  const Table* known = lookup(sequence, choice);
  if (known == nullptr) {
    throw UnknownKey(name(sequence, choice) +
                     " is not in the store: nothing was reserved for it, or it was freed");
  }
  return *known;
}

KVStore::Table& KVStore::table_of(SequenceId sequence, Choice choice) {
  return const_cast<Table&>(std::as_const(*this).table_of(sequence, choice));
}

std::size_t KVStore::blocks_covering(std::int64_t length) const {
  return static_cast<std::size_t>(length / tokens_per_block_ + (length % tokens_per_block_ != 0 ? 1 : 0));
}

std::int64_t KVStore::release_past(Table& table, std::size_t keep) {
  std::int64_t given_back = 0;
  for (; table.blocks.size() > keep; table.blocks.pop_back()) {
    given_back += pool_.release(table.blocks.back()) ? 1 : 0;
  }
  return given_back;
}

}  // namespace triton_inflight

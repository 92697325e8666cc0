#include "block_pool.hpp"

#include <bit>
#include <stdexcept>
#include <string>

namespace triton_inflight {
namespace {

// What the first block of a chain is chained to.
constexpr std::uint64_t kChainStart = 0x9e3779b97f4a7c15;

[[noreturn]] void broken(BlockId block, const std::string& what) {
  throw std::runtime_error("KV store check: block " + std::to_string(block) + ": " + what);
}

bool equal(TokenView left, TokenView right) {
  for (std::int64_t i = 0; i < left.size(); ++i) {
    if (left[i] != right[i]) return false;
  }
  return true;
}

}  // namespace

std::uint64_t hash_block(std::uint64_t previous, TokenView tokens) {
  std::uint64_t hash = previous;
  for (std::int64_t i = 0; i < tokens.size(); ++i) {
    // One round of the SplitMix64 generator's output function (Steele, Lea, Flood 2014) per token.
    hash ^= static_cast<std::uint64_t>(tokens[i]) + 0x9e3779b97f4a7c15;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
    hash ^= hash >> 31;
  }
  return hash;
}

BlockPool::BlockPool(std::int32_t num_blocks, std::int32_t tokens_per_block, bool reuse, BlockHash hash)
    : tokens_per_block_(tokens_per_block), hash_(hash), blocks_(static_cast<std::size_t>(num_blocks)) {
  free_.reserve(blocks_.size());
  for (BlockId block = num_blocks; block-- > 0;) free_.push_back(block);  // the lowest is taken first
  if (reuse) {
    buckets_.assign(std::bit_ceil(blocks_.size()), kNoBlock);
    tokens_.resize(blocks_.size() * static_cast<std::size_t>(tokens_per_block));
  }
}

BlockId BlockPool::take() {
  BlockId block = oldest_;
  if (!free_.empty()) {
    block = free_.back();
    free_.pop_back();
  } else {
    uncache(block);
    unpublish(block);
  }
  at(block).references = 1;
  return block;
}

void BlockPool::reference(BlockId block) {
  if (at(block).references++ == 0) uncache(block);
}

bool BlockPool::release(BlockId block) {
  if (--at(block).references > 0) return false;
  if (at(block).findable) {
    cache(block);
  } else {
    free_.push_back(block);
  }
  return true;
}

BlockId BlockPool::find(BlockId parent, TokenView tokens) const {
  const std::uint64_t hash = chained_hash(parent, tokens);
  BlockId block = buckets_[bucket(hash)];
  while (block != kNoBlock) {
    const Block& candidate = at(block);
    if (candidate.hash == hash && candidate.parent == parent && equal(content(block), tokens)) break;
    block = candidate.next_in_bucket;
  }
  return block;
}

void BlockPool::publish(BlockId block, BlockId parent, TokenView tokens) {
  Block& state = at(block);
  state.findable = true;
  state.parent = parent;
  state.hash = chained_hash(parent, tokens);
  if (parent != kNoBlock) ++at(parent).children;
  const std::int64_t first = std::int64_t{block} * tokens_per_block_;
  for (std::int64_t i = 0; i < tokens.size(); ++i) tokens_[static_cast<std::size_t>(first + i)] = tokens[i];
  BlockId& head = buckets_[bucket(state.hash)];
  state.next_in_bucket = head;
  head = block;
}

void BlockPool::unpublish(BlockId block) {
  Block& state = at(block);
  BlockId* link = &buckets_[bucket(state.hash)];
  while (*link != block) link = &at(*link).next_in_bucket;
  *link = state.next_in_bucket;
  if (state.parent != kNoBlock) --at(state.parent).children;
  state.findable = false;
  state.parent = kNoBlock;
  state.next_in_bucket = kNoBlock;
}

std::uint64_t BlockPool::chained_hash(BlockId parent, TokenView tokens) const {
  return hash_(parent == kNoBlock ? kChainStart : at(parent).hash, tokens);
}

TokenView BlockPool::content(BlockId block) const {
  const std::span<const std::int64_t> all(tokens_);
  const auto width = static_cast<std::size_t>(tokens_per_block_);
  return TokenView(all.subspan(static_cast<std::size_t>(block) * width, width));
}

void BlockPool::cache(BlockId block) {
  at(block).older = newest_;
  at(block).newer = kNoBlock;
  (newest_ == kNoBlock ? oldest_ : at(newest_).newer) = block;
  newest_ = block;
  ++num_cached_;
}

void BlockPool::uncache(BlockId block) {
  const Block& state = at(block);
  (state.older == kNoBlock ? oldest_ : at(state.older).newer) = state.newer;
  (state.newer == kNoBlock ? newest_ : at(state.newer).older) = state.older;
  --num_cached_;
}

void BlockPool::check(std::span<const std::int32_t> expected) const {
  for (BlockId block = 0; block < num_blocks(); ++block) {
    const std::int32_t held = expected[static_cast<std::size_t>(block)];
    if (references(block) != held) {
      broken(block, "counts " + std::to_string(references(block)) + " references, the tables hold " +
                        std::to_string(held));
    }
  }
  std::vector<bool> unreferenced(blocks_.size(), false);
  check_free(unreferenced);
  check_cached(unreferenced);
  for (BlockId block = 0; block < num_blocks(); ++block) {
    if (unreferenced[static_cast<std::size_t>(block)] == (references(block) > 0)) {
      broken(block,
             references(block) > 0 ? "held, and also free or cached" : "lost: not held, free or cached");
    }
  }
  check_findable();
}

void BlockPool::check_free(std::vector<bool>& unreferenced) const {
  for (const BlockId block : free_) {
    if (unreferenced[static_cast<std::size_t>(block)]) broken(block, "twice in the free stack");
    if (findable(block)) broken(block, "findable, but in the free stack");
    unreferenced[static_cast<std::size_t>(block)] = true;
  }
}

void BlockPool::check_cached(std::vector<bool>& unreferenced) const {
  std::int32_t seen = 0;
  BlockId before = kNoBlock;
  for (BlockId block = oldest_; block != kNoBlock; block = at(block).newer) {
    if (unreferenced[static_cast<std::size_t>(block)]) broken(block, "twice cached, or cached and free");
    if (!findable(block)) broken(block, "cached, but not findable");
    if (at(block).older != before) broken(block, "broken link in the list of cached blocks");
    const BlockId above = parent(block);
    if (above != kNoBlock && unreferenced[static_cast<std::size_t>(above)]) {
      broken(block, "cached, would be evicted after its parent " + std::to_string(above));
    }
    unreferenced[static_cast<std::size_t>(block)] = true;
    before = block;
    ++seen;
  }
  if (before != newest_ || seen != num_cached_) {
    throw std::runtime_error("KV store check: the list of cached blocks has " + std::to_string(seen) +
                             " blocks, its count is " + std::to_string(num_cached_));
  }
}

void BlockPool::check_findable() const {
  std::vector<std::int32_t> in_buckets(blocks_.size(), 0);
  for (const BlockId head : buckets_) {
    for (BlockId block = head; block != kNoBlock; block = at(block).next_in_bucket) {
      if (++in_buckets[static_cast<std::size_t>(block)] > 1) broken(block, "twice in the hash table");
    }
  }
  std::vector<std::int32_t> counted(blocks_.size(), 0);
  for (BlockId block = 0; block < num_blocks(); ++block) {
    const BlockId above = parent(block);
    if (findable(block) != (in_buckets[static_cast<std::size_t>(block)] == 1)) {
      broken(block, "findable and the hash table disagree");
    }
    if (!findable(block)) continue;
    if (find(above, content(block)) != block) broken(block, "not found by its own tokens");
    if (above == kNoBlock) continue;
    if (!findable(above)) broken(block, "findable, but its parent is not");
    if (references(above) < references(block)) broken(block, "held by a table that does not hold its parent");
    ++counted[static_cast<std::size_t>(above)];
  }
  for (BlockId block = 0; block < num_blocks(); ++block) {
    if (children(block) != counted[static_cast<std::size_t>(block)])
      broken(block, "wrong number of children");
  }
}

}  // namespace triton_inflight

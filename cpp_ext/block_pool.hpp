// The blocks of the KV-state store: who is free, who is referenced, who can be found by its content.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace triton_inflight {

using BlockId = std::int32_t;
inline constexpr BlockId kNoBlock = -1;

// Token ids as the caller holds them (int32 or int64), read in place.
class TokenView {
 public:
  explicit TokenView(std::span<const std::int32_t> tokens)
      : narrow_(tokens.data()), size_(static_cast<std::int64_t>(tokens.size())) {}
  explicit TokenView(std::span<const std::int64_t> tokens)
      : wide_(tokens.data()), size_(static_cast<std::int64_t>(tokens.size())) {}

  std::int64_t size() const { return size_; }
  std::int64_t operator[](std::int64_t i) const { return wide_ != nullptr ? wide_[i] : narrow_[i]; }

  TokenView slice(std::int64_t first, std::int64_t count) const {
    TokenView view = *this;
    (wide_ != nullptr) ? void(view.wide_ += first) : void(view.narrow_ += first);
    view.size_ = count;
    return view;
  }

 private:
  const std::int32_t* narrow_ = nullptr;
  const std::int64_t* wide_ = nullptr;
  std::int64_t size_ = 0;
};

// Hash of a block's tokens, chained to the hash of the block before it.
using BlockHash = std::uint64_t (*)(std::uint64_t previous, TokenView tokens);
std::uint64_t hash_block(std::uint64_t previous, TokenView tokens);

// A block is in exactly one of three places:
//
//   free     no references, no known content       on the free stack
//   held     one or more references                in as many tables
//   cached   no references, findable by content    on the list of cached blocks, least recently used first
//
// Findable blocks form trees: a child continues the tokens of its parent. Two rules keep the trees whole:
// whoever references a findable block references its parent too, and references are given back child first.
// Therefore a cached block stands in the list before its parent, and what is evicted never has a child.
class BlockPool {
 public:
  BlockPool(std::int32_t num_blocks, std::int32_t tokens_per_block, bool reuse, BlockHash hash);

  std::int32_t num_blocks() const { return static_cast<std::int32_t>(blocks_.size()); }
  std::int32_t num_cached() const { return num_cached_; }
  // Blocks that take() can give: the free ones and the cached ones.
  std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()) + num_cached_; }

  std::int32_t references(BlockId block) const { return at(block).references; }
  bool findable(BlockId block) const { return at(block).findable; }
  std::int32_t children(BlockId block) const { return at(block).children; }

  // A block with one reference and no content: a free one, else the least recently used cached one.
  // num_free() must be above zero.
  BlockId take();
  void reference(BlockId block);
  // Gives one reference back; true when it was the last one.
  bool release(BlockId block);

  // The findable block that holds `tokens` right after the chain that ends in `parent` (kNoBlock: at the
  // start), or kNoBlock. Tokens and parent are compared, so a hash collision never gives a wrong block.
  BlockId find(BlockId parent, TokenView tokens) const;
  // Makes a referenced block findable; no other block may have this parent and these tokens.
  void publish(BlockId block, BlockId parent, TokenView tokens);
  // The opposite, for a block without children.
  void unpublish(BlockId block);

  // Throws std::runtime_error naming the first broken invariant. `expected` is the number of table entries
  // that refer to each block.
  void check(std::span<const std::int32_t> expected) const;
  BlockId parent(BlockId block) const { return at(block).parent; }

 private:
  struct Block {
    std::int32_t references = 0;
    std::int32_t children = 0;
    BlockId parent = kNoBlock;
    BlockId next_in_bucket = kNoBlock;
    BlockId older = kNoBlock;
    BlockId newer = kNoBlock;
    std::uint64_t hash = 0;
    bool findable = false;
  };

  Block& at(BlockId block) { return blocks_[static_cast<std::size_t>(block)]; }
  const Block& at(BlockId block) const { return blocks_[static_cast<std::size_t>(block)]; }

  std::uint64_t chained_hash(BlockId parent, TokenView tokens) const;
  std::size_t bucket(std::uint64_t hash) const { return hash & (buckets_.size() - 1); }
  TokenView content(BlockId block) const;
  void cache(BlockId block);
  void uncache(BlockId block);

  void check_free(std::vector<bool>& unreferenced) const;
  void check_cached(std::vector<bool>& unreferenced) const;
  void check_findable() const;

  std::int32_t tokens_per_block_;
  BlockHash hash_;
  std::vector<Block> blocks_;
  std::vector<BlockId> free_;
  // The cached list runs through Block::older and Block::newer.
  BlockId oldest_ = kNoBlock;
  BlockId newest_ = kNoBlock;
  std::int32_t num_cached_ = 0;
  // Hash table of the findable blocks: heads of lists that run through Block::next_in_bucket.
  std::vector<BlockId> buckets_;
  // Tokens of the findable blocks, tokens_per_block each; empty without reuse.
  std::vector<std::int64_t> tokens_;
};

}  // namespace triton_inflight

// Random verbs on the KV-state store, with every invariant checked and every key read back after each.
// Built with the address and undefined-behaviour sanitizers; prints what it did, exits 1 on the first fault.
//
//   kv_store_fuzz [iterations per store] [seed]
//
// A cell's content stands for keys and values, which depend on the whole text before them: it is a hash of
// all tokens up to the cell's own. So a block that is shared wrongly is seen, even where its own tokens are
// equal.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../kv_store.hpp"

namespace triton_inflight {
namespace {

std::uint64_t always_collides(std::uint64_t, TokenView) { return 7; }

using Key = std::pair<SequenceId, Choice>;

struct Text {
  std::vector<std::int64_t> tokens;
  std::int64_t computed = 0;
};

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

class Fuzz {
 public:
  Fuzz(std::int64_t num_blocks, std::int64_t width, bool reuse, BlockHash hash, std::uint32_t seed)
      : store_(num_blocks, width, reuse, hash),
        cells_(static_cast<std::size_t>(num_blocks * width), 0),
        random_(seed) {}

  void run(int iterations) {
    for (int i = 0; i < iterations; ++i) {
      verb();
      store_.check();
      for (const auto& [key, text] : texts_) read_back(key, text);
    }
    for (SequenceId id = 0; id < kSequences; ++id) end_sequence(id);
    store_.check();
    expect(store_.num_held() == 0 && store_.live().empty(), "blocks held at the end");
  }

  std::string summary() const {
    return std::to_string(num_refused_) + " refused, " + std::to_string(num_copies_) + " copies, " +
           std::to_string(num_matched_) + " tokens matched";
  }
  // Whether the run met what it is for.
  bool exercised() const {
    return num_refused_ > 0 && num_copies_ > 0 && (num_matched_ > 0) == store_.reuse();
  }

 private:
  static constexpr SequenceId kSequences = 6;
  static constexpr Choice kChoices = 3;

  std::int64_t draw(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }

  void verb() {
    const Key key(static_cast<SequenceId>(draw(0, kSequences - 1)),
                  static_cast<Choice>(draw(0, kChoices - 1)));
    switch (draw(0, 11)) {
      case 0:
        return end_sequence(key.first);
      case 1:
        return end_choice(key);
      case 2:
      case 3:
        return trim(key);
      case 4:
      case 5:
        return fork(key, static_cast<Choice>(draw(0, kChoices - 1)));
      case 6:
      case 7:
        return publish(key);
      default:
        return texts_.contains(key) ? extend(key, texts_.at(key)) : begin(key);
    }
  }

  void begin(const Key& key) {
    Text text;
    append_tokens(text);
    text.computed = store_.match_prefix(key.first, key.second, view(text));
    num_matched_ += text.computed;
    const auto size = static_cast<std::int64_t>(text.tokens.size());
    expect(text.computed % store_.tokens_per_block() == 0 && text.computed < size, "matched the last token");
    if (compute(key, text)) {
      texts_.emplace(key, std::move(text));
    } else {
      store_.drop(key.first, key.second);
    }
  }

  void extend(const Key& key, Text& text) {
    Text longer = text;
    if (draw(0, 3) == 0) cut(longer);  // written over, without a trim
    append_tokens(longer);
    if (compute(key, longer)) text = std::move(longer);
  }

  void cut(Text& text) {
    text.computed = std::max<std::int64_t>(0, text.computed - draw(0, 3 * store_.tokens_per_block()));
    text.tokens.resize(static_cast<std::size_t>(text.computed));
  }

  // Few different tokens in few different orders: equal beginnings are common.
  void append_tokens(Text& text) {
    for (std::int64_t count = draw(1, 3 * store_.tokens_per_block()); count > 0; --count) {
      text.tokens.push_back(draw(0, 9) == 0 ? 1 : 0);
    }
  }

  bool compute(const Key& key, Text& text) {
    const auto length = static_cast<std::int64_t>(text.tokens.size());
    const std::int64_t free_before = store_.num_free();
    const std::int64_t needed = store_.blocks_needed(key.first, key.second, text.computed, length);
    const auto copies = store_.reserve(key.first, key.second, text.computed, length);
    expect(copies.has_value() == (needed <= free_before), "blocks_needed and reserve disagree");
    if (!copies) {
      ++num_refused_;
      expect(store_.num_free() == free_before, "a refused reserve took blocks");
      return false;
    }
    expect(store_.num_free() >= free_before - needed, "reserve took more blocks than blocks_needed said");
    const auto width = static_cast<std::size_t>(store_.tokens_per_block());
    for (const auto& [source, destination] : *copies) {
      ++num_copies_;
      for (std::size_t i = 0; i < width; ++i) {
        cells_[static_cast<std::size_t>(destination) * width + i] =
            cells_[static_cast<std::size_t>(source) * width + i];
      }
    }
    const std::vector<std::uint64_t> contents = contents_of(text);
    const std::vector<std::int64_t> cells = layout(key, text.computed, length - text.computed);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      cells_[static_cast<std::size_t>(cells[i])] = contents[static_cast<std::size_t>(text.computed) + i];
    }
    text.computed = length;
    return true;
  }

  void trim(const Key& key) {
    const auto entry = texts_.find(key);
    if (entry == texts_.end()) return;
    Text& text = entry->second;
    cut(text);
    store_.trim(key.first, key.second, text.computed);
  }

  void fork(const Key& key, Choice destination) {
    const Key copy(key.first, destination);
    if (!texts_.contains(key) || copy == key) return;
    end_choice(copy);
    store_.fork(key.first, key.second, destination);
    texts_.emplace(copy, texts_.at(key));
  }

  void publish(const Key& key) {
    const auto entry = texts_.find(key);
    if (entry == texts_.end()) return;
    store_.publish(key.first, key.second, view(entry->second), draw(0, entry->second.computed));
  }

  void end_choice(const Key& key) {
    const std::int64_t free_before = store_.num_free();
    const std::int64_t given_back = store_.drop(key.first, key.second);
    expect(store_.num_free() == free_before + given_back, "drop miscounts");
    texts_.erase(key);
  }

  void end_sequence(SequenceId id) {
    const std::int64_t free_before = store_.num_free();
    const std::int64_t given_back = store_.free(id);
    expect(store_.num_free() == free_before + given_back, "free miscounts");
    std::erase_if(texts_, [id](const auto& entry) { return entry.first.first == id; });
  }

  void read_back(const Key& key, const Text& text) const {
    const std::vector<std::uint64_t> contents = contents_of(text);
    const std::vector<std::int64_t> cells = layout(key, 0, text.computed);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      expect(cells_[static_cast<std::size_t>(cells[i])] == contents[i],
             "sequence " + std::to_string(key.first) + ", choice " + std::to_string(key.second) +
                 ": position " + std::to_string(i) + " reads what another text wrote");
    }
  }

  std::vector<std::int64_t> layout(const Key& key, std::int64_t start, std::int64_t count) const {
    const Rows rows{{&key.first, 1}, {&key.second, 1}, {&start, 1}, {&count, 1}};
    const LayoutShape shape = store_.layout_shape(rows);
    std::vector<std::int64_t> cells(static_cast<std::size_t>(shape.num_cells));
    std::vector<BlockId> tables(static_cast<std::size_t>(shape.table_width));
    store_.fill_layout(rows, shape, cells.data(), tables.data());
    return cells;
  }

  static TokenView view(const Text& text) { return TokenView(std::span<const std::int64_t>(text.tokens)); }

  static std::vector<std::uint64_t> contents_of(const Text& text) {
    std::vector<std::uint64_t> contents;
    std::uint64_t content = 1;
    for (const std::int64_t token : text.tokens) {
      content = hash_block(content, TokenView(std::span<const std::int64_t>(&token, 1)));
      contents.push_back(content);
    }
    return contents;
  }

  KVStore store_;
  std::vector<std::uint64_t> cells_;
  std::map<Key, Text> texts_;
  std::mt19937 random_;
  std::int64_t num_refused_ = 0;
  std::int64_t num_copies_ = 0;
  std::int64_t num_matched_ = 0;
};

struct Case {
  const char* name;
  std::int64_t num_blocks;
  std::int64_t width;
  bool reuse;
  BlockHash hash;
};

int run_all(int iterations, std::uint32_t seed) {
  const Case cases[] = {
      {"reuse", 40, 4, true, &hash_block},
      {"reuse, every hash collides", 40, 4, true, &always_collides},
      {"reuse, two tokens a block", 36, 2, true, &hash_block},
      {"no reuse", 40, 4, false, &hash_block},
  };
  for (const Case& one : cases) {
    try {
      Fuzz fuzz(one.num_blocks, one.width, one.reuse, one.hash, seed);
      fuzz.run(iterations);
      std::printf("%s: %d verbs, %s\n", one.name, iterations, fuzz.summary().c_str());
      expect(fuzz.exercised(), "the run never met a full store, a copy or a match: it proves nothing");
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: %s\n", one.name, error.what());
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace triton_inflight

int main(int argc, char** argv) {
  const int iterations = argc > 1 ? std::stoi(argv[1]) : 5000;
  const auto seed = static_cast<std::uint32_t>(argc > 2 ? std::stoul(argv[2]) : 1);
  return triton_inflight::run_all(iterations, seed);
}

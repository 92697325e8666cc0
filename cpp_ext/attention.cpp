#include "attention.hpp"

#include <atomic>
#include <memory>
#include <vector>

#include "attention_kernel.hpp"
#include "attention_store.hpp"
#include "parallel.hpp"

namespace triton_inflight {
namespace {

// Memory of the calling thread, kept from one call to the next, aligned to a cache line.
float* scratch_memory(Index size) {
  constexpr std::size_t kAlignment = 64;
  thread_local std::vector<float> memory;
  const std::size_t wanted = static_cast<std::size_t>(size) + kAlignment / sizeof(float);
  if (memory.size() < wanted) memory.resize(wanted);
  void* start = memory.data();
  std::size_t room = memory.size() * sizeof(float);
  return static_cast<float*>(
      std::align(kAlignment, static_cast<std::size_t>(size) * sizeof(float), start, room));
}

class LayerAttention {
 public:
  LayerAttention(const AttentionPlan& plan, const LayerCall& call, Isa isa)
      : plan_(plan),
        call_(call),
        kernel_(attention_kernel(isa, call.layout.bf16)),
        row_state_(SpanState::size(1, call.layout.padded_value_width())),
        states_(static_cast<std::size_t>(plan.num_state_rows() * row_state_)),
        unfinished_(plan.groups().size()) {
    for (std::size_t i = 0; i < unfinished_.size(); ++i) unfinished_[i] = plan.groups()[i].num_items;
  }

  void run() {
    const Index heads = call_.layout.heads;
    parallel_for(plan_.threads(), static_cast<Index>(plan_.pieces().size()) * heads, [&](Index i) {
      const StorePiece& piece = plan_.pieces()[static_cast<std::size_t>(i / heads)];
      store_tokens(call_, run_of(piece.sequence), i % heads, piece.first, piece.end);
    });
    parallel_for(plan_.threads(), static_cast<Index>(plan_.items().size()),
                 [&](Index i) { run_item(plan_.items()[static_cast<std::size_t>(i)]); });
  }

 private:
  const SequenceRun& run_of(Index sequence) const { return plan_.runs()[static_cast<std::size_t>(sequence)]; }

  void run_item(const WorkItem& item) {
    const SequenceRun& run = run_of(item.sequence);
    float* scratch = scratch_memory(scratch_size(call_.layout));
    if (item.stores) store_tokens(call_, run, item.kv_head, 0, run.count);
    if (item.group < 0) {
      kernel_.attend(call_, run, item, scratch, nullptr);
      return;
    }
    const std::size_t number = static_cast<std::size_t>(item.group);
    const ItemGroup& group = plan_.groups()[number];
    float* states = states_.data() + group.first_state * row_state_;
    kernel_.attend(call_, run, item, scratch,
                   states + (item.first_span - group.first_span) * item.num_rows * row_state_);
    if (unfinished_[number].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      kernel_.finish(call_, run, group.item, scratch, states, group.num_spans);
    }
  }

  const AttentionPlan& plan_;
  const LayerCall& call_;
  const AttentionKernel kernel_;
  const Index row_state_;
  std::vector<float> states_;
  std::vector<std::atomic<Index>> unfinished_;
};

}  // namespace

void paged_attention(const AttentionPlan& plan, const LayerCall& call, Isa isa) {
  LayerAttention(plan, call, isa).run();
}

}  // namespace triton_inflight

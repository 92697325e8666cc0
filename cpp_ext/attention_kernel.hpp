// The attention kernels, one per instruction set and type of the pool.
#pragma once

#include "attention_types.hpp"
#include "cpu_features.hpp"

namespace triton_inflight {

// Softmax over some cells, not yet divided by its sum, for some rows: what spans are folded into.
struct SpanState {
  float* maxima;  // [row], of the scores before scaling; -inf where a row sees nothing
  float* sums;    // [row]
  float* output;  // [row][padded value width]

  // Floats behind one state, and a state over them.
  [[gnu::always_inline]] static Index size(Index rows, Index padded_value_width) {
    return rows * (2 + padded_value_width);
  }
  [[gnu::always_inline]] static SpanState over(float* memory, Index rows) {
    return {memory, memory + rows, memory + 2 * rows};
  }
};

struct AttentionKernel {
  // Attends for one item. An item of a group leaves one SpanState per span in `partials`, one after the
  // other; any other writes its rows of the result and leaves `partials` alone.
  void (*attend)(const LayerCall& call, const SequenceRun& run, const WorkItem& item, float* scratch,
                 float* partials);

  // Folds the `num_spans` states of a group in order, and writes the rows of the result.
  void (*finish)(const LayerCall& call, const SequenceRun& run, const WorkItem& item, float* scratch,
                 float* partials, Index num_spans);
};

// Floats of scratch memory, aligned to 64 bytes, that a kernel needs; one piece per thread.
Index scratch_size(const PoolLayout& layout);

AttentionKernel attention_kernel(Isa isa, bool bf16_pool);

// Defined by the file of each instruction set.
AttentionKernel portable_attention(bool bf16_pool);
AttentionKernel avx2_attention(bool bf16_pool);
AttentionKernel avx512_attention(bool bf16_pool);
AttentionKernel avx512_bf16_attention();

}  // namespace triton_inflight

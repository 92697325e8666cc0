// Writing the new keys and values of a step into the pool.
#pragma once

#include "attention_types.hpp"

namespace triton_inflight {

// Stores the tokens from `first` to before `end`, counted from the start of the sequence's run, of one head.
// Whoever cuts a run into pieces must cut at even positions: two cells share each pair of values.
void store_tokens(const LayerCall& call, const SequenceRun& run, Index kv_head, Index first, Index end);

}  // namespace triton_inflight

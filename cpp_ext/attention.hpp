// Paged attention on the CPU: stores a layer's new keys and values and attends over them, in one call.
#pragma once

#include "attention_plan.hpp"
#include "attention_types.hpp"
#include "cpu_features.hpp"

namespace triton_inflight {

// Runs one attention call of a step. `call.out` must not overlap its inputs. The plan may be shared by calls
// that follow one another, on any thread.
void paged_attention(const AttentionPlan& plan, const LayerCall& call, Isa isa);

}  // namespace triton_inflight

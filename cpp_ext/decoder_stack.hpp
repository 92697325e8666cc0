// All decoder layers of a step in one call: their input, their attention, their output, layer after layer.
#pragma once

#include <vector>

#include "attention.hpp"
#include "fused_layer.hpp"

namespace triton_inflight {

// What the layers' attention has in common.
struct StackAttention {
  const AttentionPlan& plan;
  const PoolLayout& layout;
  Isa isa;
  const std::vector<std::uintptr_t>& pools;  // one per layer
  float scale;
};

// `x` are the step's rows, before the first layer and then after the last one.
void decoder_stack(const Runtime& runtime, const std::vector<LayerWeights>& layers, const LayerStep& step,
                   void* x, void* cosines, void* sines, const StackAttention& attention);

}  // namespace triton_inflight

#include "decoder_stack.hpp"

#include "fused_scratch.hpp"

namespace triton_inflight {
namespace {

void attend(const LayerWeights& layer, const LayerStep& step, char* inputs, const StackAttention& attention,
            std::uintptr_t pool, void* out) {
  const Index width = layer.head_width;
  const auto heads_from = [&](Index column) {
    return TensorView{inputs + column * (step.bf16 ? 2 : 4), layer.input_columns, width, step.bf16};
  };
  const LayerCall call{heads_from(0),
                       heads_from(layer.first_key),
                       heads_from(layer.first_value),
                       {out, layer.output_depth, width, step.bf16},
                       reinterpret_cast<void*>(pool),
                       attention.layout,
                       attention.plan.query_heads() / attention.plan.kv_heads(),
                       attention.plan.window(),
                       attention.scale,
                       0.0F,
                       nullptr};
  paged_attention(attention.plan, call, attention.isa);
}

}  // namespace

void decoder_stack(const Runtime& runtime, const std::vector<LayerWeights>& layers, const LayerStep& step,
                   void* x, void* cosines, void* sines, const StackAttention& attention) {
  thread_local Scratch input_scratch;
  thread_local Scratch attended_scratch;
  const Index size = step.bf16 ? 2 : 4;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerWeights& layer = layers[i];
    char* inputs = static_cast<char*>(input_scratch.take(step.rows * layer.input_columns * size));
    void* attended = attended_scratch.take(step.rows * layer.output_depth * size);
    layer_input(runtime, layer, step, x, cosines, sines, inputs);
    attend(layer, step, inputs, attention, attention.pools[i], attended);
    layer_output(runtime, layer, step, x, attended, x);
  }
}

}  // namespace triton_inflight

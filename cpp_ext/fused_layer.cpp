#include "fused_layer.hpp"

#include "fused_scratch.hpp"

namespace triton_inflight {
namespace {

// The normed rows for a weight: in float32 if it turns them into whole numbers, rather than rounded twice.
RowsView normed(const Runtime& runtime, const NormWeight& norm, const RowsView& in, const LayerStep& step,
                const PackedWeight& weight) {
  thread_local Scratch scratch;
  const Index width = in.stride;
  const RowsView out{scratch.take(step.rows * width * 4), width, step.bf16 && !weight.whole_numbers()};
  rms_norm(runtime, {in, out, norm.scale, width, norm.epsilon}, step.rows);
  return out;
}

}  // namespace

void layer_input(const Runtime& runtime, const LayerWeights& layer, const LayerStep& step, void* in,
                 void* cosines, void* sines, void* out) {
  const RowsView x =
      normed(runtime, layer.first_norm, {in, layer.hidden, step.bf16}, step, layer.attention_input);
  const Index stride = layer.input_columns;
  linear(runtime, layer.attention_input, x, layer.hidden, step.rows, {out, stride, step.bf16}, stride);
  const Index width = layer.head_width;
  const RowsView cosine_rows{cosines, width, step.bf16};
  const RowsView sine_rows{sines, width, step.bf16};
  const HeadsView queries{out, stride, width, layer.query_heads};
  rotate(runtime, {queries, queries, cosine_rows, sine_rows, width, width}, step.rows);
  void* first_key = static_cast<char*>(out) + layer.first_key * (step.bf16 ? 2 : 4);
  const HeadsView keys{first_key, stride, width, layer.key_heads};
  rotate(runtime, {keys, keys, cosine_rows, sine_rows, width, width}, step.rows);
}

void layer_output(const Runtime& runtime, const LayerWeights& layer, const LayerStep& step, void* in,
                  void* attention, void* out) {
  thread_local Scratch scratch;
  const Index hidden = layer.hidden;
  const RowsView sum{scratch.take(step.rows * hidden * 4), hidden, false};
  const RowsView x{in, hidden, step.bf16};
  const RowsView result{out, hidden, step.bf16};
  const RowsView attended{attention, layer.output_depth, step.bf16};
  linear(runtime, layer.attention_output, attended, layer.output_depth, step.rows, sum, hidden);
  add(runtime, {x, sum, result, hidden}, step.rows);
  const RowsView between = normed(runtime, layer.second_norm, result, step, layer.gate_up);
  gated_mlp(runtime, layer.gate_up, layer.down, between, hidden, step.rows, sum, hidden);
  add(runtime, {result, sum, result, hidden}, step.rows);
}

}  // namespace triton_inflight

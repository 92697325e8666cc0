#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "decoder_stack.hpp"

namespace py = pybind11;

namespace triton_inflight {
namespace {

constexpr const char* kStackDoc = R"doc(
Decoder layers, one after the other, without the GIL. Addresses are of contiguous rows; only the plan is checked.

Args:
    runtime: version and threads of the products.
    layers: LayerWeights, all with the same heads.
    rows: of the step.
    bf16: their type, float32 if false.
    x: address of (rows, hidden), changed in place.
    cosines, sines: addresses of (rows, head width).
    plan, layout, isa: of the attention of every layer.
    pools: address of each layer's pool.
    scale: factor of the scores, above 0.

Raises:
    ValueError: the plan, the layers and the pools do not fit together.
)doc";

void check(const std::vector<LayerWeights>& layers, Index rows, const StackAttention& attention) {
  const AttentionPlan& plan = attention.plan;
  const PoolLayout& layout = attention.layout;
  if (plan.num_tokens() != rows || plan.num_blocks() != layout.num_blocks ||
      plan.tokens_per_block() != layout.tokens_per_block || plan.kv_heads() != layout.heads) {
    throw std::invalid_argument("the plan was made for another step, or for a pool of other blocks or heads");
  }
  if (attention.pools.size() != layers.size())
    throw std::invalid_argument("there must be one pool per layer");
  for (const LayerWeights& layer : layers) {
    if (layer.query_heads != plan.query_heads() || layer.key_heads != layout.heads ||
        layer.head_width != layout.key_width || layer.head_width != layout.value_width ||
        layer.output_depth != layer.query_heads * layer.head_width) {
      throw std::invalid_argument("a layer has other heads than the plan or the pool");
    }
  }
}

}  // namespace

void bind_decoder_stack(py::module_& module) {
  module.def(
      "decoder_stack",
      [](const Runtime& runtime, const std::vector<LayerWeights>& layers, Index rows, bool bf16,
         std::uintptr_t x, std::uintptr_t cosines, std::uintptr_t sines, const AttentionPlan& plan,
         const PoolLayout& layout, Isa isa, const std::vector<std::uintptr_t>& pools, float scale) {
        const StackAttention attention{plan, layout, isa, pools, scale};
        check(layers, rows, attention);
        const py::gil_scoped_release release;
        decoder_stack(runtime, layers, {rows, bf16}, reinterpret_cast<void*>(x),
                      reinterpret_cast<void*>(cosines), reinterpret_cast<void*>(sines), attention);
      },
      kStackDoc, py::arg("runtime"), py::arg("layers"), py::arg("rows"), py::arg("bf16"), py::arg("x"),
      py::arg("cosines"), py::arg("sines"), py::arg("plan"), py::arg("layout"), py::arg("isa"),
      py::arg("pools"), py::arg("scale"));
}

}  // namespace triton_inflight

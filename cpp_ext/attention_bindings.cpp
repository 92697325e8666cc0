// Paged attention for Python. Tensors come as addresses and strides: bfloat16 has no numpy type.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "attention.hpp"

namespace py = pybind11;

namespace triton_inflight {
namespace {

// address, token stride, head stride, is bfloat16
using TensorArgument = std::tuple<std::uintptr_t, Index, Index, bool>;

TensorView view_of(const TensorArgument& tensor) {
  const auto [address, token_stride, head_stride, bf16] = tensor;
  return {reinterpret_cast<void*>(address), token_stride, head_stride, bf16};
}

std::unique_ptr<AttentionPlan> make_plan(
    const py::array_t<std::int32_t, py::array::c_style | py::array::forcecast>& tables,
    const std::vector<Index>& starts, const std::vector<Index>& lengths, const PoolLayout& layout,
    Index query_heads, Index window, int threads) {
  if (tables.ndim() != 2) throw std::invalid_argument("tables must have two dimensions");
  PlanRequest request{{tables.data(), static_cast<std::size_t>(tables.size())},
                      tables.shape(1),
                      starts,
                      lengths,
                      layout.num_blocks,
                      layout.tokens_per_block,
                      query_heads,
                      layout.heads,
                      window,
                      threads};
  return std::make_unique<AttentionPlan>(request);
}

void attend(const AttentionPlan& plan, const PoolLayout& layout, Isa isa, std::uintptr_t pool,
            const TensorArgument& queries, const TensorArgument& keys, const TensorArgument& values,
            const TensorArgument& out, float scale, float softcap, std::uintptr_t sinks) {
  if (plan.num_blocks() != layout.num_blocks || plan.tokens_per_block() != layout.tokens_per_block ||
      plan.kv_heads() != layout.heads) {
    throw std::invalid_argument("the plan was made for a pool of other blocks or heads");
  }
  const LayerCall call{view_of(queries),
                       view_of(keys),
                       view_of(values),
                       view_of(out),
                       reinterpret_cast<void*>(pool),
                       layout,
                       plan.query_heads() / plan.kv_heads(),
                       plan.window(),
                       scale,
                       softcap,
                       reinterpret_cast<const float*>(sinks)};
  const py::gil_scoped_release release;
  paged_attention(plan, call, isa);
}

constexpr const char* kLayoutDoc = R"doc(
Where keys and values lie in the pool of one attention call.

Args:
    num_blocks, tokens_per_block: of the store; tokens_per_block must be a multiple of 16.
    heads: key heads.
    key_width, value_width: numbers per head.
    bf16: bfloat16 if true, else float32.

Raises:
    ValueError: a size is out of range.
)doc";

constexpr const char* kPlanDoc = R"doc(
The work of one step, shared by its attention calls with the same heads and window.

Args:
    tables: (N, M) int32, each sequence's blocks in order.
    starts: N + 1 rows of the flat batch; sequence i has the rows from starts[i] to starts[i + 1].
    lengths: N cell counts, this step's tokens included.
    layout: of any of those calls.
    query_heads: a multiple of the layout's heads.
    window: tokens seen, the own one included; 0 is all.
    threads: at most so many work on it.

Raises:
    ValueError: the arrays do not fit together, or name a block that does not exist.
)doc";

constexpr const char* kAttendDoc = R"doc(
Stores a step's new keys and values, then attends, without the GIL. Nothing but the plan is checked.

A tensor is (address, token stride, head stride, is bfloat16); strides count elements, the innermost is 1.

Args:
    plan, layout: of this step and this pool.
    isa: version of the kernel, from chosen_isa() or parse_isa().
    pool: address of num_blocks * layout.block_size elements, zeros at first.
    queries, keys, values, out: (T, heads, width); keys and values have one type.
    scale: factor of the scores, above 0.
    softcap: scores become softcap * tanh(score / softcap); 0 is none.
    sinks: address of one float32 logit per query head, or 0.
)doc";

PoolLayout make_layout(Index num_blocks, Index tokens_per_block, Index heads, Index key_width,
                       Index value_width, bool bf16) {
  if (num_blocks < 1 || heads < 1 || key_width < 1 || value_width < 1) {
    throw std::invalid_argument("num_blocks, heads, key_width and value_width must be at least 1");
  }
  if (tokens_per_block < 16 || tokens_per_block % 16 != 0) {
    throw std::invalid_argument("tokens_per_block is " + std::to_string(tokens_per_block) +
                                ", must be a multiple of 16");
  }
  return {num_blocks, tokens_per_block, heads, key_width, value_width, bf16};
}

}  // namespace

void bind_attention(py::module_& module) {
  // Named here and not as strings of each call, which would be parsed once per layer.
  py::enum_<Isa>(module, "Isa", "Versions of the kernels, slowest first.")
      .value("portable", Isa::kPortable)
      .value("avx2", Isa::kAvx2)
      .value("avx512", Isa::kAvx512)
      .value("avx512_bf16", Isa::kAvx512Bf16);
  module.def("supported_isas", &supported_isas, "Versions that this machine can run, slowest first.");
  module.def("chosen_isa", &chosen_isa,
             "The fastest version, or the one named by TRITON_INFLIGHT_ISA; ValueError if that cannot run.");

  py::class_<PoolLayout>(module, "PoolLayout", kLayoutDoc)
      .def(py::init(&make_layout), py::arg("num_blocks"), py::arg("tokens_per_block"), py::arg("heads"),
           py::arg("key_width"), py::arg("value_width"), py::arg("bf16"))
      .def_readonly("num_blocks", &PoolLayout::num_blocks)
      .def_readonly("tokens_per_block", &PoolLayout::tokens_per_block)
      .def_readonly("heads", &PoolLayout::heads)
      .def_readonly("key_width", &PoolLayout::key_width)
      .def_readonly("value_width", &PoolLayout::value_width)
      .def_property_readonly("block_size", &PoolLayout::block_size, "Elements of a block.");

  py::class_<AttentionPlan>(module, "AttentionPlan", kPlanDoc)
      .def(py::init(&make_plan), py::arg("tables"), py::arg("starts"), py::arg("lengths"), py::arg("layout"),
           py::arg("query_heads"), py::arg("window"), py::arg("threads"))
      .def_property_readonly("query_heads", &AttentionPlan::query_heads)
      .def_property_readonly("num_tokens", &AttentionPlan::num_tokens, "Rows of the flat batch.")
      .def_property_readonly(
          "num_items", [](const AttentionPlan& plan) { return plan.items().size(); },
          "Pieces that the work was cut into.");

  module.def("paged_attention", &attend, kAttendDoc, py::arg("plan"), py::arg("layout"), py::arg("isa"),
             py::arg("pool"), py::arg("queries"), py::arg("keys"), py::arg("values"), py::arg("out"),
             py::arg("scale"), py::arg("softcap"), py::arg("sinks"));
}

}  // namespace triton_inflight

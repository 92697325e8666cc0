// The fused operations for Python. Tensors come as addresses and strides: bfloat16 has no numpy type.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "fused_layer.hpp"

namespace py = pybind11;

namespace triton_inflight {
namespace {

using RowsArgument = std::tuple<std::uintptr_t, Index, bool>;  // address, stride, is bfloat16
using HeadsArgument =
    std::tuple<std::uintptr_t, Index, Index, Index>;  // address, token and head stride, heads

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

RowsView rows_of(const RowsArgument& rows) {
  const auto [address, stride, bf16] = rows;
  return {pointer(address), stride, bf16};
}

HeadsView heads_of(const HeadsArgument& tensor) {
  const auto [address, token_stride, head_stride, heads] = tensor;
  return {pointer(address), token_stride, head_stride, heads};
}

PackedWeight make_weight(std::uintptr_t address, std::uintptr_t bias, std::uintptr_t scales, Index columns,
                         Index depth, WeightType type) {
  const PackedWeight weight{pointer(address),
                            reinterpret_cast<const float*>(bias),
                            reinterpret_cast<const float*>(scales),
                            columns,
                            depth,
                            type};
  if (columns < 1 || columns % kPanelColumns != 0)
    throw std::invalid_argument("columns must be a multiple of 32");
  if (depth < 1 || depth % weight.depth_multiple() != 0)
    throw std::invalid_argument("depth must be a multiple of " + std::to_string(weight.depth_multiple()));
  if ((type == WeightType::kInt8) != (scales != 0))
    throw std::invalid_argument("weights of 8 bits have scales, and no others");
  return weight;
}

constexpr const char* kWeightDoc = R"doc(
A packed weight by its address; the caller keeps the memory alive. Its order is that of cpp_ext/fused_types.hpp.

Args:
    address: of the numbers, in panels of 32 columns.
    bias: address of `columns` float32 numbers, or 0.
    scales: address of `columns` float32 numbers for int8, else 0.
    columns: outputs, padded with zeros to a multiple of 32.
    depth: inputs, padded with zeros to a multiple of 2 in bf16, of 32 in int8 and int4.
    type: of the numbers.
)doc";

constexpr const char* kLinearDoc = R"doc(
out = in x weight + bias, without the GIL. Nothing is checked.

Args:
    rows: (address, stride in elements, is bfloat16) of `in` and `out`.
    width: numbers of an input row; the weight's depth beyond them is padding.
    columns: numbers of an output row.
)doc";

void bind_weight(py::module_& module) {
  py::enum_<IntegerIsa>(module, "IntegerIsa", "Versions of the products of whole numbers, slowest first.")
      .value("portable", IntegerIsa::kPortable)
      .value("avx2", IntegerIsa::kAvx2)
      .value("avx_vnni", IntegerIsa::kAvxVnni)
      .value("avx512_vnni", IntegerIsa::kAvx512Vnni);
  module.def("supported_integer_isas", &supported_integer_isas,
             "Versions of the products of whole numbers that this machine can run, slowest first.");
  py::class_<Runtime>(module, "Runtime", "Version of the kernels, and how many of torch's threads they use.")
      .def(py::init([](Isa isa, int threads) { return Runtime{isa, threads, integer_isa_for(isa)}; }),
           py::arg("isa"), py::arg("threads"))
      .def_readonly("isa", &Runtime::isa)
      .def_readwrite("threads", &Runtime::threads)
      .def_readwrite(
          "integer_isa", &Runtime::integer_isa,
          "By default the fastest that goes with `isa`; one that this machine lacks must not be set.");
  py::enum_<WeightType>(module, "WeightType", "What the numbers of a packed weight are.")
      .value("float32", WeightType::kFloat32)
      .value("bf16", WeightType::kBf16)
      .value("int8", WeightType::kInt8)
      .value("int4", WeightType::kInt4);
  py::class_<PackedWeight>(module, "PackedWeight", kWeightDoc)
      .def(py::init(&make_weight), py::arg("address"), py::arg("bias"), py::arg("scales"), py::arg("columns"),
           py::arg("depth"), py::arg("type"));
}

constexpr const char* kLayerDoc = R"doc(
The weights of a decoder layer around its attention, and the sizes that its rows have.

Args:
    first_norm, second_norm: (address of `hidden` float32 numbers, epsilon).
    attention_input: queries, keys (from column `first_key`) and values (from `first_value`) side by side, `input_columns` in all.
    attention_output: takes `output_depth` numbers of each row.
    gate_up, down: of the gated MLP, gate_up packed as gated.
)doc";

using NormArgument = std::tuple<std::uintptr_t, float>;

NormWeight norm_of(const NormArgument& norm) {
  return {reinterpret_cast<const float*>(std::get<0>(norm)), std::get<1>(norm)};
}

void bind_layer(py::module_& module) {
  py::class_<LayerWeights>(module, "LayerWeights", kLayerDoc)
      .def(py::init([](const NormArgument& first_norm, const PackedWeight& attention_input,
                       const PackedWeight& attention_output, const NormArgument& second_norm,
                       const PackedWeight& gate_up, const PackedWeight& down, Index hidden,
                       Index input_columns, Index output_depth, Index head_width, Index query_heads,
                       Index key_heads, Index first_key, Index first_value) {
             return LayerWeights{norm_of(first_norm),
                                 attention_input,
                                 attention_output,
                                 norm_of(second_norm),
                                 gate_up,
                                 down,
                                 hidden,
                                 input_columns,
                                 output_depth,
                                 head_width,
                                 query_heads,
                                 key_heads,
                                 first_key,
                                 first_value};
           }),
           py::arg("first_norm"), py::arg("attention_input"), py::arg("attention_output"),
           py::arg("second_norm"), py::arg("gate_up"), py::arg("down"), py::arg("hidden"),
           py::arg("input_columns"), py::arg("output_depth"), py::arg("head_width"), py::arg("query_heads"),
           py::arg("key_heads"), py::arg("first_key"), py::arg("first_value"));
  module.def(
      "layer_input",
      [](const Runtime& runtime, const LayerWeights& layer, Index rows, bool bf16, std::uintptr_t in,
         std::uintptr_t cosines, std::uintptr_t sines, std::uintptr_t out) {
        const py::gil_scoped_release release;
        layer_input(runtime, layer, {rows, bf16}, pointer(in), pointer(cosines), pointer(sines),
                    pointer(out));
      },
      "Norm, queries, keys and values, rotary positions. Addresses of contiguous rows; nothing is checked.",
      py::arg("runtime"), py::arg("layer"), py::arg("rows"), py::arg("bf16"), py::arg("input"),
      py::arg("cosines"), py::arg("sines"), py::arg("out"));
  module.def(
      "layer_output",
      [](const Runtime& runtime, const LayerWeights& layer, Index rows, bool bf16, std::uintptr_t in,
         std::uintptr_t attention, std::uintptr_t out) {
        const py::gil_scoped_release release;
        layer_output(runtime, layer, {rows, bf16}, pointer(in), pointer(attention), pointer(out));
      },
      "Output of the attention, norm, gated MLP and both residuals. Addresses of contiguous rows.",
      py::arg("runtime"), py::arg("layer"), py::arg("rows"), py::arg("bf16"), py::arg("input"),
      py::arg("attention"), py::arg("out"));
}

}  // namespace

void bind_fused(py::module_& module) {
  bind_weight(module);
  module.def(
      "linear",
      [](const Runtime& runtime, const PackedWeight& weight, const RowsArgument& in, Index width, Index rows,
         const RowsArgument& out, Index columns) {
        const py::gil_scoped_release release;
        linear(runtime, weight, rows_of(in), width, rows, rows_of(out), columns);
      },
      kLinearDoc, py::arg("runtime"), py::arg("weight"), py::arg("input"), py::arg("width"), py::arg("rows"),
      py::arg("out"), py::arg("columns"));
  module.def(
      "gated_mlp",
      [](const Runtime& runtime, const PackedWeight& gate_up, const PackedWeight& down,
         const RowsArgument& in, Index width, Index rows, const RowsArgument& out, Index columns) {
        const py::gil_scoped_release release;
        gated_mlp(runtime, gate_up, down, rows_of(in), width, rows, rows_of(out), columns);
      },
      "out = down(silu(gate(in)) * up(in)), as linear; each panel of `gate_up` has 16 columns of both.",
      py::arg("runtime"), py::arg("gate_up"), py::arg("down"), py::arg("input"), py::arg("width"),
      py::arg("rows"), py::arg("out"), py::arg("columns"));
  module.def(
      "rms_norm",
      [](const Runtime& runtime, const RowsArgument& in, const RowsArgument& out, std::uintptr_t scale,
         Index width, Index rows, float epsilon) {
        const py::gil_scoped_release release;
        rms_norm(runtime, {rows_of(in), rows_of(out), reinterpret_cast<const float*>(scale), width, epsilon},
                 rows);
      },
      "out = in / sqrt(mean(in^2) + epsilon) * scale for each row; in and out have one type.",
      py::arg("runtime"), py::arg("input"), py::arg("out"), py::arg("scale"), py::arg("width"),
      py::arg("rows"), py::arg("epsilon"));
  module.def(
      "rotate",
      [](const Runtime& runtime, const HeadsArgument& in, const HeadsArgument& out,
         const RowsArgument& cosines, const RowsArgument& sines, Index width, Index total, Index tokens) {
        const py::gil_scoped_release release;
        rotate(runtime, {heads_of(in), heads_of(out), rows_of(cosines), rows_of(sines), width, total},
               tokens);
      },
      "Rotary positions in the order of halves: the first `width` of the `total` numbers of each head turn.",
      py::arg("runtime"), py::arg("input"), py::arg("out"), py::arg("cosines"), py::arg("sines"),
      py::arg("width"), py::arg("total"), py::arg("tokens"));
  bind_layer(module);
}

}  // namespace triton_inflight

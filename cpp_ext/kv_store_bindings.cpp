// KVStore for Python. Every call holds the GIL: the store is single-threaded.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <string>

#include "kv_store.hpp"

namespace py = pybind11;

namespace triton_inflight {
namespace {

template <typename T>
using Column = py::array_t<T, py::array::c_style>;

template <typename T>
std::span<const T> view(const py::array& array) {
  return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

TokenView token_view(const py::array& tokens) {
  if (tokens.ndim() == 1 && (tokens.flags() & py::array::c_style) != 0) {
    if (py::isinstance<py::array_t<std::int32_t>>(tokens)) return TokenView(view<std::int32_t>(tokens));
    if (py::isinstance<py::array_t<std::int64_t>>(tokens)) return TokenView(view<std::int64_t>(tokens));
  }
  throw std::invalid_argument("tokens must be a contiguous one-dimensional array of int32 or int64");
}

py::tuple layout(const KVStore& store, const Column<SequenceId>& sequences, const Column<Choice>& choices,
                 const Column<std::int64_t>& starts, const Column<std::int64_t>& counts) {
  const Rows rows{view<SequenceId>(sequences), view<Choice>(choices), view<std::int64_t>(starts),
                  view<std::int64_t>(counts)};
  const std::size_t num_rows = rows.sequences.size();
  if (rows.choices.size() != num_rows || rows.starts.size() != num_rows || rows.counts.size() != num_rows) {
    throw std::invalid_argument("sequences, choices, starts and counts must have one entry per row, have " +
                                std::to_string(num_rows) + ", " + std::to_string(rows.choices.size()) + ", " +
                                std::to_string(rows.starts.size()) + " and " +
                                std::to_string(rows.counts.size()));
  }
  const LayoutShape shape = store.layout_shape(rows);
  py::array_t<std::int64_t> cells(shape.num_cells);
  py::array_t<BlockId> tables(
      {static_cast<py::ssize_t>(num_rows), static_cast<py::ssize_t>(shape.table_width)});
  store.fill_layout(rows, shape, cells.mutable_data(), tables.mutable_data());
  return py::make_tuple(std::move(cells), std::move(tables));
}

constexpr const char* kClassDoc = R"doc(
Which blocks hold the keys and values of each sequence; the tensors are the caller's.

A key is (sequence: uint64, choice: uint32). Position p of a key lives in cell
``blocks[p // tokens_per_block] * tokens_per_block + p % tokens_per_block`` of the tensors.

Args:
    num_blocks: blocks in all, at least 1.
    tokens_per_block: cells of a block, at least 1.
    reuse: keep published blocks findable by their tokens; False makes publish and match_prefix do nothing.

Raises ValueError for an argument out of range. Not thread-safe: one thread at a time, under the GIL.)doc";

void bind_reservation(py::class_<KVStore>& store) {
  store
      .def("reserve", &KVStore::reserve, py::arg("sequence"), py::arg("choice"), py::arg("start"),
           py::arg("length"),
           R"doc(
Make the cells [start, length) of a key exist, and all its cells from start on writable.

A new key begins with start 0. Blocks that are shared, or that content still leads to, are exchanged for
copies. O(blocks from start on).

Returns:
    The (source block, destination block) pairs to copy before anything is written. Apply each call's pairs at
    once, or those of several calls in order. None, with nothing changed, when the blocks do not suffice.

Raises ValueError when start is beyond the cells reserved so far, or length is below start.)doc")
      .def("blocks_needed", &KVStore::blocks_needed, py::arg("sequence"), py::arg("choice"), py::arg("start"),
           py::arg("length"), R"doc(
The number of blocks that reserve() would take for the same arguments, copies included.

reserve() succeeds if it is at most num_free. Raises what reserve() raises.)doc")
      .def("layout", &layout, py::arg("sequences"), py::arg("choices"), py::arg("starts"), py::arg("counts"),
           R"doc(
The arrays of a step in which row i runs counts[i] tokens of its key, the first at position starts[i].

Args:
    sequences: uint64 [N].
    choices: uint32 [N].
    starts: int64 [N].
    counts: int64 [N].

Returns:
    cells: int64 [sum(counts)], where each token's keys and values go, row after row.
    tables: int32 [N, M], the blocks that cover the first starts[i] + counts[i] positions, then 0; M is the
        largest number of such blocks among the rows.

Raises KeyError for an unknown key, IndexError for cells that are not reserved, ValueError when the
arguments differ in length, TypeError for another dtype.)doc");
}

void bind_lifetime(py::class_<KVStore>& store) {
  store
      .def("trim", &KVStore::trim, py::arg("sequence"), py::arg("choice"), py::arg("length"), R"doc(
Forget the cells of a key from length on; the key stays, even at length 0.

Raises KeyError for an unknown key, ValueError when length is above the reserved cells.)doc")
      .def("fork", &KVStore::fork, py::arg("sequence"), py::arg("source"), py::arg("destination"), R"doc(
Give choice `destination` all the blocks of choice `source`, shared until one of them writes.

Raises KeyError for an unknown source, ValueError when the destination exists.)doc")
      .def("drop", &KVStore::drop, py::arg("sequence"), py::arg("choice"), R"doc(
End one choice. Returns the number of blocks given back; 0 for an unknown key.)doc")
      .def("free", &KVStore::free, py::arg("sequence"), R"doc(
End all choices of a sequence. Returns the number of blocks given back; 0 for an unknown sequence.)doc");
}

void bind_prefixes(py::class_<KVStore>& store) {
  store
      .def(
          "publish",
          [](KVStore& self, SequenceId sequence, Choice choice, const py::array& tokens,
             std::int64_t computed) { self.publish(sequence, choice, token_view(tokens), computed); },
          py::arg("sequence"), py::arg("choice"), py::arg("tokens"), py::arg("computed"), R"doc(
Make the full blocks among the first min(len(tokens), computed) tokens of a key findable.

Goes on where the last call stopped. A block whose tokens, and all before them, are findable elsewhere is
exchanged for that one; it changes the table, never what the table reads.

Args:
    tokens: int32 or int64 [L], contiguous: all tokens of the key from position 0.
    computed: how many of them have their keys and values in the tensors.

Raises KeyError for an unknown key, ValueError when computed is above the reserved cells, or when the tokens
contradict those that another choice published for a shared block.)doc")
      .def(
          "match_prefix",
          [](KVStore& self, SequenceId sequence, Choice choice, const py::array& tokens) {
            return self.match_prefix(sequence, choice, token_view(tokens));
          },
          py::arg("sequence"), py::arg("choice"), py::arg("tokens"), R"doc(
Give a new key the longest published beginning of tokens: whole blocks, never the last token.

Args:
    tokens: int32 or int64 [L], contiguous.

Returns:
    The number of tokens found, which need not be computed again; at 0 the key stays unknown.

Raises ValueError when the key exists.)doc");
}

void bind_inspection(py::class_<KVStore>& store) {
  store
      .def("blocks", &KVStore::blocks, py::arg("sequence"), py::arg("choice"), R"doc(
The blocks of a key in order of position. Raises KeyError for an unknown key.)doc")
      .def("live", &KVStore::live, "The sequence IDs that have a table, ascending.")
      .def("check", &KVStore::check,
           "Verify every invariant, O(all); raises RuntimeError naming what is wrong.")
      .def_property_readonly("num_blocks", &KVStore::num_blocks, "Blocks in all: num_free + num_held.")
      .def_property_readonly("num_free", &KVStore::num_free,
                             "Blocks that reserve() can take, cached ones included.")
      .def_property_readonly("num_held", &KVStore::num_held, "Distinct blocks in the tables of live keys.")
      .def_property_readonly("num_cached", &KVStore::num_cached, "Findable blocks that no table holds.")
      .def_property_readonly("tokens_per_block", &KVStore::tokens_per_block, "Cells of a block.")
      .def_property_readonly("reuse", &KVStore::reuse, "Whether published blocks are kept findable.");
}

}  // namespace

void bind_kv_store(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const UnknownKey& error) {
      py::set_error(PyExc_KeyError, error.what());
    }
  });

  py::class_<KVStore> store(module, "KVStore", kClassDoc);
  store.def(py::init([](std::int64_t num_blocks, std::int64_t tokens_per_block, bool reuse) {
              return KVStore(num_blocks, tokens_per_block, reuse);
            }),
            py::arg("num_blocks"), py::arg("tokens_per_block"), py::arg("reuse") = false);
  bind_reservation(store);
  bind_lifetime(store);
  bind_prefixes(store);
  bind_inspection(store);
}

}  // namespace triton_inflight

// The fused operations of a forward pass on the CPU, shared out over torch's threads.
#pragma once

#include "fused_kernel.hpp"

namespace triton_inflight {

struct Runtime {
  Isa isa;
  int threads;
  IntegerIsa integer_isa;
};

// `width` is that of the input, at most the depth of the weight.
// out[row][column] = in[row] . weight[column] + bias[column], for the first `columns` columns.
void linear(const Runtime& runtime, const PackedWeight& weight, const RowsView& in, Index width, Index rows,
            const RowsView& out, Index columns);

// out = down(silu(gate(in)) * up(in)); the activations in between are kept in the type of the products.
void gated_mlp(const Runtime& runtime, const PackedWeight& gate_up, const PackedWeight& down,
               const RowsView& in, Index width, Index rows, const RowsView& out, Index columns);

// out = in + sum for each row.
void add(const Runtime& runtime, const AddCall& call, Index rows);

void rms_norm(const Runtime& runtime, const NormCall& call, Index rows);

void rotate(const Runtime& runtime, const RotaryCall& call, Index tokens);

}  // namespace triton_inflight

// The inner parts of the fused operations, one table per instruction set and type of the weights.
#pragma once

#include "cpu_features.hpp"
#include "fused_types.hpp"

namespace triton_inflight {

// One panel of a weight times all rows of the input.
struct PanelCall {
  const void* left;  // [row][depth], in the kernel's own type of the input
  Index left_stride;
  Index rows;
  const void* panel;
  Index depth;
  PanelOutput output;
};

// A bf16 `out` needs a bf16 `in`.
struct NormCall {
  RowsView in;
  RowsView out;
  const float* scale;  // [width]
  Index width;
  float epsilon;
};

// Positions as cosines and sines of `width` numbers for each token; numbers beyond them are copied. All have
// one type.
struct RotaryCall {
  HeadsView in;
  HeadsView out;
  RowsView cosines;
  RowsView sines;
  Index width;  // rotated
  Index total;  // of a head
};

// out = in + sum, of one type; `sum` is float32 and not yet rounded.
struct AddCall {
  RowsView in;
  RowsView sum;
  RowsView out;
  Index width;
};

struct FusedKernel {
  bool left_bf16;  // type of PanelCall::left; else float32
  void (*convert)(const RowsView& in, Index row, Index width, void* to);
  void (*multiply_panel)(const PanelCall& call);
  void (*norm)(const NormCall& call, Index row);
  void (*add)(const AddCall& call, Index row);
  void (*rotate)(const RotaryCall& call, Index token);
};

FusedKernel fused_kernel(Isa isa, bool bf16_weights);

// Defined by the file of each instruction set.
FusedKernel portable_fused(bool bf16_weights);
FusedKernel avx2_fused(bool bf16_weights);
FusedKernel avx512_fused(bool bf16_weights);
FusedKernel avx512_bf16_fused();

}  // namespace triton_inflight

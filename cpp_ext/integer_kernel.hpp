// Products of whole numbers, 8 bits by 8 or 4, one table per instruction set that has them.
#pragma once

#include "cpu_features.hpp"
#include "fused_types.hpp"

namespace triton_inflight {

// One panel of a weight of whole numbers times all rows.
struct IntegerPanelCall {
  QuantizedRows left;
  Index rows;
  const void* panel;
  PanelOutput output;
};

struct IntegerKernel {
  // Numbers of `in` beyond `width` count as zeros.
  void (*quantize)(const RowsView& in, Index width, const QuantizedRows& out, Index row);
  void (*multiply_int8)(const IntegerPanelCall& call);
  void (*multiply_int4)(const IntegerPanelCall& call);
};

IntegerKernel integer_kernel(IntegerIsa isa);

// Defined by the file of each instruction set.
IntegerKernel portable_integer();
IntegerKernel avx2_integer();
IntegerKernel avx_vnni_integer();
IntegerKernel avx512_vnni_integer();

}  // namespace triton_inflight

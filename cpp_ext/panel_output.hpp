// The sums of a panel on their way out: scale, bias, gate, rounding.
#pragma once

#include <cstring>

#include "bf16.hpp"
#include "fused_types.hpp"

namespace triton_inflight {
namespace {

// silu(gate) * up in the place of the gate; silu(x) = x / (1 + exp(-x)).
template <typename Simd>
void apply_gate(float* sums) {
  using Vec = typename Simd::Vec;
  for (Index i = 0; i < kPanelColumns / 2; i += Simd::kWidth) {
    const Vec gate = Simd::load(sums + i);
    const Vec power = Simd::exp2(Simd::multiply(gate, Simd::broadcast(-1.442695041F)));
    const Vec silu = Simd::divide(gate, Simd::add(Simd::broadcast(1.0F), power));
    Simd::store(sums + i, Simd::multiply(silu, Simd::load(sums + kPanelColumns / 2 + i)));
  }
}

// Writes a row; `sums` are 32 and change.
template <typename Simd>
void write_sums(const PanelOutput& output, Index row, float* sums) {
  if (output.scales != nullptr) {
    for (Index i = 0; i < kPanelColumns; ++i) sums[i] *= output.scales[i];
  }
  if (output.bias != nullptr) {
    for (Index i = 0; i < kPanelColumns; ++i) sums[i] += output.bias[i];
  }
  if (output.gated) apply_gate<Simd>(sums);
  const Index at = row * output.out.stride;
  if (output.out.bf16) {
    std::uint16_t* out = static_cast<std::uint16_t*>(output.out.data) + at;
    for (Index i = 0; i < output.columns; ++i) out[i] = float_to_bf16(sums[i]);
  } else {
    std::memcpy(static_cast<float*>(output.out.data) + at, sums,
                static_cast<std::size_t>(output.columns) * sizeof(float));
  }
}

}  // namespace
}  // namespace triton_inflight

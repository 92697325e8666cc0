// Rows of floats turned into whole numbers: plain loops, which the compiler turns into vectors.
#pragma once

#include <bit>
#include <cmath>
#include <limits>

#include "bf16.hpp"
#include "fused_types.hpp"

namespace triton_inflight {
namespace {

// Below this, the largest number of a group counts as 0: its inverse would be infinite.
constexpr float kSmallest = 1e-35F;

// The largest magnitude. Magnitudes of floats are ordered as their bits are, and NaN is above all others.
inline float peak_of(const float* numbers) {
  std::uint32_t largest = 0;
  for (Index i = 0; i < kGroup; ++i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(numbers[i]) & 0x7fffffffU;
    largest = magnitude > largest ? magnitude : largest;
  }
  return std::bit_cast<float>(largest);
}

// A group becomes value = round(number * 127 / peak), to the nearest, ties to even. A NaN or an infinity
// makes its scale NaN, and thereby everything that the row is multiplied with, as it would among floats.
inline void quantize_group(const float* numbers, const QuantizedRows& out, Index row, Index group) {
  const float peak = peak_of(numbers);
  const bool finite = peak <= std::numeric_limits<float>::max();
  const float factor = finite && peak >= kSmallest ? 127.0F / peak : 0.0F;
  std::int8_t* values = out.values + row * out.stride + group * kGroup;
  std::int32_t sum = 0;
  if (finite) {
    for (Index i = 0; i < kGroup; ++i) {
      const auto value = static_cast<std::int32_t>(std::rint(numbers[i] * factor));
      values[i] = static_cast<std::int8_t>(value);
      sum += value;
    }
  } else {
    for (Index i = 0; i < kGroup; ++i) values[i] = 0;
  }
  const float scale = finite ? peak / 127.0F : std::numeric_limits<float>::quiet_NaN();
  const Index at = row * out.groups + group;
  out.scales[at] = scale;
  out.offsets[at] = -128 * sum;
  out.sums[at] = scale * static_cast<float>(sum);
}

inline float widened(float value) { return value; }
inline float widened(std::uint16_t bits) { return bf16_to_float(bits); }

template <typename Number>
void quantize_numbers(const Number* in, Index width, const QuantizedRows& out, Index row) {
  float numbers[kGroup];
  const Index whole = width / kGroup;
  for (Index group = 0; group < whole; ++group) {
    for (Index i = 0; i < kGroup; ++i) numbers[i] = widened(in[group * kGroup + i]);
    quantize_group(numbers, out, row, group);
  }
  for (Index group = whole; group < out.groups; ++group) {
    for (Index i = 0; i < kGroup; ++i) {
      const Index at = group * kGroup + i;
      numbers[i] = at < width ? widened(in[at]) : 0.0F;
    }
    quantize_group(numbers, out, row, group);
  }
}

inline void quantize_row(const RowsView& in, Index width, const QuantizedRows& out, Index row) {
  if (in.bf16) {
    quantize_numbers(static_cast<const std::uint16_t*>(in.data) + row * in.stride, width, out, row);
  } else {
    quantize_numbers(static_cast<const float*>(in.data) + row * in.stride, width, out, row);
  }
}

}  // namespace
}  // namespace triton_inflight

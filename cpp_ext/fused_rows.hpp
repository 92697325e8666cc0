// What happens to single rows between the products: plain loops, which the compiler turns into vectors.
#pragma once

#include <cmath>
#include <cstring>

#include "bf16.hpp"
#include "fused_kernel.hpp"

namespace triton_inflight {
namespace {

inline float as_float(float value) { return value; }
inline float as_float(std::uint16_t bits) { return bf16_to_float(bits); }

template <typename To>
To from_float(float value) {
  if constexpr (sizeof(To) == 2) return float_to_bf16(value);
  return static_cast<To>(value);
}

template <typename In, typename Out>
void copy_row(const In* in, Index width, Out* out) {
  for (Index i = 0; i < width; ++i) out[i] = from_float<Out>(as_float(in[i]));
}

template <typename Left>
void convert_row(const RowsView& in, Index row, Index width, void* to) {
  Left* out = static_cast<Left*>(to);
  if (in.bf16) {
    copy_row(static_cast<const std::uint16_t*>(in.data) + row * in.stride, width, out);
  } else {
    copy_row(static_cast<const float*>(in.data) + row * in.stride, width, out);
  }
}

// x / sqrt(mean(x^2) + epsilon) * scale (Zhang and Sennrich, 2019). The sum of squares is kept in 16 parts,
// so that it can be vectors without depending on how wide they are.
template <typename In, typename Out>
void norm_row(const NormCall& call, Index row) {
  constexpr Index kParts = 16;
  const In* in = static_cast<const In*>(call.in.data) + row * call.in.stride;
  Out* out = static_cast<Out*>(call.out.data) + row * call.out.stride;
  float parts[kParts] = {};
  const Index even = call.width / kParts * kParts;
  for (Index i = 0; i < even; i += kParts) {
    for (Index j = 0; j < kParts; ++j) parts[j] += as_float(in[i + j]) * as_float(in[i + j]);
  }
  float sum = 0.0F;
  for (const float part : parts) sum += part;
  for (Index i = even; i < call.width; ++i) sum += as_float(in[i]) * as_float(in[i]);
  const float factor = 1.0F / std::sqrt(sum / static_cast<float>(call.width) + call.epsilon);
  for (Index i = 0; i < call.width; ++i) {
    out[i] = from_float<Out>(as_float(in[i]) * factor * call.scale[i]);
  }
}

inline void norm_any_row(const NormCall& call, Index row) {
  if (call.in.bf16 && call.out.bf16) {
    norm_row<std::uint16_t, std::uint16_t>(call, row);
  } else if (call.in.bf16) {
    norm_row<std::uint16_t, float>(call, row);
  } else {
    norm_row<float, float>(call, row);
  }
}

template <typename Number>
void add_numbers(const AddCall& call, Index row) {
  const Number* in = static_cast<const Number*>(call.in.data) + row * call.in.stride;
  const float* sum = static_cast<const float*>(call.sum.data) + row * call.sum.stride;
  Number* out = static_cast<Number*>(call.out.data) + row * call.out.stride;
  for (Index i = 0; i < call.width; ++i) out[i] = from_float<Number>(as_float(in[i]) + sum[i]);
}

inline void add_row(const AddCall& call, Index row) {
  if (call.in.bf16) {
    add_numbers<std::uint16_t>(call, row);
  } else {
    add_numbers<float>(call, row);
  }
}

// Each number of the first half with its partner in the second one: (a, b) -> (a cos - b sin, b cos + a sin)
// (Su et al., 2021, in the order of halves).
template <typename Number>
void rotate_heads(const RotaryCall& call, Index token) {
  const Number* cosine = static_cast<const Number*>(call.cosines.data) + token * call.cosines.stride;
  const Number* sine = static_cast<const Number*>(call.sines.data) + token * call.sines.stride;
  const Index half = call.width / 2;
  for (Index head = 0; head < call.in.heads; ++head) {
    const Number* in =
        static_cast<const Number*>(call.in.data) + token * call.in.token_stride + head * call.in.head_stride;
    Number* out =
        static_cast<Number*>(call.out.data) + token * call.out.token_stride + head * call.out.head_stride;
    for (Index i = 0; i < half; ++i) {
      const float a = as_float(in[i]);
      const float b = as_float(in[half + i]);
      out[i] = from_float<Number>(a * as_float(cosine[i]) - b * as_float(sine[i]));
      out[half + i] = from_float<Number>(b * as_float(cosine[half + i]) + a * as_float(sine[half + i]));
    }
    for (Index i = call.width; i < call.total; ++i) out[i] = in[i];
  }
}

inline void rotate_token(const RotaryCall& call, Index token) {
  if (call.cosines.bf16) {
    rotate_heads<std::uint16_t>(call, token);
  } else {
    rotate_heads<float>(call, token);
  }
}

}  // namespace
}  // namespace triton_inflight

// bfloat16 as its 16 bits. Internal linkage: each kernel compiles its own copy for its instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace triton_inflight {
namespace {

inline float bf16_to_float(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline std::uint16_t float_to_bf16(float value) {
  std::uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  if (value != value) return 0x7fc0;
  return static_cast<std::uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

}  // namespace
}  // namespace triton_inflight

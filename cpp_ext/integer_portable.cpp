#include "attention_simd_portable.hpp"
#include "integer_panel.hpp"

namespace triton_inflight {
namespace {

float float16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t magnitude = bits & 0x7fffU;
  if (magnitude >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
  // As a float with the same bits the number is 2^112 times too small, subnormal ones included.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
}

// Vectors of 4 in plain C++.
struct PortableDot {
  using Simd = PortableSimd;
  struct Int {
    std::int32_t lane[Simd::kWidth];
  };
  struct Weights {
    std::uint8_t quad[Simd::kWidth][kQuad];
  };
  using Left = const std::int8_t*;
  static constexpr int kInt8Rows = 4;
  static constexpr int kInt4Rows = 4;

  static Int broadcast(std::int32_t value) { return {{value, value, value, value}}; }
  // The weights are stored with 128 added.
  static Int int8_start(std::int32_t offset) { return broadcast(offset); }
  static Left left(const std::int8_t* quad) { return quad; }
  static Weights load_int8(const std::uint8_t* from) {
    Weights weights;
    for (int i = 0; i < Simd::kWidth; ++i) {
      for (int k = 0; k < kQuad; ++k) weights.quad[i][k] = from[i * kQuad + k];
    }
    return weights;
  }
  static void load_int4(const std::uint8_t* from, Weights* weights) {
    for (int i = 0; i < Simd::kWidth; ++i) {
      for (int k = 0; k < kQuad; ++k) {
        weights[0].quad[i][k] = from[i * kQuad + k] & 0x0f;
        weights[1].quad[i][k] = static_cast<std::uint8_t>(from[i * kQuad + k] >> 4);
      }
    }
  }
  static Int add_int8(Int sum, const Weights& weights, Left left) {
    for (int i = 0; i < Simd::kWidth; ++i) {
      for (int k = 0; k < kQuad; ++k) sum.lane[i] += weights.quad[i][k] * left[k];
    }
    return sum;
  }
  static Int add_int4(Int sum, const Weights& weights, Left left) { return add_int8(sum, weights, left); }
  static Simd::Vec as_float(const Int& sum) {
    return Simd::each([&](int i) { return static_cast<float>(sum.lane[i]); });
  }
  static Simd::Vec load_float16(const std::uint16_t* from) {
    return Simd::each([&](int i) { return float16_to_float(from[i]); });
  }
};

}  // namespace

IntegerKernel portable_integer() { return integer_table<PortableDot>(); }

}  // namespace triton_inflight

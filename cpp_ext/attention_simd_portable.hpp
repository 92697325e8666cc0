// Vectors of 4 floats in plain C++: compilers turn them into whatever the architecture's baseline has.
#pragma once

#include <cmath>

#include "bf16.hpp"

namespace triton_inflight {
namespace {

struct PortableSimd {
  static constexpr int kWidth = 4;
  static constexpr int kMaxRows = 4;
  static constexpr int kMaxVecs = 4;

  struct Vec {
    float lane[kWidth];
  };
  struct VecPair {
    Vec first;
    Vec second;
  };

  template <typename Function>
  static Vec each(Function function) {
    Vec result;
    for (int i = 0; i < kWidth; ++i) result.lane[i] = function(i);
    return result;
  }

  static Vec zero() { return broadcast(0.0F); }
  static Vec broadcast(float value) {
    return each([&](int) { return value; });
  }
  static Vec load(const float* from) {
    return each([&](int i) { return from[i]; });
  }
  static void store(float* to, Vec a) {
    for (int i = 0; i < kWidth; ++i) to[i] = a.lane[i];
  }
  static Vec add(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Vec subtract(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Vec multiply(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Vec divide(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static Vec fma(Vec a, Vec b, Vec c) {
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  static Vec max(Vec a, Vec b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Vec exp2(Vec a) {
    return each([&](int i) { return std::exp2(a.lane[i]); });
  }
  static Vec tanh(Vec a) {
    return each([&](int i) { return std::tanh(a.lane[i]); });
  }
  static float reduce_max(Vec a) {
    float result = a.lane[0];
    for (int i = 1; i < kWidth; ++i) result = a.lane[i] > result ? a.lane[i] : result;
    return result;
  }
  static float reduce_add(Vec a) {
    float result = a.lane[0];
    for (int i = 1; i < kWidth; ++i) result += a.lane[i];
    return result;
  }

  template <typename Panel>
  static Panel keep(Panel panel) {
    return panel;
  }

  // a0 b0 a1 b1 ... -> (a0 a1 ..., b0 b1 ...)
  static VecPair load_bf16_pairs(const std::uint16_t* from) {
    return {each([&](int i) { return bf16_to_float(from[2 * i]); }),
            each([&](int i) { return bf16_to_float(from[2 * i + 1]); })};
  }
};

}  // namespace
}  // namespace triton_inflight

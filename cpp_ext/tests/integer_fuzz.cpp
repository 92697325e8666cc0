// Products of whole numbers of random sizes, in every version that this processor can run, against sums in
// doubles. Every buffer has just the size that it must have: built with the address and undefined-behaviour
// sanitizers, a read or write beyond one is seen. Prints what it did, exits 1 on the first fault.
//
//   integer_fuzz [products per version] [seed]
#include <cmath>
#include <cstdio>
#include <exception>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../integer_kernel.hpp"

namespace triton_inflight {
namespace {

constexpr std::uint16_t kFloat16Half = 0x3800;      // 0.5
constexpr std::uint16_t kFloat16MinusTwo = 0xc000;  // -2

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

class Fuzz {
 public:
  Fuzz(IntegerIsa isa, std::uint32_t seed) : kernel_(integer_kernel(isa)), random_(seed) {}

  void product(bool int4) {
    const Index rows = draw(1, 20);
    const Index width = draw(1, 200);
    const Index groups = (width + kGroup - 1) / kGroup;
    const Index columns = draw(1, kPanelColumns);
    const bool infinite = draw(0, 9) == 0;
    const std::vector<float> in = numbers(rows, width, infinite);
    quantize(in, rows, width, groups);
    const std::vector<std::uint8_t> panel = int4 ? int4_panel(groups) : int8_panel(groups);
    std::vector<float> out(static_cast<std::size_t>(rows * columns));
    const PanelOutput to{nullptr, nullptr, {out.data(), columns, false}, columns, false};
    const IntegerPanelCall call{left_, rows, panel.data(), to};
    (int4 ? kernel_.multiply_int4 : kernel_.multiply_int8)(call);
    for (Index row = 0; row < rows; ++row) {
      for (Index column = 0; column < columns; ++column) {
        check(out[static_cast<std::size_t>(row * columns + column)], row, column, groups,
              infinite && row == 0);
      }
    }
  }

 private:
  Index draw(Index least, Index most) { return std::uniform_int_distribution<Index>(least, most)(random_); }

  std::vector<float> numbers(Index rows, Index width, bool infinite) {
    std::vector<float> in(static_cast<std::size_t>(rows * width));
    for (float& number : in) number = std::normal_distribution<float>(0.0F, 3.0F)(random_);
    if (draw(0, 3) == 0) in[0] = 0.0F;
    if (infinite) in[0] = std::numeric_limits<float>::infinity();
    return in;
  }

  void quantize(std::vector<float> in, Index rows, Index width, Index groups) {
    const auto count = static_cast<std::size_t>(rows * groups);
    values_.assign(count * kGroup, 0);
    scales_.assign(count, 0.0F);
    offsets_.assign(count, 0);
    sums_.assign(count, 0.0F);
    left_ = {values_.data(), groups * kGroup, scales_.data(), offsets_.data(), sums_.data(), groups};
    for (Index row = 0; row < rows; ++row) kernel_.quantize({in.data(), width, false}, width, left_, row);
    for (Index row = 0; row < rows; ++row) {
      for (Index i = 0; i < width; ++i) {
        const float number = in[static_cast<std::size_t>(row * width + i)];
        const float scale = scales_[static_cast<std::size_t>(row * groups + i / kGroup)];
        if (std::isnan(scale)) continue;
        const float value = static_cast<float>(values_[static_cast<std::size_t>(row * left_.stride + i)]);
        expect(std::abs(scale * value - number) <= 0.501F * scale, "a number is not turned into the nearest");
      }
    }
  }

  std::vector<std::uint8_t> int8_panel(Index groups) {
    weights_.assign(static_cast<std::size_t>(groups * kGroup * kPanelColumns), 0.0);
    std::vector<std::uint8_t> panel(weights_.size());
    for (std::size_t i = 0; i < panel.size(); ++i) {
      panel[i] = static_cast<std::uint8_t>(draw(1, 255));
      const auto at = static_cast<Index>(i);
      const Index depth = at / (kPanelColumns * kQuad) * kQuad + at % kQuad;
      weight(depth, at / kQuad % kPanelColumns) = panel[i] - 128.0;
    }
    return panel;
  }

  std::vector<std::uint8_t> int4_panel(Index groups) {
    weights_.assign(static_cast<std::size_t>(groups * kGroup * kPanelColumns), 0.0);
    constexpr Index kNumbers = kGroup * kPanelColumns / 2;
    std::vector<std::uint8_t> panel;
    for (Index group = 0; group < groups; ++group) {
      for (Index i = 0; i < kNumbers; ++i) {
        const auto byte = static_cast<std::uint8_t>(draw(0, 255));
        panel.push_back(byte);
        const Index depth = group * kGroup + i / (kPanelColumns / 2 * kQuad) * kQuad + i % kQuad;
        const Index column = i / kQuad % (kPanelColumns / 2);
        weight(depth, column) = 0.5 * (byte & 15) - 2.0;
        weight(depth, column + kPanelColumns / 2) = 0.5 * (byte >> 4) - 2.0;
      }
      for (const std::uint16_t half : {kFloat16Half, kFloat16MinusTwo}) {
        for (Index column = 0; column < kPanelColumns; ++column) {
          panel.push_back(static_cast<std::uint8_t>(half & 255));
          panel.push_back(static_cast<std::uint8_t>(half >> 8));
        }
      }
    }
    return panel;
  }

  double& weight(Index depth, Index column) {
    return weights_[static_cast<std::size_t>(depth * kPanelColumns + column)];
  }

  void check(float result, Index row, Index column, Index groups, bool infinite) {
    double sum = 0.0;
    double magnitude = 0.0;
    for (Index k = 0; k < groups * kGroup; ++k) {
      const double scale = scales_[static_cast<std::size_t>(row * groups + k / kGroup)];
      const double value = values_[static_cast<std::size_t>(row * left_.stride + k)];
      sum += scale * value * weight(k, column);
      magnitude += std::abs(scale * value * weight(k, column));
    }
    const bool right = infinite ? std::isnan(result) : std::abs(result - sum) <= 1e-6 * magnitude + 1e-30;
    expect(right, "row " + std::to_string(row) + ", column " + std::to_string(column) + ": " +
                      std::to_string(result) + " instead of " + std::to_string(sum));
  }

  IntegerKernel kernel_;
  std::mt19937 random_;
  std::vector<std::int8_t> values_;
  std::vector<float> scales_;
  std::vector<std::int32_t> offsets_;
  std::vector<float> sums_;
  QuantizedRows left_{};
  std::vector<double> weights_;  // [depth][32]
};

}  // namespace
}  // namespace triton_inflight

int main(int argc, char** argv) {
  const int products = argc > 1 ? std::stoi(argv[1]) : 200;
  const auto seed = static_cast<std::uint32_t>(argc > 2 ? std::stoul(argv[2]) : 1);
  for (const triton_inflight::IntegerIsa isa : triton_inflight::supported_integer_isas()) {
    try {
      triton_inflight::Fuzz fuzz(isa, seed);
      for (int i = 0; i < products; ++i) fuzz.product(i % 2 == 0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "version %d: %s\n", static_cast<int>(isa), error.what());
      return 1;
    }
    std::printf("version %d: %d products\n", static_cast<int>(isa), products);
  }
  return 0;
}

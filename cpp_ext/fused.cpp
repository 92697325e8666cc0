#include "fused.hpp"

#include <algorithm>
#include <vector>

#include "fused_scratch.hpp"
#include "integer_kernel.hpp"
#include "parallel.hpp"

namespace triton_inflight {
namespace {

// Fewer numbers than this are not worth waking up a thread.
constexpr Index kParallelNumbers = 32768;
// Bytes between two rows that put them into one set of the nearest cache, which then holds few of them.
constexpr Index kCacheWay = 4096;

// Ranges of panels, each a share of what is left: neighbours in memory go to one thread, and yet no thread is
// left with a long range when the others are done.
std::vector<Index> range_ends(Index panels, int threads) {
  std::vector<Index> ends;
  for (Index done = 0; done < panels;) {
    done += std::max<Index>(1, (panels - done) / (2 * threads));
    ends.push_back(done);
  }
  return ends;
}

Index element_size(bool bf16) { return bf16 ? 2 : 4; }

// A stride for rows of so many numbers of this size that spreads them over the cache.
Index spread_stride(Index width, Index size) {
  const Index line = 64 / size;
  const Index stride = (width + line - 1) / line * line;
  return stride * size % kCacheWay == 0 ? stride + line : stride;
}

void each_row(int threads, Index rows, Index width, const std::function<void(Index)>& task) {
  if (threads <= 1 || rows * width < kParallelNumbers) {
    for (Index row = 0; row < rows; ++row) task(row);
    return;
  }
  constexpr Index kRowsAtOnce = 8;
  parallel_for(threads, (rows + kRowsAtOnce - 1) / kRowsAtOnce, [&](Index part) {
    const Index end = std::min(rows, (part + 1) * kRowsAtOnce);
    for (Index row = part * kRowsAtOnce; row < end; ++row) task(row);
  });
}

// The input as the kernel wants it: itself if possible, else a copy of its own type and stride.
RowsView prepared(const FusedKernel& kernel, int threads, const PackedWeight& weight, const RowsView& in,
                  Index rows, Index width, Scratch& scratch) {
  const bool usable = in.bf16 == kernel.left_bf16 && width == weight.depth &&
                      (rows == 1 || in.stride * element_size(in.bf16) % kCacheWay != 0);
  if (usable) return in;
  const Index size = element_size(kernel.left_bf16);
  const Index stride = spread_stride(weight.depth, size);
  const RowsView out{scratch.take(rows * stride * size), stride, kernel.left_bf16};
  each_row(threads, rows, weight.depth, [&](Index row) {
    char* to = static_cast<char*>(out.data) + row * stride * size;
    kernel.convert(in, row, width, to);
    std::fill(to + width * size, to + weight.depth * size, char{0});
  });
  return out;
}

// The input as whole numbers.
QuantizedRows quantized(const IntegerKernel& kernel, int threads, const PackedWeight& weight,
                        const RowsView& in, Index rows, Index width, Scratch& scratch) {
  const Index stride = spread_stride(weight.depth, 1);
  const Index groups = weight.depth / kGroup;
  char* memory = static_cast<char*>(scratch.take(rows * (stride + 3 * groups * 4)));
  char* beside = memory + rows * stride;
  const QuantizedRows out{reinterpret_cast<std::int8_t*>(memory),
                          stride,
                          reinterpret_cast<float*>(beside),
                          reinterpret_cast<std::int32_t*>(beside + rows * groups * 4),
                          reinterpret_cast<float*>(beside + 2 * rows * groups * 4),
                          groups};
  each_row(threads, rows, weight.depth, [&](Index row) { kernel.quantize(in, width, out, row); });
  return out;
}

// Shares out the panels of a weight: task(panel, where its sums go).
template <typename Task>
void each_panel(int threads, const PackedWeight& weight, const RowsView& out, Index columns, bool gated,
                const Task& task) {
  const std::vector<Index> ends = range_ends(weight.panels(), threads);
  const Index written = gated ? kPanelColumns / 2 : kPanelColumns;
  parallel_for(threads, static_cast<Index>(ends.size()), [&](Index range) {
    const auto number = static_cast<std::size_t>(range);
    for (Index panel = number == 0 ? 0 : ends[number - 1]; panel < ends[number]; ++panel) {
      const Index first = panel * written;
      const Index count = std::min(written, columns - first);
      if (count <= 0) continue;
      const RowsView part{static_cast<char*>(out.data) + first * element_size(out.bf16), out.stride,
                          out.bf16};
      const auto of_panel = [&](const float* numbers) {
        return numbers == nullptr ? nullptr : numbers + panel * kPanelColumns;
      };
      task(weight.panel(panel),
           PanelOutput{of_panel(weight.scales), of_panel(weight.bias), part, count, gated});
    }
  });
}

void multiply(const Runtime& runtime, const PackedWeight& weight, const RowsView& in, Index width, Index rows,
              const RowsView& out, Index columns, bool gated) {
  thread_local Scratch scratch;
  if (weight.whole_numbers()) {
    const IntegerKernel kernel = integer_kernel(runtime.integer_isa);
    const QuantizedRows left = quantized(kernel, runtime.threads, weight, in, rows, width, scratch);
    const auto product = weight.type == WeightType::kInt8 ? kernel.multiply_int8 : kernel.multiply_int4;
    each_panel(runtime.threads, weight, out, columns, gated,
               [&](const void* panel, const PanelOutput& to) { product({left, rows, panel, to}); });
    return;
  }
  const FusedKernel kernel = fused_kernel(runtime.isa, weight.type == WeightType::kBf16);
  const RowsView left = prepared(kernel, runtime.threads, weight, in, rows, width, scratch);
  each_panel(runtime.threads, weight, out, columns, gated, [&](const void* panel, const PanelOutput& to) {
    kernel.multiply_panel({left.data, left.stride, rows, panel, weight.depth, to});
  });
}

}  // namespace

void linear(const Runtime& runtime, const PackedWeight& weight, const RowsView& in, Index width, Index rows,
            const RowsView& out, Index columns) {
  multiply(runtime, weight, in, width, rows, out, columns, false);
}

void gated_mlp(const Runtime& runtime, const PackedWeight& gate_up, const PackedWeight& down,
               const RowsView& in, Index width, Index rows, const RowsView& out, Index columns) {
  thread_local Scratch scratch;
  const bool bf16 =
      !down.whole_numbers() && fused_kernel(runtime.isa, down.type == WeightType::kBf16).left_bf16;
  const Index size = element_size(bf16);
  const Index stride = spread_stride(down.depth, size);
  const RowsView activations{scratch.take(rows * stride * size), stride, bf16};
  // Columns of the padding are zero times zero, so what is beyond the true width adds nothing.
  const Index inner = std::min(down.depth, gate_up.columns / 2);
  multiply(runtime, gate_up, in, width, rows, activations, inner, true);
  multiply(runtime, down, activations, inner, rows, out, columns, false);
}

void add(const Runtime& runtime, const AddCall& call, Index rows) {
  const FusedKernel kernel = fused_kernel(runtime.isa, false);
  each_row(runtime.threads, rows, call.width, [&](Index row) { kernel.add(call, row); });
}

void rms_norm(const Runtime& runtime, const NormCall& call, Index rows) {
  const FusedKernel kernel = fused_kernel(runtime.isa, false);
  each_row(runtime.threads, rows, call.width, [&](Index row) { kernel.norm(call, row); });
}

void rotate(const Runtime& runtime, const RotaryCall& call, Index tokens) {
  const FusedKernel kernel = fused_kernel(runtime.isa, false);
  each_row(runtime.threads, tokens, call.in.heads * call.total,
           [&](Index token) { kernel.rotate(call, token); });
}

}  // namespace triton_inflight

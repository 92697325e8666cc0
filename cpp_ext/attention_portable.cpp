#include "attention_item.hpp"
#include "attention_simd_portable.hpp"

namespace triton_inflight {

AttentionKernel portable_attention(bool bf16_pool) {
  return bf16_pool ? item_attention<PortableSimd, WidenedBf16Cells<PortableSimd>>()
                   : item_attention<PortableSimd, Float32Cells<PortableSimd>>();
}

}  // namespace triton_inflight

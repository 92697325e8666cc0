#include "attention_item.hpp"
#include "attention_simd_avx2.hpp"

namespace triton_inflight {

AttentionKernel avx2_attention(bool bf16_pool) {
  return bf16_pool ? item_attention<Avx2Simd, WidenedBf16Cells<Avx2Simd>>()
                   : item_attention<Avx2Simd, Float32Cells<Avx2Simd>>();
}

}  // namespace triton_inflight

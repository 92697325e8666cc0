#include "attention_item.hpp"
#include "attention_simd_avx512.hpp"

namespace triton_inflight {

AttentionKernel avx512_attention(bool bf16_pool) {
  return bf16_pool ? item_attention<Avx512Simd, WidenedBf16Cells<Avx512Simd>>()
                   : item_attention<Avx512Simd, Float32Cells<Avx512Simd>>();
}

}  // namespace triton_inflight

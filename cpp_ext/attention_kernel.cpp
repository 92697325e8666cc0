#include "attention_kernel.hpp"

namespace triton_inflight {

Index scratch_size(const PoolLayout& layout) {
  const Index span = blocks_per_span(layout.tokens_per_block) * layout.tokens_per_block;
  return kTileRows * (layout.padded_key_width() + span) +
         2 * SpanState::size(kTileRows, layout.padded_value_width());
}

AttentionKernel attention_kernel(Isa isa, bool bf16_pool) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512Bf16 && bf16_pool) return avx512_bf16_attention();
  if (isa == Isa::kAvx512 || isa == Isa::kAvx512Bf16) return avx512_attention(bf16_pool);
  if (isa == Isa::kAvx2) return avx2_attention(bf16_pool);
#else
  static_cast<void>(isa);
#endif
  return portable_attention(bf16_pool);
}

}  // namespace triton_inflight

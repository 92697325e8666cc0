#include "fused_kernel.hpp"

namespace triton_inflight {

FusedKernel fused_kernel(Isa isa, bool bf16_weights) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512Bf16 && bf16_weights) return avx512_bf16_fused();
  if (isa == Isa::kAvx512 || isa == Isa::kAvx512Bf16) return avx512_fused(bf16_weights);
  if (isa == Isa::kAvx2) return avx2_fused(bf16_weights);
#else
  static_cast<void>(isa);
#endif
  return portable_fused(bf16_weights);
}

}  // namespace triton_inflight

#include "integer_kernel.hpp"

namespace triton_inflight {

IntegerKernel integer_kernel(IntegerIsa isa) {
#if defined(__x86_64__)
  if (isa == IntegerIsa::kAvx512Vnni) return avx512_vnni_integer();
  if (isa == IntegerIsa::kAvxVnni) return avx_vnni_integer();
  if (isa == IntegerIsa::kAvx2) return avx2_integer();
#else
  static_cast<void>(isa);
#endif
  return portable_integer();
}

}  // namespace triton_inflight

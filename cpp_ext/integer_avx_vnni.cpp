#include "integer_dot_avx2.hpp"

namespace triton_inflight {

IntegerKernel avx_vnni_integer() { return integer_table<AvxVnniDot>(); }

}  // namespace triton_inflight

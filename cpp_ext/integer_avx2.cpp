#include "integer_dot_avx2.hpp"

namespace triton_inflight {

IntegerKernel avx2_integer() { return integer_table<Avx2Dot>(); }

}  // namespace triton_inflight

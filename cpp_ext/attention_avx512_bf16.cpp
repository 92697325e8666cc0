#include "attention_cells_bf16.hpp"
#include "attention_item.hpp"

namespace triton_inflight {

AttentionKernel avx512_bf16_attention() { return item_attention<Avx512Simd, DotBf16Cells>(); }

}  // namespace triton_inflight

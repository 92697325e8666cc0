// The extension module: one bind_* function per subject, each in its own file.
#include <pybind11/pybind11.h>

namespace triton_inflight {
void bind_attention(pybind11::module_& module);
void bind_decoder_stack(pybind11::module_& module);
void bind_fused(pybind11::module_& module);
void bind_kv_store(pybind11::module_& module);
}  // namespace triton_inflight

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native parts of triton_inflight.";
  // Of _native.pyi as it was at the build; triton_inflight/native.py compares it with the file.
  module.attr("interface_hash") = TRITON_INFLIGHT_INTERFACE_HASH;
  triton_inflight::bind_attention(module);
  triton_inflight::bind_fused(module);
  triton_inflight::bind_decoder_stack(module);
  triton_inflight::bind_kv_store(module);
}

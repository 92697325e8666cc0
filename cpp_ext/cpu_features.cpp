#include "cpu_features.hpp"

#include <cstdlib>
#include <stdexcept>

namespace triton_inflight {

// __builtin_cpu_supports also asks the operating system (xgetbv) whether it saves the wide registers.
std::vector<Isa> supported_isas() {
  std::vector<Isa> isas{Isa::kPortable};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return isas;
  isas.push_back(Isa::kAvx2);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return isas;
  isas.push_back(Isa::kAvx512);
  if (__builtin_cpu_supports("avx512bf16")) isas.push_back(Isa::kAvx512Bf16);
#endif
  return isas;
}

std::vector<IntegerIsa> supported_integer_isas() {
  std::vector<IntegerIsa> isas{IntegerIsa::kPortable};
#if defined(__x86_64__)
  const Isa isa = supported_isas().back();
  if (isa == Isa::kPortable || !__builtin_cpu_supports("f16c")) return isas;
  isas.push_back(IntegerIsa::kAvx2);
  if (__builtin_cpu_supports("avxvnni")) isas.push_back(IntegerIsa::kAvxVnni);
  if (isa != Isa::kAvx2 && __builtin_cpu_supports("avx512vnni")) isas.push_back(IntegerIsa::kAvx512Vnni);
#endif
  return isas;
}

IntegerIsa integer_isa_for(Isa isa) {
  if (isa == Isa::kPortable) return IntegerIsa::kPortable;
  std::vector<IntegerIsa> isas = supported_integer_isas();
  if (isa == Isa::kAvx2) std::erase(isas, IntegerIsa::kAvx512Vnni);
  return isas.back();
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kPortable:
      break;
  }
  return "portable";
}

Isa parse_isa(const std::string& name) {
  std::string allowed;
  for (const Isa isa : supported_isas()) {
    if (name == isa_name(isa)) return isa;
    if (!allowed.empty()) allowed.append(", ");
    allowed.append(isa_name(isa));
  }
  throw std::invalid_argument("TRITON_INFLIGHT_ISA is '" + name + "', but this machine can run: " + allowed +
                              "; leave it unset for the fastest of them");
}

Isa chosen_isa() {
  const char* forced = std::getenv("TRITON_INFLIGHT_ISA");
  return forced == nullptr || *forced == '\0' ? supported_isas().back() : parse_isa(forced);
}

}  // namespace triton_inflight

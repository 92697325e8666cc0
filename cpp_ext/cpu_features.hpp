// What the processor can do, and which versions of the kernels may therefore run.
#pragma once

#include <string>
#include <vector>

namespace triton_inflight {

// Versions of the kernels, slowest first. Each needs everything that the ones before it need.
enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

// Versions of the products of whole numbers, slowest first. Which of them a processor has does not follow
// from its Isa: AVX-512 came without VNNI first, and AVX2 got it later.
enum class IntegerIsa { kPortable, kAvx2, kAvxVnni, kAvx512Vnni };

// Versions that this processor and operating system can run; never empty.
std::vector<Isa> supported_isas();
std::vector<IntegerIsa> supported_integer_isas();

// The fastest supported one that goes with `isa`: portable with portable, no AVX-512 with AVX2.
IntegerIsa integer_isa_for(Isa isa);

// The fastest supported version, or the one named by the environment variable TRITON_INFLIGHT_ISA.
// Throws std::invalid_argument if that names no version, or one that cannot run here.
Isa chosen_isa();

// Throws std::invalid_argument, saying what is allowed, if the name is unknown or cannot run here.
Isa parse_isa(const std::string& name);

const char* isa_name(Isa isa);

}  // namespace triton_inflight

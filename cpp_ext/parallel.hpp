// Work shared out over the threads that torch already has.
#pragma once

#include <cstdint>
#include <functional>

namespace triton_inflight {

// Calls task(index) for every index from 0 to count - 1, from up to `threads` threads, lower indices first.
// Returns when all are done. Tasks must not throw.
//
// The threads are those of torch's own OpenMP runtime: a second pool would compete with its spinning
// threads for the same cores. In a process without one, the calling thread does all the work.
void parallel_for(int threads, std::int64_t count, const std::function<void(std::int64_t)>& task);

}  // namespace triton_inflight

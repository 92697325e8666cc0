#include "parallel.hpp"

#include <dlfcn.h>

#include <atomic>

namespace triton_inflight {
namespace {

// The entry point that compilers emit for "#pragma omp parallel"; LLVM's and Intel's runtimes have it too.
using GompParallel = void (*)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);

// Finds the runtime that is already loaded (RTLD_NOLOAD), rather than linking one: which library torch
// brought, and under which path, is known only at run time.
GompParallel find_runtime() {
  for (const char* name : {"libgomp.so.1", "libomp.so", "libomp.so.5", "libiomp5.so"}) {
    void* library = dlopen(name, RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) continue;
    if (void* symbol = dlsym(library, "GOMP_parallel")) return reinterpret_cast<GompParallel>(symbol);
  }
  return nullptr;
}

struct Loop {
  const std::function<void(std::int64_t)>& task;
  const std::int64_t count;
  std::atomic<std::int64_t> next{0};
};

void take_tasks(void* argument) {
  Loop& loop = *static_cast<Loop*>(argument);
  for (std::int64_t i = loop.next.fetch_add(1); i < loop.count; i = loop.next.fetch_add(1)) loop.task(i);
}

}  // namespace

void parallel_for(int threads, std::int64_t count, const std::function<void(std::int64_t)>& task) {
  static const GompParallel run_team = find_runtime();
  Loop loop{task, count};
  if (threads <= 1 || count <= 1 || run_team == nullptr) {
    take_tasks(&loop);
    return;
  }
  // Always the whole team: a smaller one would make the runtime end threads and start them anew later.
  run_team(&take_tasks, &loop, static_cast<unsigned>(threads), 0);
}

}  // namespace triton_inflight

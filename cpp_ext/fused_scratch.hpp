// Memory for results in between.
#pragma once

#include <cstddef>
#include <memory>

#include "fused_types.hpp"

namespace triton_inflight {

// Memory that is kept from one call to the next and grows as needed, aligned to a cache line.
class Scratch {
 public:
  void* take(Index bytes) {
    constexpr std::size_t kAlignment = 64;
    const auto wanted = static_cast<std::size_t>(bytes) + kAlignment;
    if (size_ < wanted) {
      memory_ = std::make_unique_for_overwrite<char[]>(wanted);
      size_ = wanted;
    }
    void* start = memory_.get();
    std::size_t room = size_;
    return std::align(kAlignment, static_cast<std::size_t>(bytes), start, room);
  }

 private:
  std::unique_ptr<char[]> memory_;
  std::size_t size_ = 0;
};

}  // namespace triton_inflight

#include "ops/gemm/tile_scratch.h"

#include "ops/gemm/tile_products.h"

namespace tessera {

uint32_t* TileMemory::at_least(int64_t words) {
  constexpr size_t kLine = 64;
  const size_t wanted = static_cast<size_t>(words) + kLine / sizeof(uint32_t);
  if (words_.size() < wanted) {
    words_.clear();  // so that nothing is copied
    words_.resize(wanted);
  }
  const auto address = reinterpret_cast<uintptr_t>(words_.data());
  return words_.data() + (kLine - address % kLine) % kLine / sizeof(uint32_t);
}

uint32_t* tile_scratch() {
  thread_local TileMemory memory;
  return memory.at_least(tile_scratch_words());
}

}  // namespace tessera

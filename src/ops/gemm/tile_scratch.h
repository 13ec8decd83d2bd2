#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// Words at a multiple of 64 bytes, which grow and are never given back.
class TileMemory {
 public:
  uint32_t* at_least(int64_t words);

 private:
  std::vector<uint32_t> words_;
};

/// This thread's memory for multiply_on_tiles, made when first asked for.
uint32_t* tile_scratch();

}  // namespace tessera

#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// Words at a multiple of 64 bytes, which grow and are never given back.
class AlignedWords {
 public:
  uint32_t* at_least(int64_t words);

 private:
  std::vector<uint32_t> words_;
};

}  // namespace tessera

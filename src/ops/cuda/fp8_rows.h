#pragma once

#include <cstdint>

namespace tessera::cuda {

/// Rows of E4M3 whose parts of 128 columns have a scale each, as Quantize (ops/quantize/quantize.h)
/// makes them. Columns are a multiple of 128, `values` of 16 bytes.
struct Fp8Rows {
  static constexpr int kBlock = 128;

  uint8_t* values = nullptr;
  float* scales = nullptr;
  int64_t columns = 0;
};

}  // namespace tessera::cuda

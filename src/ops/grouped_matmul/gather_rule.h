#pragma once

namespace tessera {

/// What gathering adds to grouped products on tensor cores, which read their rows from everywhere
/// by threads instead of by the copy engine: time in proportion to the products' FLOPs, here as the
/// bytes that permute reads and writes in it. On one H200, BF16, permute moved 3.65 TB/s; per FLOP
/// products by rows took 0.73 to 1.10 fs more, gradients of weights 0.30 to 0.70, from 32,768 rows
/// of 28,672 features to 262,144 of 256. The worst of them counts here.
constexpr double gathered_rows_cost(double flops) {
  constexpr double kBytesPerFlop = 4.0e-3;
  return kBytesPerFlop * flops;
}
constexpr double gathered_wgrad_cost(double flops) {
  constexpr double kBytesPerFlop = 2.6e-3;
  return kBytesPerFlop * flops;
}

}  // namespace tessera

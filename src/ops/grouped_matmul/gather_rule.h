#pragma once

namespace tessera {

/// What gathering adds to grouped products on tensor cores, which read their rows from everywhere
/// by threads instead of by the copy engine: time in proportion to the products' FLOPs, here as the
/// bytes that permute reads and writes in it. On one H200, BF16, permute moved 3.65 TB/s; per FLOP
/// products by rows took 0.66 to 0.91 fs more, gradients of weights 0.43 to 0.70, from 262,144 rows
/// of 256 features to 32,768 of 28,672. What they took where experts have few features counts here,
/// since it is there that the choice changes.
constexpr double gathered_rows_cost(double flops) {
  constexpr double kBytesPerFlop = 2.5e-3;
  return kBytesPerFlop * flops;
}
constexpr double gathered_wgrad_cost(double flops) {
  constexpr double kBytesPerFlop = 1.8e-3;
  return kBytesPerFlop * flops;
}

}  // namespace tessera

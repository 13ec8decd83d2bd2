#pragma once

namespace tessera {

/// What gathering adds to grouped products on tensor cores, which read their rows from everywhere
/// by threads instead of by TMA: time in proportion to the products' FLOPs, here as the
/// bytes that permute reads and writes in it. On one H200, BF16, permute moved 3.65 TB/s; alone,
/// products by rows took 0.05 to 0.09 fs more per FLOP, and gradients of weights, whose tiles are
/// then not taken ping-pong, 0.14 to 0.26. In a whole step power sets the clock, and a copy takes
/// power too: with experts of 768 features it was 0.4 % faster to gather for that gradient as well.
constexpr double gathered_rows_cost(double flops) {
  constexpr double kBytesPerFlop = 2.5e-4;
  return kBytesPerFlop * flops;
}
constexpr double gathered_wgrad_cost(double flops) {
  constexpr double kBytesPerFlop = 6e-4;
  return kBytesPerFlop * flops;
}

}  // namespace tessera

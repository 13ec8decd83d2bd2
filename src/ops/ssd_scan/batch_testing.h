#pragma once

#include <cmath>

#include "ops/ssd_scan/ssd_scan.h"
#include "ops/testing/batch_passes.h"

namespace tessera::testing {

/// Sequences of a state-space scan, with what their packed rows give by SsdScan on the CPU.
struct SsdBatchCase {
  std::vector<OwnedTensor> owned;
  BatchCase batch;
  std::vector<double> expected;

  SsdBatchCase(const SsdSpec& spec, const std::vector<int64_t>& lengths, DType dtype,
               const Backend& cpu) {
    const std::vector<int32_t> bounds = bounds_of(lengths);
    const int64_t tokens = bounds.back();
    Random random(5, 0);
    const Shape states = {tokens, spec.num_groups * spec.state_size};
    owned.push_back(random_tensor(dtype, {tokens, spec.num_heads * spec.head_size}, random));
    owned.push_back(random_tensor(dtype, {tokens, spec.num_heads}, random));
    for (int i = 0; i < 2; ++i) owned.push_back(random_tensor(dtype, states, random, 0.5));
    for (int i = 0; i < 3; ++i)
      owned.push_back(random_tensor(DType::kF32, {spec.num_heads}, random));
    batch.lengths = lengths;
    batch.rows.assign(owned.begin(), owned.begin() + SsdScan::kALog);
    batch.fixed.assign(owned.begin() + SsdScan::kALog, owned.end());
    batch.state = {DType::kF32,
                   {batch.num_slots() * spec.num_heads * spec.state_size, spec.head_size}};
    std::vector<Tensor> whole(owned.begin(), owned.end());
    const OwnedTensor ends = tensor_of_i32({std::ssize(bounds)}, bounds);
    whole.push_back(ends);
    const OwnedTensor y(dtype, {tokens, spec.num_heads * spec.head_size}, "y");
    run_kernel(SsdScan(spec), cpu, whole, std::vector<Tensor>{y});
    expected = to_doubles(y);
  }
};

}  // namespace tessera::testing

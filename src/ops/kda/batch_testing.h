#pragma once

#include <cmath>

#include "ops/kda/kda.h"
#include "ops/testing/batch_passes.h"

namespace tessera::testing {

/// Sequences of Kimi Delta Attention, with what their packed rows give by Kda on the CPU.
struct KdaBatchCase {
  std::vector<OwnedTensor> owned;
  BatchCase batch;
  std::vector<double> expected;

  KdaBatchCase(const KdaSpec& spec, const std::vector<int64_t>& lengths, DType dtype,
               const Backend& cpu) {
    const std::vector<int32_t> bounds = bounds_of(lengths);
    const int64_t tokens = bounds.back();
    Random random(5, 0);
    for (int i = 0; i < 2; ++i)
      owned.push_back(random_tensor(dtype, {tokens, spec.num_heads * spec.key_size}, random));
    owned.push_back(random_tensor(dtype, {tokens, spec.num_heads * spec.value_size}, random));
    owned.push_back(random_tensor(DType::kF32, {tokens, spec.num_heads * spec.key_size}, random));
    for (float& x : owned.back().get().span<float>()) x = -0.3F * std::abs(x);
    owned.push_back(random_tensor(DType::kF32, {tokens, spec.num_heads}, random));
    for (float& x : owned.back().get().span<float>()) x = 1.0F / (1.0F + std::exp(-x));
    batch.lengths = lengths;
    batch.rows.assign(owned.begin(), owned.end());
    batch.state = {DType::kF32,
                   {batch.num_slots() * spec.num_heads * spec.key_size, spec.value_size}};
    std::vector<Tensor> whole = batch.rows;
    const OwnedTensor ends = tensor_of_i32({std::ssize(bounds)}, bounds);
    whole.push_back(ends);
    const OwnedTensor o(dtype, {tokens, spec.num_heads * spec.value_size}, "o");
    run_kernel(Kda(spec), cpu, whole, std::vector<Tensor>{o});
    expected = to_doubles(o);
  }
};

}  // namespace tessera::testing

#pragma once

#include "ops/short_conv/short_conv.h"
#include "ops/short_conv/short_conv_batch.h"
#include "ops/testing/batch_passes.h"

namespace tessera::testing {

/// Sequences of a short convolution, with what their packed rows give by ShortConv on the CPU.
struct ConvBatchCase {
  std::vector<OwnedTensor> owned;
  BatchCase batch;
  std::vector<double> expected;

  ConvBatchCase(const std::vector<int64_t>& lengths, int64_t channels, int64_t taps, DType dtype,
                const Backend& cpu, const ShortConvSpec& spec = {}) {
    const std::vector<int32_t> bounds = bounds_of(lengths);
    Random random(6, 0);
    owned.push_back(random_tensor(dtype, {bounds.back(), channels}, random));
    owned.push_back(random_tensor(DType::kF32, {channels, taps}, random));
    batch.lengths = lengths;
    batch.rows = {owned[0]};
    batch.fixed = {owned[1]};
    if (spec.biased) {
      owned.push_back(random_tensor(DType::kF32, {channels}, random));
      batch.last = {owned[2]};
    }
    batch.state = {dtype, {batch.num_slots() * taps, channels}};
    const OwnedTensor ends = tensor_of_i32({std::ssize(bounds)}, bounds);
    const OwnedTensor y(dtype, {bounds.back(), channels}, "y");
    std::vector<Tensor> whole = {owned[0], owned[1], ends};
    if (spec.biased) whole.push_back(owned[2]);
    run_kernel(ShortConv(spec), cpu, whole, std::vector<Tensor>{y});
    expected = to_doubles(y);
  }
};

}  // namespace tessera::testing

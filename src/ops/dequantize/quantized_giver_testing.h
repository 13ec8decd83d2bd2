#pragma once

#include <gtest/gtest.h>

#include <cstring>

#include "ops/dequantize/scaled_reader_testing.h"
#include "ops/quantize/gives_quantized.h"

/// Operators that quantize what they give beside those whose results another quantizes.
namespace tessera::testing {

/// `plain` gives values as output `at` of `values`, of the host's memory, of which the first
/// `rows_in_use` rows are; giving FP8 too it must give the same bits, and those that Quantize makes
/// of these rows, and leave the others as they were.
inline void expect_gives_quantized(const Operator& plain, int at, const std::vector<Tensor>& values,
                                   int64_t rows_in_use, const Backend& backend) {
  const QuantizeSpec spec = short_blocks();
  const OperatorPtr giver =
      dynamic_cast<const GivesQuantized&>(plain).giving_quantized(at, Quantize(spec));
  ASSERT_NE(giver, nullptr) << plain.attributes();
  EXPECT_NE(giver->attributes(), plain.attributes());
  std::vector<OwnedTensor> kept;
  std::vector<Tensor> inputs;
  std::vector<ValueType> types;
  for (const Tensor& value : values) {
    kept.push_back(copy_to(backend, value));
    inputs.push_back(kept.back());
    types.push_back(type_of(value));
  }
  const std::vector<ValueType> plain_types = plain.infer(types);
  const std::vector<ValueType> all_types = giver->infer(types);
  ASSERT_EQ(all_types.size(), plain_types.size() + 1);
  const auto expected = results_of(plain, inputs, plain_types, backend);

  std::vector<OwnedTensor> results;
  std::vector<Tensor> outputs;
  for (const ValueType& type : plain_types) {
    const OwnedTensor begin(type.dtype, type.shape);
    std::memset(begin.get().data, 0x11, begin.get().num_bytes());
    results.push_back(copy_to(backend, begin));
    outputs.push_back(results.back());
  }
  const ScaledTensor untouched(all_types.back());
  const CopiedRows fp8(untouched, backend);
  outputs.push_back(fp8.tensor);
  run_kernel(*giver, backend, inputs, outputs);
  for (size_t i = 0; i < expected.size(); ++i) {
    const OwnedTensor found = copy_to_host(backend, outputs[i]);
    EXPECT_TRUE(are_alike(found.get(), expected[i].get(), false)) << giver->attributes() << i;
  }
  const ScaledTensor found(all_types.back());
  backend.device().copy(found.buffer.data(), fp8.buffer.data(), fp8.buffer.num_bytes());
  const ScaledTensor truth = quantize(expected[at].get(), spec);
  const int64_t columns = truth.tensor.shape[1];
  const std::vector<uint8_t> codes = found.elements();
  const std::vector<uint8_t> true_codes = truth.elements();
  for (int64_t i = 0; i < std::ssize(codes); ++i)
    ASSERT_EQ(codes[i], i < rows_in_use * columns ? true_codes[i] : 0xff)
        << giver->attributes() << " at " << i;
  for (int64_t i = 0; i < rows_in_use * columns / 128; ++i)
    ASSERT_EQ(found.scales()[i], truth.scales()[i]) << giver->attributes() << " scale " << i;
}

}  // namespace tessera::testing

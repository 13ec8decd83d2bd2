#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/backend.h"
#include "ops/dequantize/dequantize_testing.h"
#include "ops/reads_scaled_rows.h"
#include "ops/scaled_rows.h"
#include "ops/testing/gpu_kernel.h"

/// Operators that read rows of FP8 beside those that read what these stand for, on one back end.
namespace tessera::testing {

/// E4M3, by rows and parts of them, of which some cut rows off their vectors.
inline std::vector<QuantizeSpec> scaled_reader_specs() {
  std::vector<QuantizeSpec> specs;
  for (const ScaleLayout& scale : {ScaleLayout::row(), ScaleLayout::block(1, 128),
                                   ScaleLayout::block(1, 32), ScaleLayout::block(1, 5)})
    specs.push_back({.scale = scale});
  return specs;
}

/// A tensor of FP8 in a back end's memory.
struct CopiedRows {
  CopiedRows(const ScaledTensor& host, const Backend& backend)
      : buffer(host.buffer.num_bytes(), "scaled rows", backend.device()),
        tensor(buffer.tensor(0, host.tensor.dtype, host.tensor.shape)) {
    tensor.scale = host.tensor.scale;
    backend.device().copy(buffer.data(), host.buffer.data(), host.buffer.num_bytes());
  }

  Buffer buffer;
  Tensor tensor;
};

/// The results, whose memory begins as the same bytes.
inline std::vector<OwnedTensor> results_of(const Operator& op, const std::vector<Tensor>& inputs,
                                           const std::vector<ValueType>& types,
                                           const Backend& backend) {
  std::vector<OwnedTensor> results;
  std::vector<Tensor> outputs;
  for (const ValueType& type : types) {
    const OwnedTensor begin(type.dtype, type.shape);
    std::memset(begin.get().data, 0x11, begin.get().num_bytes());
    results.push_back(copy_to(backend, begin));
    outputs.push_back(results.back());
  }
  run_kernel(op, backend, inputs, outputs);
  std::vector<OwnedTensor> copies;
  for (const Tensor& output : outputs) copies.push_back(copy_to_host(backend, output));
  return copies;
}

/// Whether two results have the same bits. Sums over rows, F32 and one for each, need only be near
/// where `may_sum_anew`.
inline bool are_alike(const Tensor& found, const Tensor& expected, bool may_sum_anew) {
  const int64_t bytes = expected.num_bytes();
  if (bytes == 0 || std::memcmp(found.data, expected.data, bytes) == 0) return true;
  if (!may_sum_anew || expected.dtype != DType::kF32 || expected.shape.rank() != 1) return false;
  double most = 0;
  double error = 0;
  for (int64_t i = 0; i < expected.num_elements(); ++i) {
    most = std::max<double>(most, std::abs(expected.as<float>()[i]));
    error = std::max<double>(error, std::abs(found.as<float>()[i] - expected.as<float>()[i]));
  }
  return error <= 1e-5 * most;
}

/// `plain` reads `values`, of the host's memory, as its input `at`; reading rows of FP8 it must
/// give the bits that it gives of what they stand for.
inline void expect_reads_scaled(const Operator& plain, int at, const std::vector<Tensor>& values,
                                const QuantizeSpec& spec, const Backend& backend) {
  const OperatorPtr scaled = dynamic_cast<const ReadsScaledRows&>(plain).reading_scaled_rows(at);
  const ScaledTensor rows = quantize(values[at], spec);
  const OwnedTensor rounded = dequantize(rows.tensor, values[at].dtype);
  const CopiedRows copied(rows, backend);
  std::vector<OwnedTensor> kept;
  std::vector<Tensor> inputs, scaled_inputs;
  std::vector<ValueType> types, scaled_types;
  for (int i = 0; i < std::ssize(values); ++i) {
    const bool is_scaled = i == at;
    kept.push_back(copy_to(backend, is_scaled ? rounded.get() : values[i]));
    inputs.push_back(kept.back());
    scaled_inputs.push_back(is_scaled ? copied.tensor : inputs.back());
    types.push_back(type_of(inputs.back()));
    scaled_types.push_back(type_of(scaled_inputs.back()));
  }
  const std::vector<ValueType> result_types = plain.infer(types);
  EXPECT_EQ(scaled->infer(scaled_types), result_types);
  EXPECT_NE(scaled->attributes(), plain.attributes());
  const auto expected = results_of(plain, inputs, result_types, backend);
  const auto found = results_of(*scaled, scaled_inputs, result_types, backend);
  // Scales that cut rows off a device's vectors change which lane adds which columns.
  constexpr int64_t kVector = 8;
  const bool cuts_vectors =
      columns_of_scale(spec.scale, values[at].shape[1]) % kVector != 0 && !backend.is_host();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(are_alike(found[i].get(), expected[i].get(), cuts_vectors))
        << scaled->name() << " " << scaled->attributes() << " of " << scaled_types[at].to_string()
        << ", result " << i;
  }
}

}  // namespace tessera::testing

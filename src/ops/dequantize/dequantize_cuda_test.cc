// Dequantize on a GPU against the CPU's, bit by bit.
#include <gtest/gtest.h>

#include "ops/cuda/device_buffer.h"
#include "ops/dequantize/dequantize_kernels.h"
#include "ops/dequantize/dequantize_testing.h"
#include "ops/float_word.h"
#include "ops/scaled_rows.h"
#include "ops/testing/gpu_test.h"

namespace tessera::cuda {
namespace {

using testing::ScaledTensor;

class DequantizeCuda : public testing::GpuTest {};

/// `extent`: rows in use; those behind keep what they had.
void check_case(const Tensor& x, const QuantizeSpec& spec, DType dtype, int64_t extent) {
  const ScaledTensor coded = testing::quantize(x, spec);
  const OwnedTensor expected = testing::dequantize(coded.tensor, dtype);
  const OwnedTensor found(dtype, x.shape);
  std::fill_n(static_cast<uint8_t*>(found.get().data), found.get().num_bytes(), uint8_t{0x11});
  DeviceBuffer from(coded.buffer.num_bytes());
  from.copy_from(coded.buffer.data());
  const ptrdiff_t scales_at =
      static_cast<std::byte*>(scales_of(coded.tensor).data) - coded.buffer.data();
  DeviceBuffer to(found.get().num_bytes());
  to.copy_from(found.get().data);
  DeviceBuffer rows_in_use(sizeof(int64_t));
  rows_in_use.copy_from(&extent);
  launch_dequantize(
      {.element = spec.element,
       .dtype = dtype,
       .x = from.as<uint8_t>(),
       .scales = reinterpret_cast<const float*>(from.as<std::byte>() + scales_at),
       .y = to.as<void>(),
       .rows = {x.shape[0], extent < x.shape[0] ? rows_in_use.as<int64_t>() : nullptr},
       .num_columns = x.shape[1],
       .columns_of_scale = columns_of_scale(spec.scale, x.shape[1]),
       .rows_of_scale = spec.scale.rows},
      nullptr);
  check(cudaDeviceSynchronize());
  to.copy_to(found.get().data);
  const auto* const bytes = static_cast<const uint8_t*>(found.get().data);
  const auto* const truth = static_cast<const uint8_t*>(expected.get().data);
  const int64_t in_use = x.shape[1] * dtype_size(dtype) * extent;
  for (int64_t i = 0; i < found.get().num_bytes(); ++i)
    ASSERT_EQ(bytes[i], i < in_use ? truth[i] : 0x11)
        << spec.scale.to_string() << " " << x.shape.to_string() << " extent " << extent << " byte "
        << i;
}

void check_cases(const Shape& shape, Random& random) {
  for (const QuantizeSpec& spec : testing::dequantized_specs()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const OwnedTensor x = testing::random_tensor(dtype, shape, random, 5.0);
      for (const int64_t extent : {int64_t{0}, shape[0] / 2, shape[0]})
        check_case(x.get(), spec, dtype, extent);
    }
  }
}

TEST_F(DequantizeCuda, TinyRows) {
  Random random(5, 1);
  check_cases({7, 136}, random);
}

TEST_F(DequantizeCuda, GivesTheHostsBits) {
  Random random(6, 1);
  for (const Shape& shape : {Shape{1, 1}, {3, 5}, {64, 128}, {130, 257}, {257, 2048}})
    check_cases(shape, random);
}

}  // namespace
}  // namespace tessera::cuda

// Quantize on a GPU against the CPU's, bit by bit.
#include <gtest/gtest.h>

#include "ops/cuda/device_buffer.h"
#include "ops/quantize/quantize_kernels.h"
#include "ops/quantize/quantize_testing.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera::cuda {
namespace {

using testing::ScaledTensor;

class QuantizeCuda : public testing::GpuTest {};

/// `extent`: rows in use; those behind keep what they had.
void check_case(const Tensor& x, const QuantizeSpec& spec, int64_t extent) {
  const Quantize op(spec);
  const ScaledTensor expected = testing::quantize(x, spec);
  const std::vector<ValueType> inputs = {testing::type_of(x)};
  const ScaledTensor found(op.infer(inputs)[Quantize::kY]);
  DeviceBuffer from(x.num_bytes());
  from.copy_from(x.data);
  DeviceBuffer to(found.tensor.num_bytes());
  to.copy_from(found.tensor.data);
  DeviceBuffer rows_in_use(sizeof(int64_t));
  rows_in_use.copy_from(&extent);
  const ptrdiff_t scales_at = static_cast<std::byte*>(scales_of(found.tensor).data) -
                              static_cast<std::byte*>(found.tensor.data);
  launch_quantize({.dtype = x.dtype,
                   .element = spec.element,
                   .x = from.as<void>(),
                   .y = to.as<void>(),
                   .scales = reinterpret_cast<float*>(to.as<std::byte>() + scales_at),
                   .num_rows = x.shape[0],
                   .num_columns = x.shape[1],
                   .block_rows = op.block_rows(),
                   .block_columns = op.block_columns(x.shape[1]),
                   .smallest_amax = Quantize::kSmallestAmax,
                   .extent = extent < x.shape[0] ? rows_in_use.as<int64_t>() : nullptr},
                  nullptr);
  check(cudaDeviceSynchronize());
  to.copy_to(found.tensor.data);
  const std::string what = fmt::format("{} {} {} extent {}", dtype_name(x.dtype),
                                       x.shape.to_string(), op.attributes(), extent);
  const int64_t columns = x.shape[1];
  const std::vector<uint8_t> codes = found.elements();
  const std::vector<uint8_t> truth = expected.elements();
  for (int64_t i = 0; i < std::ssize(codes); ++i)
    ASSERT_EQ(codes[i], i / columns < extent ? truth[i] : 0xff) << what << " at " << i;
  const std::vector<float> scales = found.scales();
  const int64_t scales_in_use = std::ssize(scales) / x.shape[0] * extent;
  for (int64_t i = 0; i < (op.block_rows() == 1 ? scales_in_use : std::ssize(scales)); ++i)
    ASSERT_EQ(scales[i], expected.scales()[i]) << what << " scale " << i;
}

TEST_F(QuantizeCuda, TinyBlocksAndRows) {
  Random random(5, 1);
  const OwnedTensor x = testing::random_tensor(DType::kBF16, {3, 136}, random);
  check_case(x.get(), {.scale = ScaleLayout::block(1, 128)}, 3);
  check_case(x.get(), {}, 2);
}

TEST_F(QuantizeCuda, GivesTheHostsBits) {
  Random random(6, 1);
  for (const ScaleLayout& layout : {ScaleLayout::row(), ScaleLayout::block(1, 128),
                                    ScaleLayout::block(128, 128), ScaleLayout::block(7, 20)}) {
    for (const Shape& shape :
         {Shape{1, 1}, {1, 128}, {5, 300}, {131, 2048}, {40, 7168}, {256, 384}, {9, 1000}}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const OwnedTensor x = testing::random_tensor(dtype, shape, random, 10.0);
        for (const DType element : {DType::kE4M3, DType::kE5M2})
          check_case(x.get(), {.element = element, .scale = layout}, shape[0]);
        const bool ragged = layout.kind == ScaleLayout::Kind::kRow || layout.rows == 1;
        if (ragged && shape[0] > 1) check_case(x.get(), {.scale = layout}, shape[0] / 2);
      }
    }
  }
}

TEST_F(QuantizeCuda, NonFiniteAndTinyNumbers) {
  const OwnedTensor x = testing::tensor_of(
      {4, 2}, {0, -0.0F, 1e-42F, 0, std::numeric_limits<float>::infinity(), 2, std::nanf(""), 2});
  check_case(x.get(), {}, 4);
}

}  // namespace
}  // namespace tessera::cuda

// Quantize on a GPU against the CPU's, bit by bit.
#include <gtest/gtest.h>

#include <cstring>

#include "core/half.h"
#include "ops/cuda/device_buffer.h"
#include "ops/float_word.h"
#include "ops/quantize/quantize_kernels.h"
#include "ops/quantize/quantize_testing.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera::cuda {
namespace {

using testing::ScaledTensor;

class QuantizeCuda : public testing::GpuTest {};

/// A result as it lies in the GPU's memory, which begins as that of `host` does.
struct DeviceResult {
  DeviceBuffer buffer;
  float* scales = nullptr;

  explicit DeviceResult(const ScaledTensor& host) : buffer(host.buffer.num_bytes()) {
    buffer.copy_from(host.buffer.data());
    const ptrdiff_t at = static_cast<std::byte*>(scales_of(host.tensor).data) - host.buffer.data();
    scales = reinterpret_cast<float*>(buffer.as<std::byte>() + at);
  }
};

/// `extent`: rows in use; those behind keep what they had.
void check_case(const Tensor& x, const QuantizeSpec& spec, int64_t extent) {
  const Quantize op(spec);
  const ScaledTensor expected = testing::quantize(x, spec);
  const std::vector<ValueType> inputs = {testing::type_of(x)};
  const ScaledTensor found(op.infer(inputs)[Quantize::kY]);
  DeviceBuffer from(x.num_bytes());
  from.copy_from(x.data);
  const DeviceResult to(found);
  DeviceBuffer rows_in_use(sizeof(int64_t));
  rows_in_use.copy_from(&extent);
  launch_quantize({.dtype = x.dtype,
                   .element = spec.element,
                   .x = from.as<void>(),
                   .y = to.buffer.as<void>(),
                   .scales = to.scales,
                   .num_rows = x.shape[0],
                   .num_columns = x.shape[1],
                   .block_rows = op.block_rows(),
                   .block_columns = op.block_columns(x.shape[1]),
                   .extent = extent < x.shape[0] ? rows_in_use.as<int64_t>() : nullptr},
                  nullptr);
  check(cudaDeviceSynchronize());
  to.buffer.copy_to(found.buffer.data());
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
    ASSERT_EQ(word_of_float(scales[i]), word_of_float(expected.scales()[i]))
        << what << " scale " << i;
}

void check_turned(const Tensor& x, const QuantizeSpec& spec) {
  const ScaledTensor expected = testing::quantize(x, spec);
  const ScaledTensor found(testing::type_of(expected.tensor));
  DeviceBuffer from(x.num_bytes());
  from.copy_from(x.data);
  const DeviceResult to(found);
  launch_quantize_turned({.dtype = x.dtype,
                          .element = spec.element,
                          .x = from.as<void>(),
                          .y = to.buffer.as<void>(),
                          .scales = to.scales,
                          .num_matrices = x.shape[0] / spec.turned_rows,
                          .num_rows = spec.turned_rows,
                          .num_columns = x.shape[1],
                          .by_block = spec.scale.kind == ScaleLayout::Kind::kBlock},
                         nullptr);
  check(cudaDeviceSynchronize());
  to.buffer.copy_to(found.buffer.data());
  const std::string what = fmt::format("{} {} {}", dtype_name(x.dtype), x.shape.to_string(),
                                       Quantize(spec).attributes());
  ASSERT_EQ(found.elements(), expected.elements()) << what;
  for (size_t i = 0; i < found.scales().size(); ++i)
    ASSERT_EQ(word_of_float(found.scales()[i]), word_of_float(expected.scales()[i]))
        << what << " scale " << i;
}

/// `extent`: rows in use; those behind keep what they had.
void check_halves(const Tensor& x, int64_t extent) {
  const ScaledTensor expected = testing::quantize(x, half_spec());
  const ScaledTensor found(testing::type_of(expected.tensor));
  DeviceBuffer from(x.num_bytes());
  from.copy_from(x.data);
  DeviceBuffer to(found.buffer.num_bytes());
  to.copy_from(found.buffer.data());
  DeviceBuffer rows_in_use(sizeof(int64_t));
  rows_in_use.copy_from(&extent);
  launch_round_to_half(
      {.dtype = x.dtype,
       .x = from.as<void>(),
       .y = to.as<void>(),
       .rows = {x.shape[0], extent < x.shape[0] ? rows_in_use.as<int64_t>() : nullptr},
       .num_columns = x.shape[1]},
      nullptr);
  check(cudaDeviceSynchronize());
  to.copy_to(found.buffer.data());
  const auto halves = found.tensor.span<Half>();
  const auto truth = expected.tensor.span<Half>();
  for (int64_t i = 0; i < std::ssize(halves); ++i)
    ASSERT_EQ(halves[i].bits, i / x.shape[1] < extent ? truth[i].bits : 0xffff)
        << dtype_name(x.dtype) << " " << x.shape.to_string() << " extent " << extent << " at " << i;
}

/// Of values of which some are beyond the largest half, and some below the smallest.
TEST_F(QuantizeCuda, HalvesAreTheHostsBits) {
  Random random(8, 1);
  for (const double deviation : {30000.0, 1.0, 1e-7}) {
    for (const Shape& shape : {Shape{1, 1}, {5, 300}, {131, 2048}, {77, 1003}}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const OwnedTensor x = testing::random_tensor(dtype, shape, random, deviation);
        for (const int64_t extent : {shape[0], shape[0] / 2}) check_halves(x.get(), extent);
      }
    }
  }
}

TEST_F(QuantizeCuda, TinyHalves) {
  Random random(9, 1);
  check_halves(testing::random_tensor(DType::kF32, {3, 40}, random, 30000).get(), 2);
  check_halves(testing::random_tensor(DType::kBF16, {3, 5}, random).get(), 3);
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
    for (const Shape& shape : {Shape{1, 1},
                               {1, 128},
                               {5, 300},
                               {131, 2048},
                               {7, 4096},
                               {40, 7168},
                               {256, 384},
                               {35, 768},
                               {9, 1000}}) {
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

TEST_F(QuantizeCuda, TurnsMatricesToTheHostsBits) {
  Random random(7, 1);
  struct Case {
    int64_t matrices, rows, columns;
  };
  for (const Case& c :
       {Case{1, 16, 16}, {3, 48, 144}, {1, 768, 2048}, {2, 1040, 256}, {5, 128, 128}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const OwnedTensor x =
          testing::random_tensor(dtype, {c.matrices * c.rows, c.columns}, random, 10.0);
      for (const DType element : {DType::kE4M3, DType::kE5M2}) {
        check_turned(x.get(), {.element = element, .turned_rows = c.rows});
        if (c.columns % 128 != 0) continue;
        check_turned(
            x.get(),
            {.element = element, .scale = ScaleLayout::block(128, 128), .turned_rows = c.rows});
      }
    }
  }
}

TEST_F(QuantizeCuda, TurnsNonFiniteNumbers) {
  Random random(8, 1);
  const OwnedTensor x = testing::random_tensor(DType::kF32, {16, 128}, random);
  x.get().as<float>()[5] = std::numeric_limits<float>::infinity();
  x.get().as<float>()[6] = std::nanf("");
  check_turned(x.get(), {.turned_rows = 16});
  check_turned(x.get(), {.scale = ScaleLayout::block(128, 128), .turned_rows = 16});
}

TEST_F(QuantizeCuda, NonFiniteAndTinyNumbers) {
  const OwnedTensor x = testing::tensor_of(
      {4, 2}, {0, -0.0F, 1e-42F, 0, std::numeric_limits<float>::infinity(), 2, std::nanf(""), 2});
  check_case(x.get(), {}, 4);
}

/// Elements and scales apart.
TEST_F(QuantizeCuda, TinyBlocksOfMasters) {
  Random random(12, 1);
  for (const Shape& shape : {Shape{1, 1}, {128, 256}, {300, 130}, {384, 1024}}) {
    const OwnedTensor x = testing::random_tensor(DType::kF32, shape, random, 3.0);
    const testing::QuantizedBlocks expected = testing::quantize_blocks(x.get());
    const Tensor elements = expected.elements;
    const Tensor scales = expected.scales;
    DeviceBuffer from(x.get().num_bytes()), to(elements.num_bytes()), to_scales(scales.num_bytes());
    from.copy_from(x.get().data);
    launch_quantize({.dtype = DType::kF32,
                     .element = DType::kE4M3,
                     .x = from.as<void>(),
                     .y = to.as<void>(),
                     .scales = to_scales.as<float>(),
                     .num_rows = shape[0],
                     .num_columns = shape[1],
                     .block_rows = QuantizeBlocks::kBlock,
                     .block_columns = QuantizeBlocks::kBlock,
                     .extent = nullptr},
                    nullptr);
    check(cudaDeviceSynchronize());
    std::vector<uint8_t> found(elements.num_bytes()), found_scales(scales.num_bytes());
    to.copy_to(found.data());
    to_scales.copy_to(found_scales.data());
    EXPECT_EQ(std::memcmp(found.data(), elements.data, found.size()), 0) << shape.to_string();
    EXPECT_EQ(std::memcmp(found_scales.data(), scales.data, found_scales.size()), 0);
  }
}

TEST_F(QuantizeCuda, TinyTurnedBlocks) {
  Random random(14, 1);
  for (const auto& [shape, rows] :
       {std::pair(Shape{128, 128}, 128), std::pair(Shape{768, 384}, 256),
        std::pair(Shape{1024, 1536}, 1024)}) {
    const OwnedTensor x = testing::random_tensor(DType::kBF16, shape, random, 3.0);
    const ScaledTensor plain = testing::quantize(x.get(), {.scale = ScaleLayout::block(128, 128)});
    const ScaledTensor expected = testing::turn_blocks(plain.tensor, rows);
    const ScaledTensor found(testing::type_of(expected.tensor));
    const DeviceResult from(plain);
    const DeviceResult to(found);
    launch_turn_blocks({.x = from.buffer.as<uint8_t>(),
                        .scales = from.scales,
                        .y = to.buffer.as<uint8_t>(),
                        .turned_scales = to.scales,
                        .num_matrices = shape[0] / rows,
                        .num_rows = rows,
                        .num_columns = shape[1]},
                       nullptr);
    check(cudaDeviceSynchronize());
    to.buffer.copy_to(found.buffer.data());
    EXPECT_EQ(found.elements(), expected.elements()) << shape.to_string();
    EXPECT_EQ(found.scales(), expected.scales()) << shape.to_string();
  }
}

}  // namespace
}  // namespace tessera::cuda

#include "ops/cuda/matrix_product.h"

#include <array>

#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera::cuda {
namespace {

using testing::random_tensor;

/// A matrix within wider memory that begins `offset` values late.
struct Operand {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
  int64_t offset = 0;

  int64_t num_values() const { return offset + rows * stride; }
};

class MatrixProductCuda : public testing::GpuTest {
 protected:
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(random_.next_below(static_cast<uint64_t>(bound)));
  }
  Operand operand(int64_t rows, int64_t columns) {
    const bool packed = below(2) == 0;
    return {rows, columns, columns + (packed ? 0 : below(9)), packed ? 0 : below(5)};
  }
  OwnedTensor values(DType dtype, const Operand& operand) {
    return random_tensor(dtype, {operand.num_values()}, random_);
  }
  static OwnedTensor on_gpu(const OwnedTensor& host) {
    OwnedTensor copy(host.get().dtype, host.get().shape, "a matrix", gpu().device());
    gpu().device().copy(copy.get().data, host.get().data, host.get().num_bytes());
    return copy;
  }
  static std::byte* at(const OwnedTensor& tensor, const Operand& operand) {
    return static_cast<std::byte*>(tensor.get().data) +
           operand.offset * dtype_size(tensor.get().dtype);
  }
  static MatrixProducts& products() {
    return static_cast<CudaContext&>(*gpu().context()).get<MatrixProducts>();
  }

  void check(Gemm product) {
    const Operand a =
        product.transpose_a ? operand(product.k, product.m) : operand(product.m, product.k);
    const Operand b =
        product.transpose_b ? operand(product.n, product.k) : operand(product.k, product.n);
    const Operand c = operand(product.m, product.n);
    product.lda = std::max<int64_t>(a.stride, 1);
    product.ldb = std::max<int64_t>(b.stride, 1);
    product.ldc = std::max<int64_t>(c.stride, 1);
    const OwnedTensor a_host = values(product.input_type, a);
    const OwnedTensor b_host = values(product.input_type, b);
    const OwnedTensor c_host = values(product.output_type, c);
    const OwnedTensor a_gpu = on_gpu(a_host);
    const OwnedTensor b_gpu = on_gpu(b_host);
    const OwnedTensor c_gpu = on_gpu(c_host);
    const auto with = [&](const OwnedTensor& a_values, const OwnedTensor& b_values,
                          const OwnedTensor& c_values) {
      Gemm whole = product;
      whole.a = at(a_values, a);
      whole.b = at(b_values, b);
      whole.c = at(c_values, c);
      return whole;
    };
    products().run(with(a_gpu, b_gpu, c_gpu));
    OwnedTensor result(c_host.get().dtype, c_host.get().shape);
    gpu().device().copy(result.get().data, c_gpu.get().data, result.get().num_bytes());
    gemm(with(a_host, b_host, c_host));
    expect_near(result, c_host, product.output_type == DType::kF32 ? 2e-5 : 8e-3);
  }

  Random& random() { return random_; }
  /// All values, those between the rows included.
  static void expect_near(const Tensor& actual, const Tensor& expected, double tolerance) {
    const std::vector<double> values = testing::to_doubles(actual);
    const std::vector<double> truths = testing::to_doubles(expected);
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_NEAR(values[i], truths[i], tolerance * (4 + std::abs(truths[i]))) << i;
  }

 private:
  Random random_{5, 1};
};

/// The first operand is one matrix for all, where its stride is 0.
TEST_F(MatrixProductCuda, Batches) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [count, m, n, k] :
         {std::array<int64_t, 4>{3, 64, 128, 64}, std::array<int64_t, 4>{7, 33, 17, 21},
          std::array<int64_t, 4>{1, 5, 6, 7}}) {
      const Gemm product = {.transpose_b = true,
                            .m = m,
                            .n = n,
                            .k = k,
                            .lda = k,
                            .ldb = k,
                            .ldc = n,
                            .input_type = dtype};
      for (const int64_t a_stride : {m * k, int64_t{0}}) {
        const ProductBatch batch = {count, a_stride, n * k, m * n};
        const OwnedTensor a = random_tensor(dtype, {count * m * k}, random());
        const OwnedTensor b = random_tensor(dtype, {count * n * k}, random());
        const OwnedTensor expected(DType::kF32, {count * m * n});
        const OwnedTensor a_gpu = on_gpu(a);
        const OwnedTensor b_gpu = on_gpu(b);
        const OwnedTensor c_gpu = on_gpu(expected);
        Gemm first = product;
        first.a = a_gpu.get().data;
        first.b = b_gpu.get().data;
        first.c = c_gpu.get().data;
        products().run(first, batch);
        for (int64_t i = 0; i < count; ++i) {
          Gemm one = product;
          one.a = static_cast<std::byte*>(a.get().data) + i * a_stride * dtype_size(dtype);
          one.b = static_cast<std::byte*>(b.get().data) + i * n * k * dtype_size(dtype);
          one.c = expected.get().as<float>() + i * m * n;
          gemm(one);
        }
        const OwnedTensor result(DType::kF32, expected.get().shape);
        gpu().device().copy(result.get().data, c_gpu.get().data, result.get().num_bytes());
        expect_near(result, expected, 2e-5);
      }
    }
  }
}

TEST_F(MatrixProductCuda, TinyProduct) {
  check({.transpose_b = true, .m = 33, .n = 17, .k = 20, .accumulate = true});
}

TEST_F(MatrixProductCuda, RandomProductsMatchTheCpu) {
  for (int i = 0; i < 120; ++i) {
    const bool whole = i % 3 == 0;
    const auto size = [&] { return whole ? 64 * below(6) : below(200); };
    Gemm product{.transpose_a = below(2) == 0,
                 .transpose_b = below(2) == 0,
                 .m = size(),
                 .n = size(),
                 .k = i % 10 == 0 ? 0 : size()};
    if (below(2) == 0) product.input_type = DType::kBF16;
    if (product.input_type == DType::kBF16 && below(2) == 0) product.output_type = DType::kBF16;
    product.accumulate = product.output_type == DType::kF32 && below(2) == 0;
    SCOPED_TRACE(fmt::format("{} x {} x {}, transposed {} {}, {} to {}, accumulate {}", product.m,
                             product.n, product.k, product.transpose_a, product.transpose_b,
                             dtype_name(product.input_type), dtype_name(product.output_type),
                             product.accumulate));
    check(product);
  }
}

}  // namespace
}  // namespace tessera::cuda

#include <cstdlib>

#include "ops/cache_append/cache_append.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::copy_to;
using testing::copy_to_host;

class CacheAppendCuda : public testing::GpuTest {
 protected:
  /// What a cache is after rows went into it from `start` on.
  OwnedTensor append(const Backend& backend, const Tensor& cache, const Tensor& rows,
                     int32_t start) const {
    const OwnedTensor own_cache = copy_to(backend, cache);
    const OwnedTensor own_rows = copy_to(backend, rows);
    const OwnedTensor own_start = copy_to(backend, testing::tensor_of_i32({1}, {start}));
    const Tensor inputs[] = {own_rows, own_start};
    const Tensor outputs[] = {own_cache};
    testing::run_kernel(*make_cache_append(cache.shape[0]), backend, inputs, outputs);
    return copy_to_host(backend, own_cache);
  }
};

TEST_F(CacheAppendCuda, WritesItsRowsAndNoOthers) {
  Random random(1, 1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t width : {1, 5, 8, 72, 1024}) {
      for (const auto& [count, start] : {std::pair{0, 0}, {0, 300}, {1, 299}, {37, 8}, {300, 0}}) {
        SCOPED_TRACE(fmt::format("{} rows of {} {} at {}", count, width, dtype_name(dtype), start));
        const OwnedTensor cache = testing::random_tensor(dtype, {300, width}, random);
        const OwnedTensor rows = testing::random_tensor(dtype, {count, width}, random);
        testing::expect_bitwise_equal(append(gpu(), cache, rows, start),
                                      append(cpu(), cache, rows, start), "the cache");
      }
    }
  }
}

TEST_F(CacheAppendCuda, TinyCache) {
  Random random(1, 3);
  const OwnedTensor cache = testing::random_tensor(DType::kBF16, {30, 72}, random);
  const OwnedTensor rows = testing::random_tensor(DType::kBF16, {7, 72}, random);
  testing::expect_bitwise_equal(append(gpu(), cache, rows, 9), append(cpu(), cache, rows, 9),
                                "the cache");
}

using CacheAppendCudaDeathTest = CacheAppendCuda;

TEST_F(CacheAppendCudaDeathTest, SaysThatRowsDoNotFit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [this](int32_t start) {
    Random random(1, 2);
    const OwnedTensor cache = testing::random_tensor(DType::kF32, {9, 8}, random);
    const OwnedTensor rows = testing::random_tensor(DType::kF32, {4, 8}, random);
    try {
      append(gpu(), cache, rows, start);
    } catch (const InternalError& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::_Exit(3);
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(run(6), ::testing::ExitedWithCode(3),
              "cache_append: the rows do not fit.*device-side");
  EXPECT_EXIT(run(-1), ::testing::ExitedWithCode(3), "cache_append: the rows do not fit");
}

}  // namespace
}  // namespace tessera

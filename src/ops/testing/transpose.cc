#include "ops/testing/transpose.h"

#include <gtest/gtest.h>

#include <mutex>

#include "comm/thread/thread_world.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

double inner_product(const Tensor& a, const Tensor& b) {
  const std::vector<double> left = to_doubles(a);
  const std::vector<double> right = to_doubles(b);
  double sum = 0;
  for (size_t i = 0; i < left.size(); ++i) sum += left[i] * right[i];
  return sum;
}

template <typename T>
void fill_elements(const Tensor& tensor, Random& random) {
  for (T& element : tensor.span<T>()) element = T(static_cast<float>(random.next_below(9)) - 4.0F);
}

}  // namespace

void fill_small_integers(const Tensor& tensor, Random& random) {
  if (tensor.dtype == DType::kF32) return fill_elements<float>(tensor, random);
  ensure(tensor.dtype == DType::kBF16, "small integers of type {}", dtype_name(tensor.dtype));
  fill_elements<Bf16>(tensor, random);
}

void check_transpose(int64_t num_ranks, const BuildLinearMap& build, const KernelTable& kernels,
                     uint64_t seed) {
  std::mutex mutex;
  double over_y = 0;
  double over_x = 0;
  run_thread_world(num_ranks, [&](World& world) {
    Random random(seed, static_cast<uint64_t>(world.rank()));
    LinearMap map = build(world);
    const ProgramRun run(std::move(map.program), {{map.y}, {map.x}}, kernels);
    map.fill(run);
    fill_small_integers(run.value(map.x), random);
    fill_small_integers(run.grad(map.y), random);
    run.run_forward();
    run.run_backward();
    const std::scoped_lock lock(mutex);
    over_y += inner_product(run.value(map.y), run.grad(map.y));
    over_x += inner_product(run.value(map.x), run.grad(map.x));
  });
  EXPECT_EQ(over_y, over_x) << num_ranks << " ranks, seed " << seed;
}

}  // namespace tessera::testing

#include "ops/latent_heads/latent_heads.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class LatentHeadsCuda : public testing::GpuTest {
 protected:
  void check(const LatentHeadsSpec& spec, int64_t rows, int64_t extent,
             const testing::GpuCheck& how = {}) const {
    SCOPED_TRACE(fmt::format("{} of {} rows, {} heads {} + {}, {}", extent, rows, spec.num_heads,
                             spec.nope_size, spec.rope_size, spec.value_size));
    testing::check_ragged_operator_on_gpu(
        make_latent_heads(spec),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x_kv", "x_shared"},
                  {testing::ragged_rows(
                       dtype, {rows, spec.num_heads * (spec.nope_size + spec.value_size)}),
                   testing::ragged_rows(dtype, {rows, spec.rope_size})}};
        },
        {0, 1}, extent, cpu(), gpu(), how);
  }
};

TEST_F(LatentHeadsCuda, Sizes) {
  for (const int64_t extent : {0, 1, 21, 30}) {
    check({.num_heads = 16, .nope_size = 128, .rope_size = 64, .value_size = 128}, 30, extent);
    check({.num_heads = 3, .nope_size = 24, .rope_size = 8, .value_size = 40}, 30, extent);
    check({.num_heads = 2, .nope_size = 5, .rope_size = 2, .value_size = 3}, 30, extent);
  }
}

TEST_F(LatentHeadsCuda, TinyHeads) {
  check({.num_heads = 3, .nope_size = 24, .rope_size = 8, .value_size = 40}, 13, 9, {.once = true});
}

}  // namespace
}  // namespace tessera

#include "ops/latent_cache/latent_cache.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class LatentCacheCuda : public testing::GpuTest {
 protected:
  void check(const LatentCacheSpec& s, int64_t tokens, const testing::GpuCheck& how = {}) const {
    SCOPED_TRACE(fmt::format("{} tokens, {} heads {} + {}, {}, latents of {}", tokens, s.num_heads,
                             s.nope_size, s.rope_size, s.value_size, s.rank));
    const auto with_weight = [&](int64_t width) {
      return [&s, tokens, width](DType dtype) -> testing::OperatorInputs {
        return {{"rows", "up"}, {{dtype, {tokens, width}}, {dtype, {s.up_rows(), s.rank}}}};
      };
    };
    check_operator_on_gpu(make_latent_queries(s),
                          with_weight(s.num_heads * (s.nope_size + s.rope_size)), {}, cpu(), gpu(),
                          how);
    check_operator_on_gpu(make_latent_outputs(s), with_weight(s.num_heads * s.rank), {}, cpu(),
                          gpu(), how);
    check_operator_on_gpu(
        make_latent_keys(),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"latent", "shared"},
                  {{dtype, {tokens, s.rank}}, {dtype, {tokens, s.rope_size}}}};
        },
        {}, cpu(), gpu(), how);
  }
};

TEST_F(LatentCacheCuda, Sizes) {
  for (const int64_t tokens : {0, 1, 5, 70}) {
    check({.num_heads = 16, .nope_size = 128, .rope_size = 64, .value_size = 128, .rank = 512},
          tokens);
    check({.num_heads = 3, .nope_size = 24, .rope_size = 8, .value_size = 40, .rank = 48}, tokens);
    check({.num_heads = 2, .nope_size = 5, .rope_size = 2, .value_size = 3, .rank = 7}, tokens);
  }
}

TEST_F(LatentCacheCuda, TinyHeads) {
  check({.num_heads = 3, .nope_size = 24, .rope_size = 8, .value_size = 40, .rank = 48}, 3,
        {.once = true});
}

}  // namespace
}  // namespace tessera

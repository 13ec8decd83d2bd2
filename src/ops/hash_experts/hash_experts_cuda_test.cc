#include "ops/hash_experts/hash_experts.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/testing/owning_check.h"

namespace tessera {
namespace {

class HashExpertsCuda : public testing::GpuTest {
 protected:
  void check(int64_t num_tokens, int64_t top_k, int64_t num_experts, bool once = false) const {
    constexpr int64_t kVocabulary = 37;
    std::vector<int32_t> tokens;
    for (int64_t t = 0; t < num_tokens; ++t)
      tokens.push_back(static_cast<int32_t>(t * 5 % kVocabulary));
    std::vector<float> table;
    for (int64_t i = 0; i < kVocabulary * top_k; ++i)
      table.push_back(static_cast<float>(i % num_experts));
    testing::OwningCheck check;
    check.dtypes = {DType::kF32};
    check.once = once;
    check.give("tokens", testing::tensor_of_i32({num_tokens}, tokens));
    check.give("table", testing::tensor_of({kVocabulary, top_k}, table));
    SCOPED_TRACE(fmt::format("{} tokens, {} of {}", num_tokens, top_k, num_experts));
    testing::check_operator_on_gpu(
        make_hash_experts(num_experts),
        [&](DType /*dtype*/) {
          return testing::OperatorInputs{
              .names = {"tokens", "table"},
              .types = {{DType::kI32, {num_tokens}}, {DType::kF32, {kVocabulary, top_k}}}};
        },
        {}, cpu(), gpu(), check);
  }
};

TEST_F(HashExpertsCuda, TinyLookup) {
  check(50, 3, 7, true);
}

TEST_F(HashExpertsCuda, Sizes) {
  for (const int64_t num_tokens : {0, 1, 300}) {
    for (const int64_t top_k : {1, 6}) check(num_tokens, top_k, 64);
  }
}

}  // namespace
}  // namespace tessera

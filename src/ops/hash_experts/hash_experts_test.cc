#include "ops/hash_experts/hash_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<int32_t> run(const std::vector<int32_t>& tokens, const std::vector<float>& table) {
  KernelTable kernels;
  add_hash_experts_cpu(kernels);
  const auto outputs = testing::run_operator(
      *make_hash_experts(4), kernels,
      testing::list_inputs(testing::TestInput{testing::tensor_of_i32({std::ssize(tokens)}, tokens),
                                              testing::Role::kConstant, "tokens"},
                           testing::TestInput{testing::tensor_of({std::ssize(table) / 2, 2}, table),
                                              testing::Role::kConstant, "table"}));
  const auto experts = outputs[0].get().span<int32_t>();
  return {experts.begin(), experts.end()};
}

TEST(HashExperts, LooksTokensUp) {
  EXPECT_THAT(run({2, 0, 2, 1}, {0, 1, 2, 3, 3, 0}), ElementsAre(3, 0, 0, 1, 3, 0, 2, 3));
  EXPECT_THAT(run({}, {0, 1}), ElementsAre());
}

TEST(HashExperts, RefusesWhatCannotBe) {
  EXPECT_THAT(
      [] {
        run({3}, {0, 1, 2, 3, 3, 0});
      },
      ThrowsMessage<UserError>(HasSubstr("token id 3 is outside the table's vocabulary")));
  for (const float wrong : {4.0F, -1.0F, 1.5F}) {
    EXPECT_THAT(
        [&] {
          run({0}, {0, wrong});
        },
        ThrowsMessage<UserError>(HasSubstr("token id 0 to expert")));
  }
  const HashExperts op(4);
  EXPECT_THROW(op.infer(std::vector<ValueType>{{DType::kI32, {3}}, {DType::kF32, {9, 5}}}),
               UserError)
      << "more choices than experts";
}

}  // namespace
}  // namespace tessera

#include "ops/choose_token/choose_token_testing.h"

namespace tessera {
namespace {

Backend cpu() {
  KernelTable table;
  add_choose_token_cpu(table);
  return table;
}

TEST(ChooseToken, DrawsEachTokenAsOftenAsItsProbabilitySays) {
  testing::check_all_draws(cpu());
}

TEST(ChooseToken, OfEqualTokensTheLowerIdComesFirst) {
  testing::check_ties(cpu());
}

TEST(ChooseToken, GivesProbabilitiesOfGivenTokensAndRefusesNan) {
  testing::check_given(cpu());
}

TEST(ChooseToken, NoRows) {
  EXPECT_TRUE(
      testing::run_choose_token(cpu(), OwnedTensor(DType::kF32, {0, 5}), {}).tokens.empty());
}

TEST(ChooseToken, RefusesShapesThatDoNotFit) {
  const OperatorPtr op = make_choose_token();
  const auto refused = [&](const std::vector<ValueType>& types) {
    EXPECT_THROW(op->infer(types), UserError);
  };
  const int64_t bytes = sizeof(TokenRule);
  refused({{DType::kF32, {2, 3}}});
  refused({{DType::kI32, {2, 3}}, {DType::kU8, {2, bytes}}});
  refused({{DType::kF32, {2, 3}}, {DType::kU8, {3, bytes}}});
  refused({{DType::kF32, {2, 3}}, {DType::kU8, {2, 8}}});
  refused({{DType::kF32, {2, 0}}, {DType::kU8, {2, bytes}}});
}

}  // namespace
}  // namespace tessera

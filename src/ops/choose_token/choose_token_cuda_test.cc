#include "ops/choose_token/choose_token_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class ChooseTokenCuda : public testing::GpuTest {};

TEST_F(ChooseTokenCuda, DrawsEachTokenAsOftenAsItsProbabilitySays) {
  testing::check_all_draws(gpu());
}

TEST_F(ChooseTokenCuda, DrawsFromALargeVocabulary) {
  Random random(9, 1);
  for (const int64_t size : {50257, 151936}) {
    const OwnedTensor logits = testing::random_tensor(DType::kBF16, {1, size}, random, 4.0);
    for (const TokenRule& rule :
         std::initializer_list<TokenRule>{{}, {.top_k = 1000}, {.top_p = 0.7}})
      testing::check_draws(gpu(), logits, rule);
  }
}

TEST_F(ChooseTokenCuda, OfEqualTokensTheLowerIdComesFirst) {
  testing::check_ties(gpu());
}

TEST_F(ChooseTokenCuda, GivesProbabilitiesOfGivenTokensAndRefusesNan) {
  testing::check_given(gpu());
}

TEST_F(ChooseTokenCuda, TinyDraws) {
  Random random(9, 2);
  const OwnedTensor logits = testing::random_tensor(DType::kF32, {1, 100}, random);
  testing::check_draws(gpu(), logits, {.top_p = 0.7, .top_k = 50});
}

}  // namespace
}  // namespace tessera

#include "ops/router/router.h"

#include <cmath>

#include "ops/testing/addend_gpu_check.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/testing/owning_check.h"

namespace tessera {
namespace {

using testing::GpuTest;
using testing::OperatorInputs;
using testing::OwningCheck;

struct Case {
  RouterSpec spec;
  int64_t num_tokens = 0;
  int64_t hidden_size = 24;
};

OperatorInputs inputs_of(const Case& c, DType dtype) {
  OperatorInputs inputs{.names = {"x", "w"},
                        .types = {{dtype, {c.num_tokens, c.hidden_size}},
                                  {DType::kF32, {c.spec.num_experts, c.hidden_size}}}};
  const auto add = [&](const char* name, const ValueType& type) {
    inputs.names.push_back(name);
    inputs.types.push_back(type);
  };
  if (c.spec.logit_bias) add("w_bias", {DType::kF32, {c.spec.num_experts}});
  if (c.spec.expert_bias) add("bias", {DType::kF32, {c.spec.num_experts}});
  if (c.spec.balance_scope == BalanceScope::kSequence) add("cu_seqlens", {DType::kI32, {5}});
  if (c.spec.replay) add("replayed", {DType::kI32, {c.num_tokens, c.spec.top_k}});
  return inputs;
}

OwningCheck check_of(const Case& c, uint64_t seed) {
  OwningCheck check;
  check.seed = seed;
  check.tolerance_f32 = 5e-5;
  Random random(seed, 1);
  // Logits of about 1: where a softmax is all but certain, its gradient is a difference of equals.
  const double deviation = 1 / std::sqrt(static_cast<double>(c.hidden_size));
  check.give("w", testing::random_tensor(DType::kBF16, {c.spec.num_experts, c.hidden_size}, random,
                                         deviation));
  check.give("bias", testing::random_tensor(DType::kF32, {c.spec.num_experts}, random, 0.2));
  const auto t = static_cast<int32_t>(c.num_tokens);
  check.give("cu_seqlens", testing::tensor_of_i32({5}, {0, t / 5, t / 5, t - t / 3, t}));
  std::vector<int32_t> replayed;
  for (int64_t i = 0; i < c.num_tokens * c.spec.top_k; ++i) {
    const bool is_given = i / c.spec.top_k % 3 != 0;
    replayed.push_back(is_given ? static_cast<int32_t>(i % c.spec.num_experts) : -1);
  }
  check.give("replayed", testing::tensor_of_i32({c.num_tokens, c.spec.top_k}, replayed));
  return check;
}

RouterSpec of_size(RouterSpec spec, int64_t num_experts, int64_t top_k) {
  spec.num_experts = num_experts;
  spec.top_k = top_k;
  return spec;
}

/// Every way to score and choose that the published models use.
std::vector<RouterSpec> published_specs() {
  const RouterSpec mixtral{.num_experts = 8, .top_k = 2, .order = ScoreOrder::kAfterTopK};
  const RouterSpec qwen{.num_experts = 128, .top_k = 8, .normalize_top_k = true};
  const RouterSpec deepseek_v2{
      .num_experts = 160, .top_k = 6, .scaling_factor = 16, .num_groups = 8, .top_groups = 3};
  RouterSpec deepseek_v3{.num_experts = 256,
                         .top_k = 8,
                         .score = ScoreFunction::kSigmoid,
                         .normalize_top_k = true,
                         .scaling_factor = 2.5,
                         .expert_bias = true,
                         .num_groups = 8,
                         .top_groups = 4,
                         .group_score = GroupScore::kTopTwoSum,
                         .balance_group_size = 32};
  const RouterSpec plain_sigmoid{.num_experts = 33, .top_k = 2, .score = ScoreFunction::kSigmoid};
  const RouterSpec deepseek_v4{.num_experts = 256,
                               .top_k = 6,
                               .score = ScoreFunction::kSqrtSoftplus,
                               .normalize_top_k = true,
                               .scaling_factor = 1.5,
                               .expert_bias = true};
  const RouterSpec gpt_oss{
      .num_experts = 32, .top_k = 4, .order = ScoreOrder::kAfterTopK, .logit_bias = true};
  const RouterSpec ernie{
      .num_experts = 64, .top_k = 6, .normalize_top_k = true, .expert_bias = true};
  const RouterSpec many_groups{.num_experts = 96, .top_k = 5, .num_groups = 48, .top_groups = 33};
  return {of_size({}, 16, 1),
          mixtral,
          qwen,
          deepseek_v2,
          deepseek_v3,
          plain_sigmoid,
          many_groups,
          of_size({}, 1, 1),
          of_size({}, 1024, 40),
          of_size(qwen, 40, 40),
          gpt_oss,
          of_size(gpt_oss, 128, 4),
          ernie,
          deepseek_v4};
}

class RouterCuda : public GpuTest {
 protected:
  void check(const Case& c, uint64_t seed) { check(c, check_of(c, seed)); }
  void check(const Case& c, const OwningCheck& how) {
    const OperatorPtr op = make_router(c.spec);
    SCOPED_TRACE(fmt::format("T={} H={} {}", c.num_tokens, c.hidden_size, op->attributes()));
    testing::check_operator_on_gpu(
        op, [&](DType dtype) { return inputs_of(c, dtype); },
        {RouterOutput::kProbs, RouterOutput::kLogits, RouterOutput::kBalanceLoss,
         RouterOutput::kZLoss, RouterOutput::kScoreMeans},
        cpu(), gpu(), how);
  }
  void check_tiny(RouterSpec spec, BalanceScope scope, DType dtype) {
    spec.balance_scope = scope;
    const Case c{spec, 37};
    OwningCheck how = check_of(c, 300);
    how.dtypes = {dtype};
    how.once = true;
    check(c, how);
  }
};

/// Groups of experts and a bias, without and with the tensor cores' products.
TEST_F(RouterCuda, TinyPlain) {
  check_tiny({.num_experts = 12,
              .top_k = 3,
              .score = ScoreFunction::kSigmoid,
              .normalize_top_k = true,
              .expert_bias = true,
              .num_groups = 4,
              .top_groups = 2,
              .group_score = GroupScore::kTopTwoSum},
             BalanceScope::kMicroBatch, DType::kF32);
}

TEST_F(RouterCuda, TinySqrtSoftplus) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    check_tiny({.num_experts = 12,
                .top_k = 3,
                .score = ScoreFunction::kSqrtSoftplus,
                .normalize_top_k = true,
                .expert_bias = true},
               BalanceScope::kSequence, dtype);
}

TEST_F(RouterCuda, ReplaysAChoice) {
  uint64_t seed = 700;
  for (RouterSpec spec : published_specs()) {
    spec.replay = true;
    for (const int64_t num_tokens : {0, 1, 37, 700}) check({spec, num_tokens}, ++seed);
  }
}

TEST_F(RouterCuda, TinyLogitBias) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    check_tiny(of_size({.order = ScoreOrder::kAfterTopK, .logit_bias = true}, 16, 4),
               BalanceScope::kMicroBatch, dtype);
}

TEST_F(RouterCuda, TinySequences) {
  check_tiny(of_size({.normalize_top_k = true}, 40, 3), BalanceScope::kSequence, DType::kBF16);
}

TEST_F(RouterCuda, TinyFew) {
  check_tiny(of_size({.normalize_top_k = true, .balance_group_size = 4}, 16, 3),
             BalanceScope::kMicroBatch, DType::kBF16);
}

TEST_F(RouterCuda, TinyManyExperts) {
  check_tiny(of_size({.normalize_top_k = true}, 72, 3), BalanceScope::kMicroBatch, DType::kBF16);
}

TEST_F(RouterCuda, PublishedRulesInEveryScope) {
  uint64_t seed = 1;
  for (const RouterSpec& spec : published_specs()) {
    for (const BalanceScope scope : {BalanceScope::kMicroBatch, BalanceScope::kSequence}) {
      RouterSpec scoped = spec;
      scoped.balance_scope = scope;
      check({scoped, 70}, ++seed);
    }
  }
}

/// One kernel from logits to totals, and one token too many, or an expert, for that.
TEST_F(RouterCuda, OneBlockOfTokens) {
  uint64_t seed = 800;
  for (const RouterSpec& spec : published_specs()) {
    if (spec.num_experts > 256) continue;
    for (const int64_t num_tokens : {1, 2, 9, 32, 33}) check({spec, num_tokens, 2056}, ++seed);
  }
  for (const int64_t num_experts : {1, 5, 31, 32, 33, 100, 250, 256, 257})
    check({of_size({.normalize_top_k = true}, num_experts, 1), 12, 72}, ++seed);
}

TEST_F(RouterCuda, AnyNumberOfTokensAndAnyWidth) {
  uint64_t seed = 100;
  for (const int64_t num_tokens : {0, 1, 31, 33, 1500}) {
    for (const int64_t hidden_size : {5, 8, 130, 256}) {
      for (const int which : {1, 4}) {
        check({published_specs()[which], num_tokens, hidden_size}, ++seed);
      }
    }
  }
}

/// Weights with all bits of F32, of which two BF16 terms would keep too few, and reductions so long
/// that the tensor cores alone would not add up exactly enough.
TEST_F(RouterCuda, LogitsOfBf16KeepThePrecisionOfF32) {
  uint64_t seed = 400;
  const auto check_precision = [&](int64_t num_experts, int64_t num_tokens, int64_t hidden_size,
                                   double tolerance) {
    SCOPED_TRACE(fmt::format("T={} H={} E={}", num_tokens, hidden_size, num_experts));
    const Case c{of_size({.order = ScoreOrder::kAfterTopK}, num_experts, 1), num_tokens,
                 hidden_size};
    OwningCheck how;
    how.seed = ++seed;
    how.dtypes = {DType::kBF16};
    how.tolerance_bf16 = tolerance;
    Random random(seed, 1);
    how.give("w", testing::random_tensor(DType::kF32, {num_experts, hidden_size}, random,
                                         1 / std::sqrt(static_cast<double>(hidden_size))));
    testing::check_operator_on_gpu(
        make_router(c.spec), [&](DType dtype) { return inputs_of(c, dtype); }, {}, cpu(), gpu(),
        how);
  };
  for (const int64_t num_experts : {8, 33, 60, 96, 128, 160, 256, 1000}) {
    for (const int64_t num_tokens : {1, 127, 300}) {
      for (const int64_t hidden_size : {8, 72, 128}) {
        check_precision(num_experts, num_tokens, hidden_size, 1e-6);
      }
    }
  }
  for (const int64_t hidden_size : {1544, 2048, 7168}) check_precision(128, 300, hidden_size, 2e-6);
  // Around the largest weight whose terms the product's own blocks make. An error is relative to
  // its row, and rows of few experts vary more.
  for (const int64_t hidden_size : {1544, 2048, 2056}) check_precision(8, 300, hidden_size, 4e-6);
}

/// Whole numbers times `step`, at most `most` of them either way.
OwnedTensor steps(const Shape& shape, uint64_t most, float step, Random& random) {
  OwnedTensor result(DType::kF32, shape);
  for (float& value : result.get().span<float>())
    value = step * (static_cast<float>(random.next_below(2 * most + 1)) - static_cast<float>(most));
  return result;
}

/// Tiles of every size, more than a GPU has clusters, and a reduction of several rounds of stages.
/// The logits are exact, so that of many tokens all are routed alike.
TEST_F(RouterCuda, ManyTokens) {
  for (const auto& [num_tokens, num_experts] : std::vector<std::pair<int64_t, int64_t>>{
           {9001, 24}, {9001, 60}, {20001, 128}, {9001, 160}}) {
    const Case c{of_size({.normalize_top_k = true}, num_experts, 8), num_tokens, 456};
    SCOPED_TRACE(fmt::format("T={} E={}", num_tokens, num_experts));
    Random random(7, 1);
    OwningCheck check;
    check.dtypes = {DType::kBF16};
    check.give("x", steps({num_tokens, c.hidden_size}, 3, 1.0F, random));
    check.give("w", steps({num_experts, c.hidden_size}, 7, 1.0F / 64, random));
    testing::check_operator_on_gpu(
        make_router(c.spec), [&](DType dtype) { return inputs_of(c, dtype); }, {}, cpu(), gpu(),
        check);
  }
}

/// The most tokens and experts for which the gradient of the logits takes what is otherwise
/// launched beside it, and one more of each.
TEST_F(RouterCuda, FewAndMoreThanFew) {
  uint64_t seed = 500;
  for (const auto& [num_tokens, num_experts] :
       std::vector<std::pair<int64_t, int64_t>>{{8192, 8}, {8193, 8}, {2048, 32}, {2048, 40}}) {
    for (const int64_t group_size : {1, 2}) {
      for (const int output : {RouterOutput::kProbs, RouterOutput::kBalanceLoss}) {
        SCOPED_TRACE(
            fmt::format("T={} E={} by {} output {}", num_tokens, num_experts, group_size, output));
        const Case c{
            of_size({.normalize_top_k = true, .balance_group_size = group_size}, num_experts, 2),
            num_tokens};
        Random random(++seed, 1);
        OwningCheck check;
        // The worst of thousands of rows, whose gradients are differences of like terms.
        check.tolerance_f32 = 2e-4;
        check.give("x", steps({num_tokens, c.hidden_size}, 3, 1.0F, random));
        check.give("w", steps({num_experts, c.hidden_size}, 7, 1.0F / 64, random));
        testing::check_operator_on_gpu(
            make_router(c.spec), [&](DType dtype) { return inputs_of(c, dtype); }, {output}, cpu(),
            gpu(), check);
      }
    }
  }
}

TEST_F(RouterCuda, BackwardAddsAnAddend) {
  for (const int64_t num_tokens : {0, 1, 33, 1500}) {
    for (const int64_t hidden_size : {5, 8, 256}) {
      for (const int64_t num_experts : {6, 40, 128}) {
        SCOPED_TRACE(fmt::format("T={} H={} E={}", num_tokens, hidden_size, num_experts));
        const RouterSpec spec = of_size({}, num_experts, 2);
        OwningCheck check;
        check.tolerance_f32 = 5e-5;
        std::vector<int32_t> chosen;
        for (int32_t t = 0; t < num_tokens; ++t) chosen.insert(chosen.end(), {t % 3, 3 + t % 3});
        check.give("expert_idx", testing::tensor_of_i32({num_tokens, 2}, chosen));
        testing::check_addend_on_gpu(
            RouterBackward(spec, {.probs = true}),
            [&](DType dtype) -> OperatorInputs {
              return {{"x", "weight", "logits", "expert_idx", "grad_probs"},
                      {{dtype, {num_tokens, hidden_size}},
                       {DType::kF32, {num_experts, hidden_size}},
                       {DType::kF32, {num_tokens, num_experts}},
                       {DType::kI32, {num_tokens, 2}},
                       {DType::kF32, {num_tokens, 2}}}};
            },
            cpu(), gpu(), check);
      }
    }
  }
}

TEST_F(RouterCuda, EachGradientAlone) {
  uint64_t seed = 200;
  for (RouterSpec spec : published_specs()) {
    spec.force_balanced = spec.top_k == 2;
    const Case c{spec, 37, 24};
    for (int output = 0; output <= RouterOutput::kScoreMeans; ++output) {
      if (output == RouterOutput::kExpertIdx || output == RouterOutput::kCounts) continue;
      // Where every expert is chosen the balance loss is constant, its gradient rounding alone.
      if (output == RouterOutput::kBalanceLoss && spec.top_k == spec.num_experts) continue;
      SCOPED_TRACE(fmt::format("output {} {}", output, make_router(spec)->attributes()));
      testing::check_operator_on_gpu(
          make_router(spec), [&](DType dtype) { return inputs_of(c, dtype); }, {output}, cpu(),
          gpu(), check_of(c, ++seed));
    }
  }
}

/// Logits that are the rows of x, for choices that must be equal to the bit.
void check_choice(const RouterSpec& spec, const std::vector<float>& logits, const Backend& cpu,
                  const Backend& gpu) {
  const int64_t num_experts = spec.num_experts;
  const int64_t num_tokens = std::ssize(logits) / num_experts;
  OwningCheck check;
  check.dtypes = {DType::kF32};
  check.give("x", testing::tensor_of({num_tokens, num_experts}, logits));
  std::vector<float> diagonal(num_experts * num_experts, 0.0F);
  for (int64_t e = 0; e < num_experts; ++e) diagonal[e * num_experts + e] = 1;
  check.give("w", testing::tensor_of({num_experts, num_experts}, diagonal));
  const auto build = [&](DType /*dtype*/) {
    testing::CheckedProgram checked{Program("choice"), {}};
    const ValueId x = checked.program.add_input("x", {DType::kF32, {num_tokens, num_experts}});
    const ValueId w = checked.program.add_weight("w", {DType::kF32, {num_experts, num_experts}});
    const auto outputs = checked.program.add(make_router(spec), {x, w});
    checked.program.set_outputs({outputs[RouterOutput::kExpertIdx]});
    return checked;
  };
  testing::check_on_gpu(build, cpu, gpu, check);
}

TEST_F(RouterCuda, TiesAndBadLogitsAreChosenAlike) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kHuge = 3e38F;
  Random random(3, 3);
  std::vector<float> logits;
  for (int token = 0; token < 60; ++token) {  // few values, so that most are equal
    for (int e = 0; e < 48; ++e) logits.push_back(static_cast<float>(random.next_below(4)) - 2);
  }
  for (int e = 0; e < 48; ++e) logits.push_back(e == 3 ? nan : 1.0F);
  for (int e = 0; e < 48; ++e) logits.push_back(e % 2 == 0 ? kHuge : -kHuge);
  for (int e = 0; e < 48; ++e) logits.push_back(-0.0F);
  for (const auto group_score : {GroupScore::kMax, GroupScore::kTopTwoSum}) {
    for (const int64_t top_groups : {2, 6}) {
      check_choice({.num_experts = 48,
                    .top_k = 7,
                    .order = ScoreOrder::kAfterTopK,
                    .num_groups = 6,
                    .top_groups = top_groups,
                    .group_score = group_score},
                   logits, cpu(), gpu());
    }
  }
}

TEST_F(RouterCuda, RefusesMoreExpertsThanItHolds) {
  const Case c{of_size({}, 1025, 1), 2};
  EXPECT_THROW(check(c, 1), UserError);
}

}  // namespace
}  // namespace tessera

#pragma once

#include <vector>

#include "ops/router/router.h"
#include "ops/testing/op_test.h"

/// Calls of routers, for tests of the forward and of the backward operator.
namespace tessera::testing::router {

inline constexpr int64_t kHidden = 24;

/// One call: a spec and the values of its inputs.
struct Case {
  RouterSpec spec;
  int64_t num_tokens = 0;
  DType dtype = DType::kF32;
  std::vector<float> bias = {};
  std::vector<int32_t> cu_seqlens = {};
  std::vector<int32_t> replayed = {};
  std::vector<int32_t> segments = {};
};

inline std::vector<TestInput> make_inputs(const Case& c, Random& random) {
  auto inputs = list_inputs(
      TestInput{random_tensor(c.dtype, {c.num_tokens, kHidden}, random), Role::kValue, "x"},
      TestInput{random_tensor(DType::kF32, {c.spec.num_experts, kHidden}, random, 0.3),
                Role::kWeight, "weight"});
  if (c.spec.logit_bias) {
    inputs.push_back(
        {random_tensor(DType::kF32, {c.spec.num_experts}, random), Role::kWeight, "bias"});
  }
  if (c.spec.expert_bias) {
    inputs.push_back({tensor_of({c.spec.num_experts}, c.bias), Role::kConstant, "expert_bias"});
  }
  if (c.spec.balance_scope == BalanceScope::kSequence) {
    inputs.push_back(
        {tensor_of_i32({std::ssize(c.cu_seqlens)}, c.cu_seqlens), Role::kConstant, "cu_seqlens"});
  }
  if (c.spec.replay) {
    inputs.push_back(
        {tensor_of_i32({c.num_tokens, c.spec.top_k}, c.replayed), Role::kConstant, "replayed"});
  }
  if (c.spec.padding)
    inputs.push_back({tensor_of_i32({c.num_tokens}, c.segments), Role::kConstant, "segments"});
  return inputs;
}

inline KernelTable kernels() {
  KernelTable table;
  add_router_cpu(table);
  return table;
}

/// Every way to score and choose that the published models use, over 16 experts.
inline std::vector<RouterSpec> published_specs() {
  RouterSpec switch_transformer{.num_experts = 16, .top_k = 1};
  RouterSpec mixtral{.num_experts = 16, .top_k = 2, .order = ScoreOrder::kAfterTopK};
  RouterSpec qwen{.num_experts = 16, .top_k = 4, .normalize_top_k = true};
  RouterSpec deepseek_v2{
      .num_experts = 16, .top_k = 3, .scaling_factor = 16, .num_groups = 4, .top_groups = 2};
  RouterSpec deepseek_v3{.num_experts = 16,
                         .top_k = 4,
                         .score = ScoreFunction::kSigmoid,
                         .normalize_top_k = true,
                         .scaling_factor = 2.5,
                         .expert_bias = true,
                         .num_groups = 4,
                         .top_groups = 2,
                         .group_score = GroupScore::kTopTwoSum};
  RouterSpec plain_sigmoid{.num_experts = 16, .top_k = 2, .score = ScoreFunction::kSigmoid};
  RouterSpec deepseek_v4{.num_experts = 16,
                         .top_k = 3,
                         .score = ScoreFunction::kSqrtSoftplus,
                         .normalize_top_k = true,
                         .scaling_factor = 1.5,
                         .expert_bias = true};
  RouterSpec gpt_oss{
      .num_experts = 16, .top_k = 4, .order = ScoreOrder::kAfterTopK, .logit_bias = true};
  RouterSpec ernie{.num_experts = 16, .top_k = 6, .normalize_top_k = true, .expert_bias = true};
  RouterSpec all{.num_experts = 16, .top_k = 16};
  RouterSpec by_device = deepseek_v3;
  by_device.balance_group_size = 4;
  return {switch_transformer, mixtral, qwen,  deepseek_v2, deepseek_v3, plain_sigmoid, all,
          by_device,          gpt_oss, ernie, deepseek_v4};
}

inline Case make_case(RouterSpec spec, BalanceScope scope, int64_t num_tokens, Random& random) {
  spec.balance_scope = scope;
  Case c{.spec = spec, .num_tokens = num_tokens};
  for (int64_t e = 0; e < spec.num_experts; ++e) {
    if (spec.expert_bias) c.bias.push_back(static_cast<float>(0.2 * random.next_normal()));
  }
  if (scope == BalanceScope::kSequence) {  // uneven, one of them empty
    const auto t = static_cast<int32_t>(num_tokens);
    c.cu_seqlens = {0, t / 5, t / 5, t - t / 3, t};
  }
  return c;
}

inline constexpr BalanceScope kScopes[] = {BalanceScope::kMicroBatch, BalanceScope::kSequence};

}  // namespace tessera::testing::router

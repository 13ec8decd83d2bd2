#include "sharding/operator_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "comm/planned_world.h"
#include "ops/deal_tokens/deal_tokens.h"
#include "ops/index_topk/index_topk.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/max_logits/max_logits.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/short_conv/short_conv.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "ops/ssd_scan/ssd_scan.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// Operators that no layer of training has: updates, generation, formats and sums of communication,
/// and what no program uses yet.
const std::set<std::string_view> kElsewhere = {"adamw",
                                               "add_to_bf16",
                                               "attention_cached",
                                               "cache_append",
                                               "gated_delta_cached",
                                               "short_conv_cached",
                                               "ssd_scan_cached",
                                               "gated_delta_batch",
                                               "short_conv_batch",
                                               "ssd_scan_batch",
                                               "choose_token",
                                               "grad_clip",
                                               "muon_momentum",
                                               "muon_update",
                                               "newton_schulz",
                                               "page_write",
                                               "paged_attention",
                                               "round_to_bf16",
                                               "scale_rows",
                                               "sum_bf16_parts",
                                               "sum_of_squares",
                                               "latent_keys",
                                               "latent_outputs",
                                               "latent_queries",
                                               "quantize_blocks",
                                               "softcap",
                                               "index_topk_cached",
                                               "index_topk_paged",
                                               "kda_cached",
                                               "kda_batch",
                                               "window_choice_cached",
                                               "window_choice_paged",
                                               "index_topk_entries_cached",
                                               "index_topk_entries_paged",
                                               "compress_windows_cached",
                                               "compress_windows_paged"};

TEST(OperatorRules, EveryOperatorOfLayersHasOne) {
  for (const auto& [name, kernel] : make_cpu_kernels()) {
    EXPECT_NE(has_shard_rule(name), kElsewhere.contains(name))
        << name << ": add its rule to sharding/operator_rules.cc";
  }
}

/// Two ranks of TP in groups of their own.
class Rules : public ::testing::Test {
 protected:
  Rules() { groups_.tp = make_planned_world(0, 2)->make_world_group(); }

  ShardStatesOf infer(const OperatorPtr& op, const std::vector<ShardState>& inputs,
                      const std::vector<ValueType>& types) const {
    const RankAxes axes(groups_, 2);
    return infer_axis({*op, types, RankAxis::kTpParts, inputs, axes});
  }

  StageGroups groups_ = single_rank_groups();
};

const ShardState kSame = ShardState::replicated();

/// Statistics over a part of the vocabulary are none of the whole.
TEST_F(Rules, LossesOfWholeVocabulariesRefuseParts) {
  const std::vector<ValueType> types = {
      {DType::kF32, {4, 8}}, {DType::kF32, {5, 8}}, {DType::kI32, {4}}, {DType::kF32, {1}}};
  EXPECT_THAT(
      [&] {
        infer(make_linear_cross_entropy(), {kSame, ShardState::sharded(0), kSame, kSame}, types);
      },
      ThrowsMessage<ShardFault>(HasSubstr("the whole of a dim is needed")));
}

/// A rank that has some of a sequence's tokens would choose among these alone, and heads attend to
/// one choice.
TEST_F(Rules, ChoicesOfKeysAreOfWholeSequences) {
  const IndexSpec index = {.num_heads = 2, .head_size = 4, .top_k = 3};
  const std::vector<ValueType> scored = {
      {DType::kF32, {6, 8}}, {DType::kF32, {6, 2}}, {DType::kF32, {6, 4}}, {DType::kI32, {2}}};
  const ShardState own = ShardState::sharded(0);
  EXPECT_THAT(infer(make_index_topk(index), {kSame, kSame, kSame, kSame}, scored).value(),
              ElementsAre(kSame));
  EXPECT_THAT(
      [&] {
        infer(make_index_topk(index), {own, own, own, kSame}, scored);
      },
      ThrowsMessage<ShardFault>(HasSubstr("other ranks have of their sequence")));
  const AttentionSpec heads = {.num_heads = 2, .num_kv_heads = 2, .head_size = 4};
  const std::vector<ValueType> attended = {
      {DType::kF32, {6, 8}}, {DType::kF32, {6, 8}}, {DType::kF32, {6, 8}}, {DType::kI32, {6, 3}}};
  const ShardState part = ShardState::sharded(1);
  EXPECT_THAT(infer(make_sparse_attention(heads), {part, part, part, kSame}, attended).value(),
              ElementsAre(part, own));
  EXPECT_THAT(
      [&] {
        infer(make_sparse_attention(heads), {part, part, part, own}, attended);
      },
      ThrowsMessage<ShardFault>(HasSubstr("not for the tokens of the queries")));
}

/// A loss that each rank divides by its own number of tokens is no part of one loss (findings 3 and
/// 9 of Megatron-LM's issue 7452).
TEST_F(Rules, LossesRefuseScalesOfTheirOwn) {
  const std::vector<ValueType> types = {
      {DType::kF32, {4, 8}}, {DType::kF32, {5, 8}}, {DType::kI32, {4}}, {DType::kF32, {1}}};
  const ShardState own = ShardState::sharded(0);
  EXPECT_THAT(infer(make_linear_cross_entropy(), {own, kSame, own, kSame}, types).value(),
              ElementsAre(ShardState::partial(), own, own));
  EXPECT_THAT(
      [&] {
        infer(make_linear_cross_entropy(), {own, kSame, own, ShardState::varying()}, types);
      },
      ThrowsMessage<ShardFault>(HasSubstr("must be the same on all ranks")));
}

/// Ranks with one head each: the weight of a head is the same for all, that of a row's part is not.
TEST_F(Rules, NormsOfOneHeadEachAreNoneOfARowsParts) {
  const std::vector<ValueType> types = {{DType::kF32, {4, 8}}, {DType::kF32, {8}}};
  const ShardState head = ShardState::sharded(1);
  const ShardState own = ShardState::varying();
  EXPECT_THAT(infer(make_rmsnorm(1e-5), {head, kSame}, types).value(), ElementsAre(head, own));
  EXPECT_THROW(infer(make_rmsnorm(1e-5), {head, ShardState::sharded(0)}, types), ShardFault);
  const std::vector<ValueType> all = {types[0], types[1], {DType::kF32, {4}}, types[0]};
  const auto backward = std::make_shared<RmsNormBackward>();
  EXPECT_THAT(infer(backward, {head, kSame, own, head}, all).value(),
              ElementsAre(head, ShardState::partial()));
  EXPECT_THROW(infer(backward, {head, kSame, kSame, head}, all), ShardFault);
}

/// Queries of a ring that were given the keys of their own rank alone.
TEST_F(Rules, LargestLogitsNeedAllKeysOfTheirQueries) {
  const OperatorPtr op =
      make_max_logits({.attention = {.num_heads = 4, .num_kv_heads = 2, .head_size = 8}});
  const std::vector<ValueType> types = {
      {DType::kF32, {6, 32}}, {DType::kF32, {6, 16}}, {DType::kF32, {4, 6}}, {DType::kI32, {2}}};
  const ShardState rows = ShardState::sharded(0);
  const ShardState columns = ShardState::sharded(1);
  EXPECT_THAT(infer(op, {columns, columns, rows, kSame}, types).value(), ElementsAre(rows));
  EXPECT_THAT(infer(op, {rows, kSame, columns, kSame}, types).value(),
              ElementsAre(ShardState::varying()));
  EXPECT_THAT(
      [&] {
        infer(op, {rows, rows, columns, kSame}, types);
      },
      ThrowsMessage<ShardFault>(HasSubstr("do not have the keys")));
  EXPECT_THAT(
      [&] {
        infer(op, {columns, kSame, rows, kSame}, types);
      },
      ThrowsMessage<ShardFault>(HasSubstr("do not have the keys")));
  EXPECT_THAT(
      [&] {
        infer(op, {columns, columns, columns, kSame}, types);
      },
      ThrowsMessage<ShardFault>(HasSubstr("statistics are not spread")));
}

/// Weights that all ranks have, of which each reads those of its own channels and adds to their
/// gradients alone; without such a part they must be cut as the channels are.
TEST_F(Rules, ConvolutionsAndScansReadTheirOwnPartOfWeights) {
  const ShardState columns = ShardState::sharded(1);
  const ShardState summand = ShardState::partial();
  const ShortConvSpec part{.biased = true, .all_channels = 8, .first_channel = 4};
  std::vector<ValueType> types = {
      {DType::kF32, {6, 4}}, {DType::kF32, {8, 3}}, {DType::kI32, {2}}, {DType::kF32, {8}}};
  EXPECT_THAT(infer(make_short_conv(part), {columns, kSame, kSame, kSame}, types).value(),
              ElementsAre(columns));
  EXPECT_THROW(infer(make_short_conv({.biased = true}), {columns, kSame, kSame, kSame}, types),
               ShardFault);
  types.insert(types.begin() + ShortConvBackward::kGrad, types[0]);
  EXPECT_THAT(infer(std::make_shared<ShortConvBackward>(part),
                    {columns, kSame, kSame, columns, kSame}, types)
                  .value(),
              ElementsAre(columns, summand, summand));
  const SsdSpec heads{
      .num_heads = 2, .head_size = 2, .state_size = 3, .all_heads = 4, .first_head = 2};
  const ValueType of_heads{DType::kF32, {4}};
  const ValueType states{DType::kF32, {6, 3}};
  std::vector<ValueType> scanned = {
      types[0], {DType::kF32, {6, 2}}, states, states, of_heads, of_heads,
      of_heads, {DType::kI32, {2}}};
  std::vector<ShardState> spread = {columns, columns, columns, columns, kSame, kSame, kSame, kSame};
  EXPECT_THAT(infer(make_ssd_scan(heads), spread, scanned).value(), ElementsAre(columns));
  scanned.push_back(types[0]);
  spread.push_back(columns);
  EXPECT_THAT(infer(std::make_shared<SsdScanBackward>(heads), spread, scanned).value(),
              ElementsAre(columns, columns, columns, columns, summand, summand, summand));
}

/// A rank that has some tokens cannot put them in the order of their sequences.
TEST_F(Rules, TokensAreCollectedWhereAllAre) {
  const OperatorPtr op = make_collect_tokens({.num_rows = 1, .row_length = 8, .ring = 2});
  const std::vector<ValueType> types = {{DType::kF32, {8, 4}}};
  EXPECT_THAT(infer(op, {ShardState::sharded(1)}, types).value(),
              ElementsAre(ShardState::sharded(1)));
  EXPECT_THAT([&] { infer(op, {ShardState::sharded(0)}, types); },
              ThrowsMessage<ShardFault>(HasSubstr("other ranks have of their sequence")));
}

TEST_F(Rules, OperatorsWithoutOneAreNamed) {
  struct Unknown final : Operator {
    std::string_view name() const override { return "unknown"; }
    std::vector<ValueType> infer(std::span<const ValueType> inputs) const override {
      return {inputs[0]};
    }
  };
  EXPECT_THAT(
      [&] {
        infer(std::make_shared<Unknown>(), {kSame}, {{DType::kF32, {4}}});
      },
      ThrowsMessage<InternalError>(HasSubstr("operator unknown has no rule")));
}

}  // namespace
}  // namespace tessera

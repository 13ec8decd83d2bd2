#include "model/build/ports.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "model/layers/block_program.h"
#include "model/layers/layer_program.h"
#include "model/layers/vocabulary_program.h"
#include "model/run/model_testing.h"
#include "ops/add/add.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Names = std::vector<std::string_view>;

Names ports_of(const ModelProgram& program) {
  Names names;
  for (const PortRule& rule : port_rules()) {
    if (program.has(rule.port)) names.push_back(rule.name);
  }
  return names;
}

class Ports : public ::testing::Test {
 protected:
  ModelConfig config_ = testing::tiny_config();
  BatchShape shape_ = testing::tiny_shape(2, 4);
  StageGroups groups_ = single_rank_groups();

  ModelProgram layer(LayerKind kind, std::optional<CacheShape> cache = std::nullopt) const {
    return build_layer(config_, kind, shape_, groups_, cache);
  }
  PortContext context(LayerKind kind) const {
    return {.config = config_, .kind = kind, .shape = shape_, .groups = groups_};
  }
};

TEST_F(Ports, NamesAreUniqueAndExplained) {
  std::set<std::string_view> names;
  for (const PortRule& rule : port_rules()) {
    EXPECT_TRUE(names.insert(rule.name).second) << rule.name;
    EXPECT_FALSE(rule.what.empty()) << rule.name;
  }
  EXPECT_EQ(names.size(), kNumPorts);
}

TEST_F(Ports, ProgramsHaveThoseOfTheirKind) {
  EXPECT_EQ(ports_of(layer({})), (Names{"hidden", "positions", "cu_seqlens", "hidden_out"}));
  EXPECT_EQ(ports_of(layer({}, CacheShape{8})),
            (Names{"hidden", "positions", "hidden_out", "start", "cache_length", "key_cache",
                   "value_cache"}));
  EXPECT_EQ(ports_of(layer({}, CacheShape{.capacity = 8, .num_pages = 3})),
            (Names{"hidden", "positions", "cu_seqlens", "hidden_out", "cache_length", "key_cache",
                   "value_cache", "cache_rows", "page_table"}));
  EXPECT_EQ(ports_of(layer({.delta = true})), (Names{"hidden", "cu_seqlens", "hidden_out"}));
  EXPECT_EQ(ports_of(layer({.delta = true}, CacheShape{8})),
            (Names{"hidden", "hidden_out", "start", "query_conv_state", "key_conv_state",
                   "value_conv_state", "delta_states"}));
  const CacheShape slots{.capacity = 8, .num_pages = 3, .num_slots = 2};
  EXPECT_EQ(ports_of(layer({.delta = true}, slots)),
            (Names{"hidden", "cu_seqlens", "hidden_out", "cache_length", "cache_slots",
                   "query_conv_state", "key_conv_state", "value_conv_state", "delta_states"}));
  EXPECT_EQ(ports_of(layer({.conv = true}, CacheShape{8})),
            (Names{"hidden", "hidden_out", "start", "value_conv_state"}));
  EXPECT_EQ(ports_of(layer({.conv = true}, slots)),
            (Names{"hidden", "cu_seqlens", "hidden_out", "cache_length", "cache_slots",
                   "value_conv_state"}));
  EXPECT_EQ(ports_of(layer({.mamba = true}, CacheShape{8})),
            (Names{"hidden", "hidden_out", "start", "query_conv_state", "key_conv_state",
                   "value_conv_state", "scan_states"}));
  EXPECT_EQ(ports_of(layer({.mamba = true}, slots)),
            (Names{"hidden", "cu_seqlens", "hidden_out", "cache_length", "cache_slots",
                   "query_conv_state", "key_conv_state", "value_conv_state", "scan_states"}));
  EXPECT_EQ(ports_of(layer({.no_mlp = true})), ports_of(layer({})));
  EXPECT_EQ(ports_of(layer({.no_mixer = true})), (Names{"hidden", "hidden_out"}));
  EXPECT_EQ(ports_of(layer({.no_mixer = true}, CacheShape{8})), (Names{"hidden", "hidden_out"}));
  EXPECT_EQ(ports_of(layer({.moe = true})),
            (Names{"hidden", "positions", "cu_seqlens", "hidden_out", "balance_loss", "z_loss",
                   "score_means", "counts", "dropped"}));
  EXPECT_THAT(ports_of(layer({.mtp = true})), ::testing::Contains("embedded"));
  EXPECT_EQ(ports_of(build_embedding(config_, shape_, groups_)), (Names{"tokens", "hidden_out"}));
  EXPECT_EQ(ports_of(build_head(config_, shape_, groups_, true)),
            (Names{"hidden", "labels", "scale", "loss", "token_loss"}));
  EXPECT_EQ(ports_of(build_logits(config_, shape_)), (Names{"hidden", "logits"}));
  EXPECT_EQ(ports_of(build_logits(config_, shape_, shape_.num_tokens)),
            (Names{"hidden", "logits", "token_rules", "chosen_token", "chosen_log_probability"}));
  EXPECT_EQ(ports_of(build_logits(config_, shape_, 1)),
            (Names{"hidden", "logits", "chosen_rows", "token_rules", "chosen_token",
                   "chosen_log_probability"}));
  EXPECT_EQ(ports_of(build_block(config_, LayerBlock::kMlp, {}, shape_, groups_)),
            (Names{"hidden", "hidden_out"}));
}

TEST_F(Ports, OutputsComeInTheOrderOfTheRules) {
  config_.moe.balance_scope = BalanceTokens::kSequence;
  EXPECT_THAT(ports_of(layer({.moe = true, .no_mixer = true})), ::testing::Contains("cu_seqlens"));
  config_.moe.balance_scope = BalanceTokens::kGlobalBatch;
  const ModelProgram program = layer({.moe = true});
  Names names;
  for (const ValueId id : program.forward.outputs())
    names.push_back(port_name(program.ports.port_of(id)));
  EXPECT_THAT(names, ElementsAre("hidden_out", "balance_loss", "z_loss", "score_means", "counts",
                                 "dropped", "counts_so_far"));
}

TEST_F(Ports, WhatTheRulesDoNotHaveIsRefused) {
  ModelProgram program = layer({});
  EXPECT_THAT([&] { finish_ports(program.forward, program.ports, context({.mtp = true})); },
              ThrowsMessage<InternalError>(HasSubstr("lacks port 'embedded'")));
  add_port(program.forward, program.ports, Port::kSegments, context({}));
  EXPECT_THAT([&] { finish_ports(program.forward, program.ports, context({})); },
              ThrowsMessage<InternalError>(HasSubstr("may not have port 'segments'")));
}

TEST_F(Ports, AnotherTypeIsRefused) {
  Program program("test");
  const ValueId wide = program.add_input("wide", {DType::kF32, {3, 5}});
  PortMap ports;
  ports.set(Port::kHidden, wide);
  ports.set(Port::kLogits, wide);
  const PortContext of_logits{
      .role = ProgramRole::kLogits, .config = config_, .shape = shape_, .groups = groups_};
  EXPECT_THAT(
      [&] { finish_ports(program, ports, of_logits); },
      ThrowsMessage<InternalError>(HasSubstr("port 'hidden' of program test is f32 [3, 5]")));
}

TEST_F(Ports, AbsentPortsAreExplicit) {
  const ModelProgram program = layer({});
  EXPECT_FALSE(program.has(Port::kCounts));
  EXPECT_THAT([&] { program.at(Port::kCounts); },
              ThrowsMessage<InternalError>(HasSubstr("port 'counts'")));
  EXPECT_THROW(program.ports.port_of(static_cast<ValueId>(program.forward.num_values())),
               InternalError);
}

}  // namespace
}  // namespace tessera

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "model/config/config.h"
#include "model/config/config_testing.h"
#include "model/run/model_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Lora, CountsItsAdapters) {
  ModelConfig config = testing::tiny_config();
  EXPECT_EQ(count_parameters(config).trained, count_parameters(config).total);
  config.num_layers = 3;
  config.moe.first_dense_layers = 1;
  config.moe.inner_sizes = {8, 16, 8, 24};
  config.moe.shared_inner_size = 12;
  config.moe.latent_size = 6;
  config.delta_layers = {2};
  config.attention_gate = true;
  for (const bool latent : {false, true}) {
    config.delta.kind = latent ? DeltaKind::kKimi : DeltaKind::kGated;
    for (const std::vector<std::string>& targets : std::vector<std::vector<std::string>>{
             {"all"}, {"attn", "moe"}, {"attn.o", "delta", "mlp"}}) {
      if (latent) {
        config.attention = AttentionKind::kLatent;
        config.attention_gate = false;
        config.num_kv_heads = 0;
        config.latent = {
            .query_rank = 5, .kv_rank = 6, .nope_size = 3, .rope_size = 4, .value_size = 2};
      }
      config.lora = {.rank = 3, .targets = targets};
      validate(config);
      EXPECT_EQ(count_parameters(config).total, testing::count_listed(config));
      int64_t trained = 0;
      bool was_frozen = false;
      for (const ParameterSpec& spec : list_parameters(config, DType::kF32)) {
        EXPECT_EQ(spec.placement.frozen, !is_adapter_parameter(spec.name)) << spec.name;
        EXPECT_FALSE(was_frozen && !spec.placement.frozen) << spec.name << " is behind frozen ones";
        was_frozen = spec.placement.frozen;
        if (!was_frozen) trained += spec.shape.num_elements();
      }
      EXPECT_EQ(count_parameters(config).trained, trained);
    }
  }
}

/// Layers without attention, and without an MLP, have none of their adapters.
TEST(Lora, CountsAdaptersOfHybrids) {
  ModelConfig config = testing::tiny_config();
  config.num_layers = 5;
  config.mamba_layers = {0, 4};
  config.layers_without_mixer = {1};
  config.layers_without_mlp = {2, 4};
  for (const std::vector<std::string>& targets :
       std::vector<std::vector<std::string>>{{"all"}, {"attn"}, {"moe"}}) {
    config.lora = {.rank = 3, .targets = targets};
    validate(config);
    EXPECT_EQ(count_parameters(config).total, testing::count_listed(config));
    int64_t trained = 0;
    for (const ParameterSpec& spec : list_parameters(config, DType::kF32))
      trained += spec.placement.frozen ? 0 : spec.shape.num_elements();
    EXPECT_GT(trained, 0);
    EXPECT_EQ(count_parameters(config).trained, trained);
  }
  config.mamba_layers = {0, 2, 3, 4};
  config.lora = {.rank = 3, .targets = {"attn"}};
  EXPECT_THAT([&] { validate(config); }, ThrowsMessage<UserError>(HasSubstr("'attn'")));
}

TEST(Lora, RefusesWhatTheModelLacks) {
  const auto refused = [](LoraConfig lora, const char* text, auto change) {
    ModelConfig config = testing::tiny_config();
    config.lora = std::move(lora);
    change(config);
    EXPECT_THAT([&] { validate(config); }, ThrowsMessage<UserError>(HasSubstr(text)));
  };
  const auto nothing = [](ModelConfig&) {};
  refused({.rank = 4, .targets = {"attn.w"}}, "did you mean 'attn.", nothing);
  refused({.rank = 4, .targets = {"mlp"}}, "lora.targets names 'mlp'", nothing);
  refused({.rank = 4, .targets = {}}, "lora.targets is empty", nothing);
  refused({.alpha = 3}, "lora.rank is 0", nothing);
  refused({.rank = 4}, "model.mtp_layers is 1", [](ModelConfig& c) { c.mtp_layers = 1; });
  refused({.rank = 4}, "block_sparse", [](ModelConfig& c) {
    c.moe.experts = ExpertPath::kBlockSparse;
    c.moe.block_size = 8;
  });
  refused({.rank = 4, .targets = {"attn.kv_up"}}, "generation reads", [](ModelConfig& c) {
    c.attention = AttentionKind::kLatent;
    c.num_kv_heads = 0;
    c.latent = {.kv_rank = 6, .nope_size = 4, .rope_size = 2, .value_size = 5};
  });
}

}  // namespace
}  // namespace tessera

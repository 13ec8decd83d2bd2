#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "hf/config/hf_config.h"
#include "hf/config/write_config.h"
#include "hf/testing/config_cases.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using testing::error_of;
using testing::fixture_json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::parse_config;

TEST(PhiConfig, ReadsItsParts) {
  const ModelConfig model = parse_config(fixture_json("phimoe"));
  EXPECT_EQ(model.norm, NormKind::kLayer);
  EXPECT_TRUE(model.head_bias && model.qkv_bias && model.output_bias);
  EXPECT_EQ(model.window, 9);
  EXPECT_EQ(model.rope.scaling, RopeScaling::kLongRope);
  EXPECT_EQ(model.rope.original_length, 32);
  EXPECT_THAT(model.rope.short_factors, ElementsAre(1.0, 1.25, 1.5, 3.0));
  EXPECT_THAT(model.rope.long_factors, ElementsAre(1.5, 3.0, 9.0, 30.0));
  EXPECT_EQ(model.rope.short_mscale, 1.2);
  EXPECT_EQ(model.rope.long_mscale, 1.4);
  EXPECT_EQ(model.moe.sparse_mixer, 0.2);
  EXPECT_FALSE(model.moe.normalize_top_k || model.moe.draw_experts);
  EXPECT_EQ(model.moe.router_jitter, 0);
  EXPECT_EQ(find_family_for(model).model_type, "phimoe");
}

/// As its own code has it: another name of the class, older keys of the rotation, noise.
TEST(PhiConfig, ReadsPublishedKeys) {
  json config = fixture_json("phimoe");
  config["architectures"] = {"PhiMoEForCausalLM"};
  config["rope_scaling"] = config["rope_parameters"];
  config["rope_scaling"]["type"] = "longrope";
  config["rope_scaling"].erase("rope_type");
  config["rope_theta"] = config["rope_scaling"]["rope_theta"];
  config["rope_scaling"].erase("rope_theta");
  config.erase("rope_parameters");
  config["input_jitter_noise"] = 0.01;
  config["hidden_dropout"] = 0.0;
  const ModelConfig model = parse_config(config);
  EXPECT_EQ(model.rope, parse_config(fixture_json("phimoe")).rope);
  EXPECT_EQ(model.moe.router_jitter, 0.01);
  EXPECT_TRUE(model.moe.jitter_experts);
  config["architectures"] = {"Phi3ForCausalLM"};
  EXPECT_THAT(error_of(config), HasSubstr("PhimoeForCausalLM"));
}

TEST(PhiConfig, RefusesWhatItCannotCompute) {
  const auto refused = [](const char* key, const json& value) {
    json config = fixture_json("phimoe");
    config[key] = value;
    return error_of(config);
  };
  EXPECT_THAT(refused("num_experts_per_tok", 3), HasSubstr("transformers' router takes 2"));
  EXPECT_THAT(refused("router_jitter_noise", 0.0),
              HasSubstr("'router_jitter_noise' must be above"));
  EXPECT_THAT(refused("router_jitter_noise", 1.5), HasSubstr("it must be below 1"));
  EXPECT_THAT(refused("input_jitter_noise", 1.0), HasSubstr("'input_jitter_noise' is 1"));
  const auto refused_rope = [](const char* key, const json& value) {
    json config = fixture_json("phimoe");
    config["rope_parameters"][key] = value;
    return error_of(config);
  };
  EXPECT_THAT(refused_rope("rope_type", "yarn"), HasSubstr("supported are default and longrope"));
  EXPECT_THAT(refused_rope("short_factor", json::array({1.0, 2.0})),
              HasSubstr("short_factors of 4"));
  EXPECT_THAT(refused_rope("long_factor", json::array({1.0, 2.0, 0.0, 1.0})),
              HasSubstr("'long_factor' must have numbers above 0"));
  EXPECT_THAT(refused_rope("long_mscale", nullptr), HasSubstr("'long_mscale' must be a number"));
  json llama = fixture_json("llama");
  llama["rope_parameters"] = fixture_json("phimoe")["rope_parameters"];
  llama.erase("rope_scaling");
  EXPECT_THAT(error_of(llama), HasSubstr("'longrope' is not supported"));
}

/// A model whose amplitudes follow from its factor is written with numbers; drawn experts are a
/// choice of training, which files do not say.
TEST(PhiConfig, IsWrittenAndReadAgain) {
  ModelConfig model = parse_config(fixture_json("phimoe"));
  model.rope.factor = 8;
  model.rope.short_mscale = 0;
  model.moe.draw_experts = true;
  model.moe.router_jitter = 0.05;
  model.moe.jitter_experts = true;
  const Family& family = find_family("phimoe");
  EXPECT_THAT(inexpressible(family, model), IsEmpty());
  const json written = json::parse(write_hf_config(family, model, DType::kBF16, 256));
  EXPECT_EQ(written["input_jitter_noise"], 0.05);
  EXPECT_EQ(written["router_jitter_noise"], 0.2);
  EXPECT_EQ(written["original_max_position_embeddings"], 32);
  EXPECT_EQ(written["rope_scaling"]["rope_type"], "longrope");
  EXPECT_NEAR(written["rope_scaling"]["short_mscale"].get<double>(),
              std::sqrt(1 + std::log(8) / std::log(32)), 1e-12);
}

TEST(PhiConfig, OtherFamiliesHaveNoneOfItsParts) {
  const ModelConfig plain = parse_config(fixture_json("mixtral"));
  const auto obstacle = [&](void (*change)(ModelConfig&)) {
    ModelConfig model = plain;
    change(model);
    const auto found = inexpressible(find_family("mixtral"), model);
    return found.empty() ? "" : found.front();
  };
  EXPECT_THAT(obstacle([](ModelConfig& m) { m.norm = NormKind::kLayer; }),
              HasSubstr("model.norm: \"layer\" here"));
  EXPECT_THAT(obstacle([](ModelConfig& m) { m.head_bias = true; }), HasSubstr("model.head_bias"));
  EXPECT_THAT(obstacle([](ModelConfig& m) {
                m.moe.sparse_mixer = 0.1;
                m.moe.normalize_top_k = false;
              }),
              HasSubstr("moe."));
}

}  // namespace
}  // namespace tessera

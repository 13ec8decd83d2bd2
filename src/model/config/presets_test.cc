#include <gtest/gtest.h>

#include "model/config/config.h"
#include "model/config/config_testing.h"

namespace tessera {
namespace {

ModelConfig from_preset(const Preset& preset) {
  ModelConfig config;
  ConfigSchema schema;
  add_model_options(schema, config);
  schema.load_preset(preset.name, preset.toml);
  if (config.vocab_size == 0) config.vocab_size = 320;
  return config;
}

TEST(Presets, AreValidAndCountTheirParameters) {
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const ModelConfig config = from_preset(preset);
    validate(config);
    EXPECT_EQ(count_parameters(config).total, testing::count_listed(config));
  }
}

TEST(Presets, HaveTheirPublishedSizes) {
  const auto expect_size = [](const char* name, double total, double active) {
    const ParameterCount count = count_parameters(from_preset(find_preset(name)));
    EXPECT_NEAR(static_cast<double>(count.total) / total, 1, 0.01) << name;
    EXPECT_NEAR(static_cast<double>(count.active) / active, 1, 0.02) << name;
  };
  expect_size("deepseek-v3", 671e9, 37e9);
  expect_size("mixtral-8x7b", 46.7e9, 12.9e9);
  expect_size("qwen3-30b-a3b", 30.5e9, 3.3e9);
  expect_size("phi-3.5-moe", 41.9e9, 6.6e9);
  EXPECT_EQ(count_parameters(from_preset(find_preset("phi-3.5-moe"))).total, 41'873'153'344);
  // 671 and 37 are published, which leaves indexers out; of GLM-5 744 and 40.
  expect_size("deepseek-v3.2", 671.9e9, 38.4e9);
  expect_size("glm-5", 744e9, 41.7e9);
  // What is active is published in whole billions at most, and here counted from the shapes.
  expect_size("deepseek-v4-flash", 284e9, 13.8e9);
  expect_size("kimi-k2", 1.026e12, 32.9e9);
  expect_size("moonlight-16b-a3b", 15.96e9, 2.9e9);
  expect_size("glm-4.7-flash", 29.9e9, 3.9e9);
  expect_size("dots-llm1", 142.8e9, 14.0e9);
  expect_size("minimax-m2", 228.7e9, 11e9);
  expect_size("ernie-4.5-21b-a3b", 21.83e9, 3.35e9);
  expect_size("hunyuan-a13b", 80.4e9, 12.7e9);
  // 79.67 billion are counted; the model card has 80 and 3.
  expect_size("qwen3-next-80b-a3b", 80e9, 3.9e9);
  expect_size("qwen3.5-35b-a3b", 35e9, 3.45e9);
  expect_size("k-exaone-236b-a23b", 236e9, 23.6e9);
  expect_size("lfm2-8b-a1b", 8.34e9, 1.55e9);
  // 48 and 3 are published in whole billions, of Trinity 26 and 3; here counted from the shapes.
  expect_size("kimi-linear-48b-a3b", 49.1e9, 3.48e9);
  expect_size("trinity-mini", 26.1e9, 3.5e9);
  // 109 billion are published, encoders of images included; here of text, counted from the shapes.
  expect_size("llama4-scout-17b-16e", 107.8e9, 17.2e9);
  expect_size("gemma4-26b-a4b", 25.2e9, 3.8e9);
  expect_size("granite-3.1-3b-a800m", 3.3e9, 0.88e9);
  // Llama 3 70B's 70.55 billion, of which 56.37 are MLPs that stand 8 times, or twice.
  expect_size("llama3-8x70b", 70.55e9 + 7 * 56.37e9, 70.55e9 + 56.37e9);
  // Its eight experts have the size of one of Mixtral 8x22B's.
  expect_size("mixtral-8x22b-g8t8", 140.6e9, 22.3e9);
  const auto expect_dense = [&](const char* name, double published, double hidden) {
    const double size = published - 1024 * hidden;  // without learned positions
    expect_size(name, size, size);
  };
  expect_dense("transformer-xs", 46e6, 512);
  expect_dense("transformer-small", 125e6, 768);
  expect_dense("transformer-medium", 356e6, 1024);
  expect_dense("transformer-large", 760e6, 1536);
  expect_dense("transformer-xl", 1316e6, 2048);
  // The model card leaves the embedding table out of what is active.
  const double table = 201088.0 * 2880;
  expect_size("gpt-oss-20b", 20.91e9, 3.61e9 + table);
  expect_size("gpt-oss-120b", 116.83e9, 5.13e9 + table);
}

}  // namespace
}  // namespace tessera

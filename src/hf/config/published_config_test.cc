#include <gtest/gtest.h>

#include <filesystem>

#include "core/file/file.h"
#include "hf/config/hf_config.h"

namespace tessera {
namespace {

/// A configuration as published with a model's weights, and how many billions of parameters the
/// model is said to have.
struct Published {
  const char* name;
  double billions;
};

class PublishedConfig : public ::testing::TestWithParam<Published> {};

TEST_P(PublishedConfig, GivesAModelOfItsSize) {
  const std::filesystem::path path =
      std::filesystem::path(TESSERA_TEST_DATA) / "hf_configs" / GetParam().name;
  const ImportedConfig config = parse_hf_config(read_text_file(path), path.string());
  validate(config.model);
  const auto total = static_cast<double>(count_parameters(config.model).total);
  EXPECT_NEAR(total / 1e9, GetParam().billions, 0.01 * GetParam().billions);
}

INSTANTIATE_TEST_SUITE_P(
    All, PublishedConfig,
    ::testing::Values(Published{"qwen3-30b.json", 30.5}, Published{"qwen1.5-moe.json", 14.3},
                      Published{"mixtral.json", 46.7}, Published{"olmoe.json", 6.92},
                      Published{"dsv2lite.json", 15.7}, Published{"dsv3.json", 671},
                      Published{"glm45air.json", 106.9}, Published{"llama31.json", 8.03},
                      Published{"qwen3-8b.json", 8.19}, Published{"mistral.json", 7.24},
                      Published{"gptoss20b.json", 20.91}, Published{"gptoss120b.json", 116.83},
                      Published{"kimik2.json", 1026}, Published{"moonlight.json", 15.96},
                      Published{"dotsllm1.json", 142.8}, Published{"minimaxm2.json", 228.7},
                      Published{"ernie45-21b.json", 21.83}, Published{"hunyuan-a13b.json", 80.4},
                      Published{"glm47flash.json", 29.9}, Published{"granite31-3b.json", 3.3},
                      Published{"qwen3next-80b.json", 79.7},
                      Published{"granite40-h-small.json", 32.2},
                      Published{"nemotron3-nano.json", 31.6}, Published{"llama4-scout.json", 107.8},
                      Published{"gemma4-26b.json", 25.2}, Published{"dsv4flash.json", 284}),
    [](const auto& info) { return "Config" + std::to_string(info.index); });

}  // namespace
}  // namespace tessera

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "model/config/config_testing.h"
#include "model/run/model_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

void expect_refused_of_streams(void (*change)(ModelConfig&), const char* message) {
  ModelConfig config = testing::tiny_config();
  change(config);
  EXPECT_THAT([&] { validate(config); }, ThrowsMessage<UserError>(HasSubstr(message)));
}

TEST(ResidualOptions, ParametersOfStreamsAndTablesAreCounted) {
  ModelConfig config = testing::tiny_config();
  const int64_t before = count_parameters(config).total;
  config.residual_streams = 3;
  config.moe.hash_layers = {0};
  validate(config);
  const ParameterCount counts = count_parameters(config);
  EXPECT_EQ(counts.total, testing::count_listed(config));
  const int64_t width = 3 * config.hidden_size;
  const int64_t table = config.vocab_size * config.moe.top_k;
  EXPECT_EQ(counts.total - before,
            2 * config.num_layers * (15 * (width + 1) + 3) + 3 * (width + 1) + 1 + table);
  EXPECT_EQ(counts.total - counts.trained, table);
}

TEST(ResidualOptions, PredictionHasStreamsOfItsOwn) {
  ModelConfig config = testing::tiny_config();
  config.residual_streams = 3;
  config.mtp_layers = 2;
  validate(config);
  EXPECT_EQ(count_parameters(config).total, testing::count_listed(config));
}

TEST(ResidualOptions, RefusesWhatStreamsDoNotGoWith) {
  expect_refused_of_streams(
      [](ModelConfig& c) {
        c.residual_streams = 2;
        c.mtp_layers = 1;
        c.mtp_normed = true;
      },
      "leave model.mtp_normed out");
  expect_refused_of_streams(
      [](ModelConfig& c) {
        c.residual_streams = 2;
        c.mtp_layers = 1;
        c.norm = NormKind::kLayer;
      },
      "set model.mtp_layers to 0");
}

TEST(ResidualOptions, RefusesHashLayersThatCannotBe) {
  expect_refused_of_streams([](ModelConfig& c) { c.moe.hash_layers = {9}; }, "lists layer 9");
  expect_refused_of_streams(
      [](ModelConfig& c) {
        c.moe.first_dense_layers = 1;
        c.moe.hash_layers = {0};
      },
      "layer 0, which has no experts");
  expect_refused_of_streams(
      [](ModelConfig& c) {
        c.moe.hash_layers = {0};
        c.moe.routing = Routing::kExpertChoice;
      },
      "moe.hash_layers with moe.routing");
  expect_refused_of_streams(
      [](ModelConfig& c) {
        c.moe.hash_layers = {0};
        c.moe.zero_experts = 1;
      },
      "moe.hash_layers with moe.zero_experts");
  expect_refused_of_streams(
      [](ModelConfig& c) {
        c.moe.hash_layers = {c.num_layers - 1};
        c.mtp_layers = 1;
      },
      "moe.hash_layers with model.mtp_layers");
}

}  // namespace
}  // namespace tessera

// Copies of weights in FP8 that micro-batches share, on a device that the host stands for.
#include "model/run/layer_copies.h"

#include <gtest/gtest.h>

#include "model/run/model_testing.h"
#include "ops/round_values/recipes.h"
#include "ops/testing/shadow_backend.h"

namespace tessera {
namespace {

using testing::TestBatch;

constexpr int64_t kLength = 24;

ModelConfig config_of_blocks() {
  ModelConfig config = testing::tiny_config();
  config.hidden_size = 128;
  config.head_size = 32;
  config.num_kv_heads = 4;
  config.init_deviation = 0.05;
  config.moe.inner_size = 128;
  return config;
}

BatchShape shape_of(const char* recipe, bool keeps_copies) {
  BatchShape shape = testing::tiny_shape(2, kLength, DType::kBF16);
  shape.products = {.recipe = &find_recipe(recipe), .keeps_copies = keeps_copies};
  return shape;
}

/// A model on a shadow device.
struct Rig {
  ModelConfig config = config_of_blocks();
  Backend backend = testing::make_shadow_backend(make_cpu_kernels());
  ParameterSet parameters{list_parameters(config, DType::kBF16), true, backend.device()};
  std::vector<ExpertState> experts = make_expert_states(config, backend.device());
  TrainingModel model;

  Rig(const char* recipe, bool keeps_copies, bool split = false)
      : model(config, shape_of(recipe, keeps_copies), {}, backend, {.split_weights = split}) {
    parameters.initialize(3);
    model.bind(parameters, experts);
  }

  /// The losses of a step of three micro-batches, whose gradients are added up.
  std::vector<double> step() {
    std::vector<double> losses;
    model.begin_step();
    parameters.zero_gradients();
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      TestBatch batch(config, 2, kLength, seed);
      losses.push_back(model.run(batch.view(), {.loss = 0.1}).loss);
    }
    return losses;
  }

  std::vector<std::byte> gradients() const {
    std::vector<std::byte> all;
    for (const ModelParameter& parameter : parameters.all()) {
      std::vector<std::byte> own(parameter.grad.num_bytes());
      backend.device().copy(own.data(), parameter.grad.data, std::ssize(own));
      backend.device().synchronize();
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
};

TEST(LayerCopies, GiveTheBitsOfQuantizingInEveryRun) {
  for (const char* recipe : {"rowwise", "blockwise"}) {
    for (const bool split : {false, true}) {
      SCOPED_TRACE(fmt::format("{}{}", recipe, split ? ", weight gradients apart" : ""));
      Rig shared(recipe, true, split);
      Rig apart(recipe, false, split);
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(shared.step(), apart.step());
        EXPECT_EQ(shared.gradients(), apart.gradients());
        shared.parameters.initialize(4 + i);
        apart.parameters.initialize(4 + i);
      }
      TestBatch batch(shared.config, 2, kLength, 7);
      EXPECT_EQ(shared.model.evaluate(batch.view()), apart.model.evaluate(batch.view()));
    }
  }
}

/// Each weight of a product is read as it lies and turned.
TEST(LayerCopies, TakeWhatIsPredicted) {
  const Rig shared("rowwise", true);
  const Rig apart("rowwise", false);
  EXPECT_EQ(apart.model.activation_bytes().copies, 0);
  const int64_t hidden = shared.config.hidden_size;
  const int64_t elements =
      shared.config.num_layers *
      (4 * hidden * hidden + 3 * shared.config.moe.num_experts * hidden * hidden);
  EXPECT_GT(shared.model.activation_bytes().copies, 2 * elements);
  EXPECT_LT(shared.model.activation_bytes().copies, 2 * elements * 11 / 10);
}

/// On a host, and for recipes that tensor cores lack, nothing is kept.
TEST(LayerCopies, AreOfProductsInFp8Alone) {
  EXPECT_EQ(Rig("mxfp8", true).model.activation_bytes().copies, 0);
  const TrainingModel host(config_of_blocks(), shape_of("rowwise", true), {}, make_cpu_kernels());
  EXPECT_EQ(host.activation_bytes().copies, 0);
}

}  // namespace
}  // namespace tessera

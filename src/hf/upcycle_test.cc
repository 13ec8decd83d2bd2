#include "hf/upcycle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "hf/config/write_config.h"
#include "hf/convert_testing.h"
#include "model/run/forward_model.h"
#include "model/weights/expert_states.h"
#include "ops/registry/cpu_kernels.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

ModelConfig dense_model() {
  ModelConfig model;
  model.vocab_size = 61;
  model.hidden_size = 24;
  model.num_layers = 3;
  model.num_heads = 2;
  model.inner_size = 48;
  model.moe.num_experts = 0;
  return model;
}

/// A checkpoint of random weights, large enough that every block matters to the logits.
std::filesystem::path save_random(const ScratchFolder& scratch, const ModelConfig& model,
                                  DType dtype) {
  ParameterSet parameters(list_parameters(model, dtype), false);
  parameters.initialize(7);
  std::vector<NamedTensor> tensors;
  for (const ModelParameter& parameter : parameters.all()) {
    tensors.push_back({parameter.spec.name, parameter.weight});
    if (parameter.spec.shape.rank() < 2 || dtype != DType::kF32) continue;
    for (float& value : parameter.weight.span<float>()) value *= 10;
  }
  return save_checkpoint(scratch.path(), {.model = tensors}).path;
}

std::vector<float> logits_of(const std::filesystem::path& checkpoint, const ModelConfig& model,
                             DType dtype) {
  constexpr int64_t kLength = 19;
  const CheckpointReader reader(checkpoint);
  ParameterSet parameters(list_parameters(model, dtype), false);
  auto experts = make_expert_states(model);
  std::vector<NamedTensor> tensors = name_expert_biases(model, experts);
  for (const ModelParameter& parameter : parameters.all()) {
    tensors.push_back({parameter.spec.name, parameter.weight});
  }
  reader.load_group(TensorGroup::kModel, tensors);
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < kLength; ++i) ids.push_back((i * 37 + 5) % 61);
  KeyValueCache cache(model, dtype, kLength);
  ForwardModel forward(model, {.num_tokens = kLength, .dtype = dtype}, ForwardGoal::kLogits,
                       make_cpu_kernels(), parameters, experts, &cache);
  const Tensor logits = forward.run_logits(ids);
  std::vector<float> result;
  if (dtype == DType::kF32) return {logits.span<float>().begin(), logits.span<float>().end()};
  return {logits.span<Bf16>().begin(), logits.span<Bf16>().end()};
}

/// The largest relative error of a row.
double largest_error(const std::vector<float>& a, const std::vector<float>& b, int64_t width) {
  double largest = 0;
  for (size_t row = 0; row < a.size(); row += static_cast<size_t>(width)) {
    double difference = 0;
    double norm = 0;
    for (size_t i = row; i < row + static_cast<size_t>(width); ++i) {
      difference += std::pow(a[i] - b[i], 2);
      norm += std::pow(b[i], 2);
    }
    largest = std::max(largest, std::sqrt(difference / norm));
  }
  return largest;
}

double upcycling_error(const ModelConfig& dense, const UpcycleSpec& spec,
                       DType dtype = DType::kF32) {
  const ScratchFolder scratch;
  const auto source = save_random(scratch, dense, dtype);
  upcycle({.source = source,
           .target = scratch / "experts",
           .dense = dense,
           .spec = spec,
           .state = "{}",
           .options = {}});
  const ModelConfig model = upcycled_model(dense, spec);
  EXPECT_EQ(model.num_moe_layers() > 0, true);
  return largest_error(logits_of(scratch / "experts", model, dtype),
                       logits_of(source, dense, dtype), dense.vocab_size);
}

struct Case {
  int64_t copies = 0;
  int64_t granularity = 0;
  int64_t top_k = 0;
};
constexpr Case kCases[] = {{1, 1, 1}, {2, 1, 1}, {8, 1, 2}, {5, 1, 3}, {2, 2, 2},  {4, 2, 4},
                           {8, 8, 8}, {3, 3, 6}, {5, 4, 4}, {2, 6, 6}, {3, 16, 48}};

TEST(Upcycling, FirstForwardIsTheDenseModelsWithNormalizedProbabilities) {
  for (const auto& [copies, granularity, top_k] : kCases) {
    SCOPED_TRACE(fmt::format("E{}G{}T{}", copies, granularity, top_k));
    EXPECT_LT(upcycling_error(dense_model(), {.copies = copies,
                                              .granularity = granularity,
                                              .top_k = top_k,
                                              .router_deviation = 1.0}),
              2e-6);
  }
}

TEST(Upcycling, FirstForwardIsTheDenseModelsWithASoftmaxOverAllExperts) {
  for (const auto& [copies, granularity, top_k] : kCases) {
    SCOPED_TRACE(fmt::format("E{}G{}T{}", copies, granularity, top_k));
    EXPECT_LT(
        upcycling_error(
            dense_model(),
            {.copies = copies, .granularity = granularity, .top_k = top_k, .normalize = false}),
        2e-5);
  }
}

/// The test above would pass with a router that is far from uniform if probabilities did not
/// matter.
TEST(Upcycling, ASoftmaxOverAllExpertsNeedsANearlyUniformRouter) {
  EXPECT_GT(
      upcycling_error(
          dense_model(),
          {.copies = 4, .granularity = 2, .top_k = 4, .normalize = false, .router_deviation = 1.0}),
      1e-2);
}

TEST(Upcycling, KeepsTheModelsKindOfMlpAndSomeLayersDense) {
  ModelConfig plain = dense_model();
  plain.activation = Activation::kGelu;
  plain.tie_embeddings = false;
  EXPECT_LT(upcycling_error(plain, {.copies = 4, .granularity = 3, .top_k = 3}), 2e-6);
  EXPECT_LT(upcycling_error(
                dense_model(),
                {.copies = 4, .granularity = 2, .top_k = 2, .first_dense_layers = 1, .every = 2}),
            2e-6);
  ModelConfig biased = dense_model();
  biased.qkv_bias = biased.output_bias = true;
  biased.qk_norm = QkNorm::kHead;
  EXPECT_LT(upcycling_error(biased, {.copies = 2, .granularity = 2, .top_k = 2}), 2e-6);
}

TEST(Upcycling, LeavesPredictionOut) {
  ModelConfig dense = dense_model();
  dense.mtp_layers = 1;
  const UpcycleSpec spec = {.copies = 2, .granularity = 2, .top_k = 2};
  EXPECT_EQ(upcycled_model(dense, spec).mtp_layers, 0);
  EXPECT_LT(upcycling_error(dense, spec), 2e-6);
}

TEST(Upcycling, WorksInBf16) {
  EXPECT_LT(
      upcycling_error(dense_model(), {.copies = 4, .granularity = 2, .top_k = 4}, DType::kBF16),
      2e-2);
}

TEST(Upcycling, AResultInTheShapeOfAFamilyExportsAsOne) {
  const ModelConfig model =
      upcycled_model(dense_model(), {.copies = 4, .granularity = 2, .top_k = 4});
  EXPECT_EQ(find_family_for(model).model_type, "mixtral");
}

TEST(Upcycling, RefusesWhatDoesNotDivide) {
  const auto error_of = [](const ModelConfig& model, const UpcycleSpec& spec) -> std::string {
    try {
      upcycled_model(model, spec);
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(error_of(dense_model(), {.copies = 2, .granularity = 5, .top_k = 5}),
              HasSubstr("48 is not divisible by the granularity 5: 48 = 9 * 5 + 3"));
  EXPECT_THAT(error_of(dense_model(), {.copies = 4, .granularity = 4, .top_k = 6}),
              HasSubstr("the nearest are 4 and 8"));
  EXPECT_THAT(error_of(dense_model(), {.copies = 2, .granularity = 2, .top_k = 6}),
              HasSubstr("top-k 6 exceeds the 2 * 2 = 4 experts"));
  EXPECT_THAT(error_of(dense_model(), {.copies = 0}), HasSubstr("at least 1"));
  EXPECT_THAT(error_of(dense_model(), {.first_dense_layers = 3}), HasSubstr("leave none"));
  ModelConfig model = dense_model();
  model.mlp_bias = true;
  EXPECT_THAT(error_of(model, {}), HasSubstr("biases"));
  model = ModelConfig{};
  EXPECT_THAT(error_of(model, {}), HasSubstr("experts already"));
}

}  // namespace
}  // namespace tessera

// Every family of options has programs that a GPU's kernels take. No GPU is needed.
#include <gtest/gtest.h>

#include "model/forward_model.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/planned_rank.h"
#include "train/testing/option_families.h"

namespace tessera {
namespace {

class PlannedOptions : public ::testing::TestWithParam<testing::OptionFamily> {
 protected:
  void SetUp() override {
    if (!built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  }
  static Settings settings(Precision precision) {
    Settings settings = testing::settings_of(GetParam());
    settings.run.device = DeviceChoice::kCuda;
    settings.train.precision = precision;
    return settings;
  }
};

TEST_P(PlannedOptions, Train) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const PlannedRank planned = plan_rank(settings(precision), 0, 1);
    EXPECT_FALSE(planned.model.device().is_host());
    EXPECT_GT(planned.model.activation_bytes().total(), 0);
  }
}

TEST_P(PlannedOptions, Generate) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const Settings own = settings(precision);
    const Backend gpu = make_planned_cuda_backend();
    for (const int64_t num_tokens : {1, 7})
      plan_forward(own.model, {.num_tokens = num_tokens, .dtype = own.train.dtype()},
                   ForwardGoal::kLogits, gpu, CacheShape{.capacity = 16});
    plan_forward(own.model, {.num_tokens = 16, .sequence_length = 16, .dtype = own.train.dtype()},
                 ForwardGoal::kLoss, gpu, std::nullopt);
  }
}

std::string name_of(const ::testing::TestParamInfo<testing::OptionFamily>& info) {
  return std::string(info.param.name);
}

INSTANTIATE_TEST_SUITE_P(All, PlannedOptions, ::testing::ValuesIn(testing::option_families()),
                         name_of);

}  // namespace
}  // namespace tessera

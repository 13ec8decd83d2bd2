// Every family of options has programs that a GPU's kernels take. No GPU is needed.
#include <gtest/gtest.h>

#include "core/testing/case_share.h"
#include "model/run/forward_model.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/memory/planned_rank.h"
#include "train/setup/device_overhead.h"
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
    for (const int64_t num_tokens : {1, 7}) {
      if (own.model.moe.experts_choose()) break;  // refused
      plan_forward(own.model, {.num_tokens = num_tokens, .dtype = own.train.dtype()},
                   ForwardGoal::kLogits, gpu, CacheShape{.capacity = 16});
    }
    plan_forward(own.model, {.num_tokens = 16, .sequence_length = 16, .dtype = own.train.dtype()},
                 ForwardGoal::kLoss, gpu, std::nullopt);
  }
}

/// What NCCL and graphs take is counted where there are any.
TEST(PlannedOverhead, CountsGroupsAndGraphs) {
  if (!built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  Settings settings = testing::settings_of(testing::option_families()[0]);
  settings.run.device = DeviceChoice::kCuda;
  settings.train.global_batch = 4 * settings.train.micro_batch;
  const auto overhead = [&](int64_t num_ranks) {
    const PlannedRank planned = plan_rank(settings, 0, num_ranks);
    return predict_overhead(settings, planned.layout, planned.model, planned.backend);
  };
  EXPECT_EQ(overhead(1).communication, 0);
  const int64_t graphs = overhead(1).graphs;
  EXPECT_GT(graphs, 0);
  const int64_t data_parallel = overhead(2).communication;
  EXPECT_GT(data_parallel, 0);
  const PlannedRank made = plan_rank(settings, 0, 2);
  const int64_t more =
      predict_overhead(settings, made.layout, made.model, made.backend, true).communication;
  EXPECT_GT(more, 0);
  EXPECT_LT(more, data_parallel);
  settings.parallel.layout.ep = 2;
  const int64_t two_ranks = overhead(2).communication;
  EXPECT_GT(two_ranks, data_parallel);
  settings.parallel.layout.ep = 4;  // buffers for two ranks more
  EXPECT_GT(overhead(4).communication - two_ranks, int64_t{2} * 384 << 20);
  settings.parallel.layout.ep = 1;
  settings.model.num_layers = 128;
  EXPECT_GT(overhead(1).graphs, 10 * graphs);
  settings.run.cuda_graphs = GraphMode::kOff;
  EXPECT_EQ(overhead(1).graphs, 0);
}

std::string name_of(const ::testing::TestParamInfo<testing::OptionFamily>& info) {
  return std::string(info.param.name);
}

INSTANTIATE_TEST_SUITE_P(All, PlannedOptions,
                         ::testing::ValuesIn(testing::share_of_cases(testing::option_families(),
                                                                     0)),
                         name_of);

}  // namespace
}  // namespace tessera

#include "ops/balance/balance.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/testing/owning_check.h"

namespace tessera {
namespace {

using testing::GpuTest;
using testing::OperatorInputs;
using testing::OwningCheck;

class BalanceCuda : public GpuTest {};

TEST_F(BalanceCuda, Statistics) {
  Random random(3, 1);
  for (const int64_t num_tokens : {0, 1, 100, 2111}) {
    for (const int64_t num_experts : {1, 8, 100, 256, 1024}) {
      const auto score = static_cast<ScoreFunction>(random.next_below(3));
      const auto segments = static_cast<int64_t>(1 + random.next_below(7));
      const BalanceStatisticsSpec spec{.num_experts = num_experts,
                                       .top_k = std::min<int64_t>(num_experts, 6),
                                       .score = score,
                                       .num_segments = segments};
      SCOPED_TRACE(fmt::format("T={} {}", num_tokens, make_balance_statistics(spec)->attributes()));
      OwningCheck check;
      check.seed = 5;
      check.dtypes = {DType::kF32};
      std::vector<int32_t> idx, segment;
      for (int64_t t = 0; t < num_tokens; ++t) {
        segment.push_back(static_cast<int32_t>(random.next_below(static_cast<uint64_t>(segments))));
        for (int64_t k = 0; k < spec.top_k; ++k)
          idx.push_back(
              static_cast<int32_t>(random.next_below(static_cast<uint64_t>(num_experts + 1))) - 1);
      }
      check.give("idx", testing::tensor_of_i32({num_tokens, spec.top_k}, idx));
      check.give("segments", testing::tensor_of_i32({num_tokens}, segment));
      testing::check_operator_on_gpu(
          make_balance_statistics(spec),
          [&](DType /*dtype*/) {
            return OperatorInputs{.names = {"x", "idx", "segments"},
                                  .types = {{DType::kF32, {num_tokens, num_experts}},
                                            {DType::kI32, {num_tokens, spec.top_k}},
                                            {DType::kI32, {num_tokens}}}};
          },
          {BalanceOutput::kScoreSums}, cpu(), gpu(), check);
    }
  }
}

TEST_F(BalanceCuda, TinyStatistics) {
  const BalanceStatisticsSpec spec{.num_experts = 40, .top_k = 2, .num_segments = 3};
  OwningCheck check;
  check.dtypes = {DType::kF32};
  check.once = true;
  std::vector<int32_t> idx, segment;
  for (int32_t t = 0; t < 67; ++t) {  // the second segment has no tokens
    segment.push_back(t < 30 ? 0 : 2);
    idx.insert(idx.end(), {t % 40, t % 3 == 0 ? -1 : (t + 7) % 40});
  }
  check.give("idx", testing::tensor_of_i32({67, 2}, idx));
  check.give("segments", testing::tensor_of_i32({67}, segment));
  testing::check_operator_on_gpu(
      make_balance_statistics(spec),
      [](DType /*dtype*/) {
        return OperatorInputs{
            .names = {"x", "idx", "segments"},
            .types = {{DType::kF32, {67, 40}}, {DType::kI32, {67, 2}}, {DType::kI32, {67}}}};
      },
      {BalanceOutput::kScoreSums}, cpu(), gpu(), check);
}

TEST_F(BalanceCuda, TinyLoss) {
  OwningCheck check;
  check.dtypes = {DType::kF32};
  check.once = true;
  std::vector<float> counts(3 * 40);
  for (size_t i = 0; i < counts.size(); ++i)  // a segment without tokens
    counts[i] = i / 40 == 1 ? 0.0F : static_cast<float>(i * 7 % 11);
  check.give("counts", testing::tensor_of({3, 40}, counts));
  testing::check_operator_on_gpu(
      make_balance_loss({.total_tokens = 300, .group_size = 8}),
      [](DType /*dtype*/) {
        return OperatorInputs{.names = {"counts", "x"},
                              .types = {{DType::kF32, {3, 40}}, {DType::kF32, {3, 40}}}};
      },
      {0}, cpu(), gpu(), check);
}

TEST_F(BalanceCuda, TinyRunningCounts) {
  testing::check_operator_on_gpu(
      make_running_counts(2),
      [](DType /*dtype*/) {
        return OperatorInputs{.names = {"counts", "earlier"},
                              .types = {{DType::kF32, {3, 40}}, {DType::kF32, {40}}}};
      },
      {}, cpu(), gpu(), {.tolerance_f32 = 1e-6, .dtypes = {DType::kF32}, .once = true});
}

/// More segments than a grid has rows in its second dim.
TEST_F(BalanceCuda, StatisticsOfManySegments) {
  constexpr int32_t kSegments = 70'001;
  const BalanceStatisticsSpec spec{.num_experts = 4, .top_k = 1, .num_segments = kSegments};
  OwningCheck check;
  check.dtypes = {DType::kF32};
  check.give("idx", testing::tensor_of_i32({3, 1}, {2, 0, 3}));
  check.give("segments", testing::tensor_of_i32({3}, {0, 65'536, kSegments - 1}));
  testing::check_operator_on_gpu(
      make_balance_statistics(spec),
      [&](DType /*dtype*/) {
        return OperatorInputs{
            .names = {"x", "idx", "segments"},
            .types = {{DType::kF32, {3, 4}}, {DType::kI32, {3, 1}}, {DType::kI32, {3}}}};
      },
      {BalanceOutput::kScoreSums}, cpu(), gpu(), check);
}

TEST_F(BalanceCuda, Loss) {
  Random random(4, 1);
  for (const int64_t num_experts : {1, 8, 96, 1024}) {
    for (const int64_t segments : {1, 5}) {
      const BalanceLossSpec spec{.total_tokens = 300,
                                 .group_size = num_experts % 8 == 0 ? 8 : 1,
                                 .has_prior_counts = segments == 1};
      SCOPED_TRACE(fmt::format("E={} G={}", num_experts, segments));
      OwningCheck check;
      check.seed = 6;
      check.dtypes = {DType::kF32};
      std::vector<float> counts, prior;
      for (int64_t i = 0; i < segments * num_experts; ++i)  // a segment without tokens
        counts.push_back(i / num_experts == 2 ? 0.0F : static_cast<float>(random.next_below(90)));
      for (int64_t e = 0; e < num_experts; ++e)
        prior.push_back(static_cast<float>(random.next_below(90)));
      check.give("counts", testing::tensor_of({segments, num_experts}, counts));
      check.give("prior", testing::tensor_of({num_experts}, prior));
      testing::check_operator_on_gpu(
          make_balance_loss(spec),
          [&](DType /*dtype*/) {
            OperatorInputs inputs{.names = {"counts", "x"},
                                  .types = {{DType::kF32, {segments, num_experts}},
                                            {DType::kF32, {segments, num_experts}}}};
            if (spec.has_prior_counts) {
              inputs.names.push_back("prior");
              inputs.types.push_back({DType::kF32, {num_experts}});
            }
            return inputs;
          },
          {0}, cpu(), gpu(), check);
    }
  }
}

TEST_F(BalanceCuda, RunningCounts) {
  for (const auto& [rank, num_ranks, num_experts] :
       {std::tuple{0, 1, 1}, std::tuple{2, 3, 40}, std::tuple{1, 4, 300}}) {
    const int64_t ranks = num_ranks;
    const int64_t experts = num_experts;
    testing::GpuCheck check;
    check.dtypes = {DType::kF32};
    check.tolerance_f32 = 1e-6;
    testing::check_operator_on_gpu(
        make_running_counts(rank),
        [=](DType /*dtype*/) {
          return OperatorInputs{
              .names = {"counts", "earlier"},
              .types = {{DType::kF32, {ranks, experts}}, {DType::kF32, {experts}}}};
        },
        {}, cpu(), gpu(), check);
  }
}

}  // namespace
}  // namespace tessera

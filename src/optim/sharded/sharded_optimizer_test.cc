#include "optim/sharded/sharded_optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <mutex>

#include "optim/sharded/replica_testing.h"

namespace tessera {
namespace {

constexpr int64_t kNumSteps = 3;

/// One rank of a run.
struct Rank {
  Rank(const SpreadModel& model, World& world, const OptimizerOptions& options,
       const ShardingOptions& sharding, int64_t gap_bytes = 0)
      : part(model, world.rank(), gap_bytes) {
    for (const ReplicaCut& cut : model.cuts) groups.push_back(cut.connect(world));
    optimizer = std::make_unique<ShardedOptimizer>(groups, part.parameters,
                                                   world.make_world_group(), options, sharding);
  }

  /// Gradients become ready from the last parameter to the first, except for some that change
  /// places, and some that nobody declares.
  StepResult step(const StepInput& input, Random& random) {
    part.make_gradients(input.step_idx);
    for (size_t i = 0; i < part.parameters.size(); ++i) optimizer->wait_weights(i);
    for (size_t i = part.parameters.size(); i-- > 0;) {
      if (random.next_below(8) != 0) optimizer->ready(i);
    }
    return optimizer->step(input);
  }

  RankModel part;
  std::vector<ReplicaGroup> groups;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

void expect_slices_equal(const std::vector<NamedSlice>& slices,
                         const std::vector<NamedTensor>& expected) {
  for (const NamedSlice& slice : slices) {
    const auto found = std::ranges::find(expected, slice.name, &NamedTensor::name);
    ASSERT_NE(found, expected.end()) << slice.name;
    EXPECT_TRUE(same_bits(slice.tensor, part_of(found->tensor, slice.slice))) << slice.name;
  }
}

std::vector<NamedTensor> named_weights(const SpreadModel& model, const ReferenceModel& reference) {
  std::vector<NamedTensor> result;
  for (size_t i = 0; i < model.parameters.size(); ++i)
    result.push_back({model.parameters[i].name, reference.weights[i]});
  return result;
}

ShardingOptions random_sharding(Random& random) {
  return {.shard_state = random.next_below(4) != 0,
          .bucket_bytes = static_cast<int64_t>(random.next_below(3000)),
          .reduction = {.compression = random.next_below(2) == 0 ? GradientCompression::kNone
                                                                 : GradientCompression::kBf16,
                        .buckets_in_flight = static_cast<int64_t>(1 + random.next_below(3)),
                        .piece_bytes = static_cast<int64_t>(random.next_below(400))}};
}

// Without clipping nothing depends on the order in which the norm is summed, so every bit agrees.
TEST(ShardedOptimizer, ThreeStepsAreThoseOfTheWholeModelBitwise) {
  Random random(17, 0);
  for (int trial = 0; trial < 80; ++trial) {
    const SpreadModel model = random_model(random);
    const ShardingOptions sharding = random_sharding(random);
    const int64_t gap_bytes = random.next_below(2) == 0 ? 0 : 64;
    const OptimizerOptions options = random_state(random);
    SCOPED_TRACE(fmt::format("trial {}", trial));
    ReferenceModel reference(model, options);
    std::vector<double> norms;
    for (int64_t step = 0; step < kNumSteps; ++step) {
      const StepInput input = {.step_idx = step, .lr = 0.01, .grad_scale = 0.5};
      norms.push_back(reference.step(input, sharding.reduction.compression).grad_norm);
    }
    run_thread_world(model.num_ranks, [&](World& world) {
      Rank rank(model, world, options, sharding, gap_bytes);
      Random order(static_cast<uint64_t>(trial), static_cast<uint64_t>(world.rank()));
      for (int64_t step = 0; step < kNumSteps; ++step) {
        const StepInput input = {.step_idx = step, .lr = 0.01, .grad_scale = 0.5};
        const StepResult result = rank.step(input, order);
        const double norm = norms[step];
        EXPECT_NEAR(result.grad_norm, norm, 1e-12 * norm);
      }
      rank.optimizer->wait_all_weights();
      expect_slices_equal(rank.optimizer->weight_slices(HeldPart::kHeld),
                          named_weights(model, reference));
      expect_slices_equal(rank.optimizer->state_slices(HeldPart::kHeld),
                          reference.optimizer->state());
    });
  }
}

TEST(ShardedOptimizer, OneRankIsOptimizerBitwiseWithClipping) {
  Random random(18, 0);
  for (int trial = 0; trial < 20; ++trial) {
    SpreadModel model = random_model(random);
    model.num_ranks = 1;
    for (ReplicaCut& cut : model.cuts) cut = {.name = cut.name, .groups = {{0}}};
    ReferenceModel reference(model, {});
    const auto world = make_single_world();
    Rank rank(model, *world, {}, random_sharding(random));
    for (int64_t step = 0; step < kNumSteps; ++step) {
      const StepInput input = {.step_idx = step, .lr = 0.01, .max_grad_norm = 1.0};
      const StepResult expected = reference.step(input, GradientCompression::kNone);
      const StepResult result = rank.step(input, random);
      EXPECT_EQ(result.grad_norm, expected.grad_norm);
      EXPECT_EQ(result.clip_factor, expected.clip_factor);
    }
    expect_slices_equal(rank.optimizer->weight_slices(HeldPart::kHeld),
                        named_weights(model, reference));
    expect_slices_equal(rank.optimizer->state_slices(HeldPart::kHeld),
                        reference.optimizer->state());
  }
}

/// Two cuts of four ranks: dense parameters everywhere, experts on pairs; the dense ones in nodes
/// of `inner_size`.
SpreadModel fixed_model(int64_t inner_size = 1, DType dtype = DType::kBF16) {
  return {.num_ranks = 4,
          .cuts = {{.name = "dense", .groups = {{0, 1, 2, 3}}, .inner_size = inner_size},
                   {.name = "expert", .groups = {{0, 2}, {1, 3}}}},
          .parameters = {{.name = "embedding", .global = {61, 24}, .dtype = dtype, .cut = 0},
                         {.name = "norm", .global = {24}, .dtype = DType::kF32, .cut = 0},
                         {.name = "fc1", .global = {96, 24}, .dtype = dtype, .cut = 1},
                         {.name = "fc2", .global = {40, 24}, .dtype = dtype, .cut = 1},
                         {.name = "head", .global = {61, 24}, .dtype = dtype, .cut = 0}},
          .seed = 3};
}

TEST(ShardedOptimizer, ClippedStepsAgreeToRounding) {
  for (const bool shard_state : {true, false}) {
    const SpreadModel model = fixed_model(2, DType::kF32);
    ReferenceModel reference(model, {});
    for (int64_t step = 0; step < kNumSteps; ++step)
      reference.step({.step_idx = step, .lr = 0.01, .max_grad_norm = 2.0},
                     GradientCompression::kNone);
    run_thread_world(4, [&](World& world) {
      Rank rank(model, world, {}, {.shard_state = shard_state, .bucket_bytes = 4000});
      Random order(1, static_cast<uint64_t>(world.rank()));
      for (int64_t step = 0; step < kNumSteps; ++step) {
        const StepResult result =
            rank.step({.step_idx = step, .lr = 0.01, .max_grad_norm = 2.0}, order);
        EXPECT_LT(result.clip_factor, 1.0);
      }
      rank.optimizer->wait_all_weights();
      for (size_t i = 0; i < model.parameters.size(); ++i) {
        const ReplicatedParameter& p = rank.part.parameters[i];
        const OwnedTensor expected = part_of(reference.weights[i], p.slice);
        for (int64_t j = 0; j < expected.get().num_elements(); ++j)
          EXPECT_NEAR(p.parameter.weight.as<float>()[j], expected.get().as<float>()[j], 1e-6);
      }
    });
  }
}

TEST(ShardedOptimizer, AnyRanksNonFiniteGradientStopsAll) {
  const SpreadModel model = fixed_model();
  run_thread_world(4, [&](World& world) {
    Rank rank(model, world, {}, {});
    Random order(1, static_cast<uint64_t>(world.rank()));
    rank.step({.lr = 0.01}, order);
    rank.optimizer->wait_all_weights();
    rank.part.make_gradients(1);
    if (world.rank() == 2)
      rank.part.parameters[2].parameter.grad.as<float>()[5] =
          std::numeric_limits<float>::infinity();
    const std::vector<NamedSlice> state = rank.optimizer->state_slices(HeldPart::kHeld);
    std::vector<std::vector<float>> before;
    for (const NamedSlice& slice : state) {
      const auto values = slice.tensor.span<float>();
      before.emplace_back(values.begin(), values.end());
    }
    const StepResult result = rank.optimizer->step({.step_idx = 1, .lr = 0.01});
    EXPECT_FALSE(result.updated);
    EXPECT_FALSE(std::isfinite(result.grad_norm));
    for (size_t i = 0; i < state.size(); ++i)
      EXPECT_TRUE(std::ranges::equal(state[i].tensor.span<float>(), before[i]));
    EXPECT_TRUE(rank.step({.step_idx = 2, .lr = 0.01}, order).updated);
    rank.optimizer->wait_all_weights();
  });
}

TEST(ShardedOptimizer, OwnedSlicesNameEveryElementOnce) {
  Random random(19, 0);
  for (int trial = 0; trial < 30; ++trial) {
    const SpreadModel model = random_model(random);
    const ShardingOptions sharding = random_sharding(random);
    std::vector<OwnedTensor> weight_counts, m_counts;
    for (const SpreadParameter& p : model.parameters) {
      weight_counts.emplace_back(DType::kF32, p.global);
      m_counts.emplace_back(DType::kF32, p.global);
    }
    const auto count = [&](const NamedSlice& slice, const std::string& suffix,
                           const std::vector<OwnedTensor>& counts) {
      for (size_t i = 0; i < counts.size(); ++i) {
        if (slice.name != model.parameters[i].name + suffix) continue;
        const OwnedTensor part = part_of(counts[i], slice.slice);
        for (float& c : part.get().span<float>()) c += 1;
        copy_slice_into(slice.slice, part, counts[i]);
      }
    };
    std::mutex mutex;
    run_thread_world(model.num_ranks, [&](World& world) {
      const Rank rank(model, world, {}, sharding);
      const std::scoped_lock lock(mutex);
      for (const NamedSlice& s : rank.optimizer->weight_slices(HeldPart::kOwned))
        count(s, "", weight_counts);
      for (const NamedSlice& s : rank.optimizer->state_slices(HeldPart::kOwned))
        count(s, ".m", m_counts);
    });
    for (size_t i = 0; i < model.parameters.size(); ++i) {
      for (const float c : weight_counts[i].get().span<float>()) EXPECT_EQ(c, 1.0F);
      for (const float c : m_counts[i].get().span<float>()) EXPECT_EQ(c, 1.0F);
    }
  }
}

// What a checkpoint does between two layouts: owned slices of one fill the held slices of the
// other.
TEST(ShardedOptimizer, StateMovesToAnotherNumberOfRanks) {
  const SpreadModel four = fixed_model();
  SpreadModel three = four;
  three.num_ranks = 3;
  three.cuts = {{.name = "dense", .groups = {{0, 1, 2}}},
                {.name = "expert", .groups = {{0, 1, 2}}}};
  ReferenceModel saved(four, {});
  run_thread_world(4, [&](World& world) {
    Rank rank(four, world, {}, {.bucket_bytes = 4000});
    Random order(1, 1);
    rank.step({.lr = 0.01}, order);
    rank.optimizer->wait_all_weights();
    for (const NamedSlice& s : rank.optimizer->state_slices(HeldPart::kOwned)) {
      const auto state = saved.optimizer->state();
      copy_slice_into(s.slice, s.tensor,
                      std::ranges::find(state, s.name, &NamedTensor::name)->tensor);
    }
  });
  saved.optimizer->round_masters();
  run_thread_world(3, [&](World& world) {
    Rank rank(three, world, {}, {.bucket_bytes = 9000});
    const auto state = saved.optimizer->state();
    for (const NamedSlice& s : rank.optimizer->state_slices(HeldPart::kHeld))
      copy_slice_from(s.slice, std::ranges::find(state, s.name, &NamedTensor::name)->tensor,
                      s.tensor);
    rank.optimizer->round_masters();
    for (size_t i = 0; i < three.parameters.size(); ++i) {
      if (three.parameters[i].dtype != DType::kBF16) continue;
      const ReplicatedParameter& p = rank.part.parameters[i];
      EXPECT_TRUE(same_bits(p.parameter.weight, part_of(saved.weights[i], p.slice)));
    }
  });
}

TEST(ShardedOptimizer, StateBytesArePredicted) {
  Random random(20, 0);
  for (int trial = 0; trial < 40; ++trial) {
    const SpreadModel model = random_model(random);
    const ShardingOptions sharding = random_sharding(random);
    const OptimizerOptions options = random_state(random);
    run_thread_world(model.num_ranks, [&](World& world) {
      const Rank rank(model, world, options, sharding);
      std::vector<ReplicaPlace> places;
      for (const ReplicaGroup& group : rank.groups) places.push_back({group.size(), group.rank()});
      std::vector<ReplicatedParameter> types = rank.part.parameters;
      for (ReplicatedParameter& p : types)
        p.parameter.weight.data = p.parameter.grad.data = nullptr;
      int64_t bytes = 0;
      for (const NamedSlice& state : rank.optimizer->state_slices(HeldPart::kHeld))
        bytes += align_up(state.tensor.num_bytes());
      EXPECT_EQ(ShardedOptimizer::state_bytes(places, types, sharding, options.formats), bytes);
      EXPECT_EQ(rank.optimizer->state_bytes(), bytes);
      EXPECT_EQ(ShardedOptimizer::workspace_bytes(places, types, sharding, options),
                rank.optimizer->workspace_bytes());
    });
  }
}

/// The elements of the model's parameters of a cut on one rank.
int64_t elements_of_cut(const SpreadModel& model, size_t cut, int64_t rank) {
  int64_t total = 0;
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    if (model.parameters[i].cut == cut) total += model.slice(i, rank).shape().num_elements();
  }
  return total;
}

struct OwnedCount {
  int64_t elements = 0;
  int64_t weight_bytes = 0;
};

OwnedCount count_owned(const Rank& rank, const SpreadModel& model, size_t cut) {
  OwnedCount count;
  for (const NamedSlice& s : rank.optimizer->weight_slices(HeldPart::kOwned)) {
    const auto p = std::ranges::find(model.parameters, s.name, &SpreadParameter::name);
    if (p->cut != cut) continue;
    count.elements += s.tensor.num_elements();
    count.weight_bytes += s.tensor.num_bytes();
  }
  return count;
}

// With n elements on each of P replicas, of which this rank owns s: a reduce-scatter sends 4 (n -
// s) bytes, the exchange of BF16 2 (n - s), and the gathering (P - 1) times the owned weights'
// bytes.
TEST(ShardedOptimizer, SendsWhatTheFormulasSay) {
  for (const auto compression : {GradientCompression::kNone, GradientCompression::kBf16}) {
    for (const int64_t gap_bytes : {0, 64}) {
      const SpreadModel model = fixed_model();
      run_thread_world(4, [&](World& world) {
        Rank rank(model, world, {},
                  {.bucket_bytes = 4000, .reduction = {.compression = compression}}, gap_bytes);
        Random order(1, 1);
        rank.step({.lr = 0.01}, order);
        rank.optimizer->wait_all_weights();
        const bool rounded = compression == GradientCompression::kBf16;
        for (size_t cut = 0; cut < 2; ++cut) {
          const std::string& name = model.cuts[cut].name;
          const OwnedCount own = count_owned(rank, model, cut);
          const int64_t sent = elements_of_cut(model, cut, world.rank()) - own.elements;
          const auto count = [&](CommKind kind) { return world.statistics().count(name, kind); };
          EXPECT_EQ(count(CommKind::kReduceScatter).bytes, rounded ? 0 : 4 * sent);
          EXPECT_EQ(count(CommKind::kAllToAll).bytes, rounded ? 2 * sent : 0);
          EXPECT_EQ(count(CommKind::kAllGather).bytes, (cut == 0 ? 3 : 1) * own.weight_bytes);
        }
        EXPECT_EQ(world.statistics().count("world", CommKind::kAllGather).bytes, 3 * 8);
      });
    }
  }
}

// MegaScale-MoE, appendix A.1, with n = d = 2: 4 P (n - 1)/n bytes of gradients within nodes and
// 4 P/n (d - 1)/d between them, and the same of weights; here with the exact bounds of shares.
TEST(ShardedOptimizer, HierarchicalReductionSendsPartsBetweenNodes) {
  const SpreadModel model = fixed_model(2);
  run_thread_world(4, [&](World& world) {
    Rank rank(model, world, {}, {});
    Random order(1, 1);
    rank.step({.lr = 0.01}, order);
    rank.optimizer->wait_all_weights();
    const OwnedCount own = count_owned(rank, model, 0);
    const int64_t all = elements_of_cut(model, 0, world.rank());
    const auto bytes = [&](const std::string& name, CommKind kind) {
      return world.statistics().count(name, kind).bytes;
    };
    const int64_t within = bytes("dense.inner", CommKind::kReduceScatter);
    const int64_t between = bytes("dense.outer", CommKind::kReduceScatter);
    EXPECT_EQ(within + between, 4 * (all - own.elements));
    EXPECT_NEAR(within, 2 * all, 4 * 24);
    EXPECT_NEAR(between, all, 4 * 48);
    EXPECT_EQ(bytes("dense.outer", CommKind::kAllGather), own.weight_bytes);
    EXPECT_NEAR(bytes("dense.inner", CommKind::kAllGather), all, 4 * 48);
  });
}

TEST(ShardedOptimizer, WithoutShardingSendsAsMuchAsAnAllReduce) {
  const SpreadModel model = fixed_model();
  run_thread_world(4, [&](World& world) {
    Rank rank(model, world, {}, {.shard_state = false});
    Random order(1, 1);
    rank.step({.lr = 0.01}, order);
    const OwnedCount own = count_owned(rank, model, 0);
    const int64_t all = elements_of_cut(model, 0, world.rank());
    const CommStatistics& statistics = world.statistics();
    EXPECT_EQ(statistics.count("dense", CommKind::kReduceScatter).bytes, 4 * (all - own.elements));
    EXPECT_EQ(statistics.count("dense", CommKind::kAllGather).bytes, 4 * 3 * own.elements);
  });
}

TEST(ShardedOptimizer, GradientsInOneBufferNeedNoSecondOne) {
  const SpreadModel model = fixed_model(1, DType::kF32);
  const auto staging = [&](World& world, GradientCompression compression, int64_t gap_bytes) {
    const Rank rank(model, world, {}, {.bucket_bytes = 4000, .reduction = {compression, 2}},
                    gap_bytes);
    return rank.optimizer->staging_bytes();
  };
  run_thread_world(4, [&](World& world) {
    EXPECT_EQ(staging(world, GradientCompression::kNone, 0), 0);
    // The sum of a share of the largest bucket, for two buckets of both groups: a quarter of the
    // embedding, and half of fc1's 48 rows here.
    EXPECT_LE(staging(world, GradientCompression::kBf16, 0), 2 * 4 * (16 * 24 + 16 + 24 * 24 + 16));
    // Scattered gradients are packed bucket by bucket; so are the weights, which are F32 here.
    EXPECT_LE(staging(world, GradientCompression::kNone, 64), 2 * 2 * 2 * 4096);
  });
}

TEST(ShardedOptimizer, StagingIsPredicted) {
  Random random(23, 0);
  for (int trial = 0; trial < 40; ++trial) {
    const SpreadModel model = random_model(random);
    const ShardingOptions sharding = random_sharding(random);
    const int64_t gap_bytes = random.next_below(2) == 0 ? 0 : 64;
    run_thread_world(model.num_ranks, [&](World& world) {
      const Rank rank(model, world, {}, sharding, gap_bytes);
      EXPECT_EQ(rank.optimizer->staging_bytes(),
                ShardedOptimizer::count_staging(rank.groups, rank.part.parameters, sharding))
          << "trial " << trial;
    });
  }
}

/// A parameter of any size is reduced through staging of one size, with as many bytes on their way.
TEST(ShardedOptimizer, StagingDoesNotGrowWithAParameter) {
  constexpr int64_t kPieceBytes = 1200;
  for (const int64_t rows : {100, 1000, 10000}) {
    const SpreadModel model = {.num_ranks = 4,
                               .cuts = {{.name = "dense", .groups = {{0, 1, 2, 3}}}},
                               .parameters = {{.name = "embedding", .global = {rows, 8}}},
                               .seed = 5};
    run_thread_world(4, [&](World& world) {
      Rank rank(
          model, world, {},
          {.bucket_bytes = 4000,
           .reduction = {.compression = GradientCompression::kBf16, .piece_bytes = kPieceBytes}});
      // Two under way, each with room for what it sends and what it receives.
      EXPECT_LE(rank.optimizer->staging_bytes(), 2 * 2 * align_up(kPieceBytes));
      Random order(1, 1);
      rank.step({.lr = 0.01}, order);
      const CommCount sent = world.statistics().count("dense", CommKind::kAllToAll);
      EXPECT_EQ(sent.bytes, 2 * 3 * rows / 4 * 8);
      EXPECT_EQ(sent.calls, (rows / 4 * 8 + 199) / 200);
    });
  }
}

TEST(ShardedOptimizer, BucketsStartBeforeTheBackwardPassEnds) {
  const SpreadModel model = fixed_model();
  run_thread_world(4, [&](World& world) {
    Rank rank(model, world, {}, {.bucket_bytes = 1});
    rank.part.make_gradients(0);
    const auto calls = [&] {
      return world.statistics().count("dense", CommKind::kReduceScatter).calls;
    };
    rank.optimizer->ready(1);
    EXPECT_EQ(calls(), 0) << "the head's bucket comes first";
    rank.optimizer->ready(4);
    EXPECT_EQ(calls(), 2);
    rank.optimizer->ready(0);
    EXPECT_EQ(calls(), 3);
    EXPECT_THROW(rank.optimizer->ready(0), InternalError);
    rank.optimizer->finish_gradients();
    EXPECT_THROW(rank.optimizer->ready(0), InternalError);
    rank.optimizer->step({.lr = 0.01});
    EXPECT_EQ(world.statistics().count("dense", CommKind::kAllGather).calls, 3);
    rank.optimizer->wait_all_weights();
  });
}

TEST(ShardedOptimizer, GradientsOfOwnedRowsAreTheSums) {
  const SpreadModel model = fixed_model(2);
  ReferenceModel reference(model, {});
  reference.step({}, GradientCompression::kBf16);
  std::vector<NamedTensor> sums;
  for (size_t i = 0; i < model.parameters.size(); ++i)
    sums.push_back({model.parameters[i].name, reference.grads[i]});
  run_thread_world(4, [&](World& world) {
    Rank rank(model, world, {}, {.reduction = {.compression = GradientCompression::kBf16}});
    rank.part.make_gradients(0);
    rank.optimizer->finish_gradients();
    expect_slices_equal(rank.optimizer->gradient_slices(), sums);
  });
}

// The error of a sum of P summands, each rounded once with a relative error of at most 2^-8, and of
// its F32 additions. (That the optimizer makes this very sum is shown above.)
TEST(ShardedOptimizer, CompressedSumsErrByOneRoundingOfEachSummand) {
  const SpreadModel model = {.num_ranks = 5,
                             .cuts = {{.name = "dp", .groups = {{0, 1, 2, 3, 4}}}},
                             .parameters = {{.name = "w", .global = {200, 30}}},
                             .seed = 9};
  const std::vector<float> rounded = model.summed_gradient(0, 0, 0, GradientCompression::kBf16);
  std::vector<double> sum(rounded.size());
  std::vector<double> size(rounded.size());
  for (int64_t rank = 0; rank < 5; ++rank) {
    const std::vector<float> values = model.local_gradient(0, rank, 0);
    for (size_t j = 0; j < sum.size(); ++j) {
      sum[j] += values[j];
      size[j] += std::abs(values[j]);
    }
  }
  double total_error = 0;
  for (size_t j = 0; j < sum.size(); ++j) {
    EXPECT_LE(std::abs(rounded[j] - sum[j]), size[j] * (0x1p-8 + 1e-6));
    total_error += rounded[j] - sum[j];
  }
  // Errors of rounding to nearest cancel: their mean is far below one of them.
  EXPECT_LT(std::abs(total_error / static_cast<double>(sum.size())), 2e-4);
}

}  // namespace
}  // namespace tessera

#include "optim/sharded/fully_sharded.h"

#include <gtest/gtest.h>

#include <limits>
#include <mutex>
#include <numeric>

#include "comm/planned_world.h"
#include "optim/sharded/replica_testing.h"

namespace tessera {
namespace {

constexpr int64_t kNumSteps = 3;

/// Full sharding of a SpreadModel: the inner groups of its cuts are the shard groups, so one inner
/// group means no replicas, and inner groups of one rank mean no sharding. Parameters are
/// dealt to modules in the order of the list.
struct Case {
  SpreadModel model;
  std::vector<std::vector<size_t>> modules;
  FullShardingOptions sharding;
  int64_t num_micro_batches = 1;
};

Case random_case(Random& random) {
  Case c = {.model = random_model(random), .modules = {{}}, .sharding = {}};
  for (ReplicaCut& cut : c.model.cuts) {
    const auto size = std::ssize(cut.groups[0]);
    if (cut.inner_size == 1 && random.next_below(3) != 0) cut.inner_size = size;
  }
  for (size_t i = 0; i < c.model.parameters.size(); ++i) {
    if (random.next_below(3) == 0) c.modules.emplace_back();
    c.modules.back().push_back(i);
  }
  c.num_micro_batches = static_cast<int64_t>(1 + random.next_below(2));
  c.sharding.gradient_buffers = static_cast<int64_t>(1 + random.next_below(3));
  if (random.next_below(2) == 0) c.sharding.compression = GradientCompression::kBf16;
  return c;
}

/// Which of SpreadModel's random gradients a micro-batch of a step has.
int64_t draw(const Case& c, int64_t step, int64_t micro_batch) {
  return step * c.num_micro_batches + micro_batch;
}

/// The gradient of a group as full sharding sums it: over the shard group, over micro-batches, over
/// replicas.
std::vector<float> summed_gradient(const Case& c, size_t idx, const std::vector<int64_t>& ranks,
                                   int64_t step) {
  const size_t shard_size = c.model.cuts[c.model.parameters[idx].cut].inner_size;
  const bool rounded = c.sharding.compression == GradientCompression::kBf16 && shard_size > 1;
  std::vector<float> total;
  for (size_t first = 0; first < ranks.size(); first += shard_size) {
    std::vector<float> replica;
    for (int64_t m = 0; m < c.num_micro_batches; ++m) {
      std::vector<float> sum;
      for (size_t i = first; i < first + shard_size; ++i) {
        std::vector<float> values = c.model.local_gradient(idx, ranks[i], draw(c, step, m));
        if (rounded)
          std::ranges::transform(values, values.begin(), [](float v) { return Bf16(v); });
        sum.resize(values.size());
        SpreadModel::add(sum, values);
      }
      replica.resize(sum.size());
      SpreadModel::add(replica, sum);
    }
    total.resize(replica.size());
    SpreadModel::add(total, replica);
  }
  return total;
}

StepResult reference_step(const Case& c, ReferenceModel& reference, const StepInput& input) {
  for (size_t i = 0; i < c.model.parameters.size(); ++i) {
    for (const auto& ranks : c.model.cuts[c.model.parameters[i].cut].groups) {
      std::vector<float> sum = summed_gradient(c, i, ranks, input.step_idx);
      const Slice slice = c.model.slice(i, ranks[0]);
      copy_slice_into(slice, view(std::span(sum), slice.shape()), reference.grads[i]);
    }
  }
  return reference.optimizer->step(input);
}

std::vector<ShardGroup> connect(const SpreadModel& model, World& world) {
  std::vector<ShardGroup> groups;
  for (const ReplicaCut& cut : model.cuts) {
    const ReplicaGroup group = cut.connect(world);
    if (group.inner) {
      groups.push_back({.shard = group.inner, .replicas = group.outer});
    } else {
      groups.push_back({.shard = make_single_communicator(cut.name), .replicas = group.outer});
    }
  }
  return groups;
}

/// Types and slices alone.
std::vector<ReplicatedParameter> parameters_of(const SpreadModel& model, int64_t rank) {
  std::vector<ReplicatedParameter> parameters;
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    const SpreadParameter& p = model.parameters[i];
    const Slice slice = model.slice(i, rank);
    parameters.push_back({{.name = p.name,
                           .weight = {nullptr, p.dtype, slice.shape()},
                           .grad = {nullptr, DType::kF32, slice.shape()},
                           .decay = p.decay,
                           .lr_multiplier = p.lr_multiplier,
                           .matrix_rows = model.matrices(i, rank)},
                          slice,
                          p.cut});
  }
  return parameters;
}

struct Rank {
  Rank(const Case& c, World& world, const OptimizerOptions& options = {})
      : c_(c),
        rank_(world.rank()),
        groups(connect(c.model, world)),
        parameters(parameters_of(c.model, rank_)),
        sharded(groups, parameters, c.modules, world.make_world_group(), options, c.sharding) {
    for (const NamedSlice& s : sharded.weight_slices(HeldPart::kHeld))
      copy_slice_from(s.slice, c.model.initial_weight(index(s.name)), s.tensor);
    sharded.reset_masters();
  }

  size_t index(const std::string& name) const {
    const auto p = std::ranges::find(c_.model.parameters, name, &SpreadParameter::name);
    return static_cast<size_t>(p - c_.model.parameters.begin());
  }

  /// Forward: all whole weights are what the reference has. Backward: gradients come in two parts.
  void micro_batch(int64_t draw_idx, const ReferenceModel& reference) {
    for (size_t m = 0; m < c_.modules.size(); ++m) {
      sharded.gather(m);
      if (m + 1 < c_.modules.size()) sharded.gather(m + 1);
      for (const size_t p : c_.modules[m])
        EXPECT_TRUE(
            same_bits(sharded.weight(p), part_of(reference.weights[p], parameters[p].slice)));
      sharded.release(m);
    }
    for (size_t m = c_.modules.size(); m-- > 0;) {
      for (const size_t p : c_.modules[m])
        accumulate(p, c_.model.local_gradient(p, rank_, draw_idx));
      sharded.reduce(m);
    }
  }

  void accumulate(size_t p, const std::vector<float>& values) {
    const Tensor gradient = sharded.gradient(p);
    EXPECT_EQ(gradient.shape, parameters[p].slice.shape());
    for (size_t j = 0; j < values.size(); ++j) gradient.as<float>()[j] += values[j];
  }

 private:
  const Case& c_;
  int64_t rank_;

 public:
  std::vector<ShardGroup> groups;
  std::vector<ReplicatedParameter> parameters;
  FullySharded sharded;
};

void expect_slices_equal(const std::vector<NamedSlice>& slices,
                         const std::vector<NamedTensor>& expected) {
  for (const NamedSlice& slice : slices) {
    const auto found = std::ranges::find(expected, slice.name, &NamedTensor::name);
    ASSERT_NE(found, expected.end()) << slice.name;
    EXPECT_TRUE(same_bits(slice.tensor, part_of(found->tensor, slice.slice))) << slice.name;
  }
}

// The reference runs on all ranks at once, so that gathered weights are compared in every step.
TEST(FullySharded, ThreeStepsAreThoseOfTheWholeModelBitwise) {
  Random random(31, 0);
  for (int trial = 0; trial < 60; ++trial) {
    const Case c = random_case(random);
    const OptimizerOptions options = random_state(random);
    SCOPED_TRACE(fmt::format("trial {}", trial));
    run_thread_world(c.model.num_ranks, [&](World& world) {
      ReferenceModel reference(c.model, options);
      Rank rank(c, world, options);
      for (int64_t step = 0; step < kNumSteps; ++step) {
        rank.sharded.begin_step();
        for (int64_t m = 0; m < c.num_micro_batches; ++m)
          rank.micro_batch(draw(c, step, m), reference);
        const StepInput input = {.step_idx = step, .lr = 0.01};
        const double norm = reference_step(c, reference, input).grad_norm;
        EXPECT_NEAR(rank.sharded.step(input).grad_norm, norm, 1e-12 * norm);
      }
      expect_slices_equal(rank.sharded.state_slices(HeldPart::kHeld), reference.optimizer->state());
    });
  }
}

/// Dense parameters sharded over pairs of four ranks, and those replicated; experts over the other
/// pairs.
Case fixed_case() {
  return {.model =
              {.num_ranks = 4,
               .cuts = {{.name = "dense", .groups = {{0, 1, 2, 3}}, .inner_size = 2},
                        {.name = "expert", .groups = {{0, 2}, {1, 3}}, .inner_size = 2}},
               .parameters = {{.name = "embedding", .global = {61, 24}},
                              {.name = "norm", .global = {24}},
                              {.name = "attention", .global = {30, 24}, .dtype = DType::kBF16},
                              {.name = "fc1", .global = {96, 24}, .dtype = DType::kBF16, .cut = 1},
                              {.name = "fc2", .global = {40, 24}, .dtype = DType::kBF16, .cut = 1}},
               .seed = 3},
          .modules = {{0}, {1, 2, 3, 4}},
          .sharding = {}};
}

TEST(FullySharded, OwnedSlicesNameEveryElementOnce) {
  const Case c = fixed_case();
  std::vector<OwnedTensor> counts;
  for (const SpreadParameter& p : c.model.parameters) counts.emplace_back(DType::kF32, p.global);
  std::mutex mutex;
  run_thread_world(4, [&](World& world) {
    const Rank rank(c, world);
    const std::scoped_lock lock(mutex);
    for (const NamedSlice& s : rank.sharded.weight_slices(HeldPart::kOwned)) {
      const OwnedTensor part = part_of(counts[rank.index(s.name)], s.slice);
      for (float& count : part.get().span<float>()) count += 1;
      copy_slice_into(s.slice, part, counts[rank.index(s.name)]);
    }
  });
  for (const OwnedTensor& count : counts) {
    for (const float n : count.get().span<float>()) EXPECT_EQ(n, 1.0F);
  }
}

// Gathered twice: the other ranks' elements come, with their padding. Reduced once: as many F32
// values as this rank does not own go. Replicas: an all-reduce of the dense shares.
TEST(FullySharded, SendsWhatTheFormulasSay) {
  for (const auto compression : {GradientCompression::kNone, GradientCompression::kBf16}) {
    Case c = fixed_case();
    c.sharding.compression = compression;
    const ReferenceModel reference(c.model, {});
    run_thread_world(4, [&](World& world) {
      Rank rank(c, world);
      rank.micro_batch(0, reference);
      rank.sharded.finish_gradients();
      std::vector<ReplicaPlace> places;
      for (const ShardGroup& g : rank.groups) places.push_back({g.shard->size(), g.shard->rank()});
      const ShardPlan plan = plan_shards(places, rank.parameters, c.modules);
      const auto bytes = [&](const std::string& name, CommKind kind) {
        return world.statistics().count(name, kind).bytes;
      };
      for (size_t g = 0; g < 2; ++g) {
        int64_t gathered = 0;
        int64_t reduced = 0;
        for (const ShardModule& module : plan.modules) {
          for (const ShardUnit& unit : module.units) {
            if (unit.group != g) continue;
            gathered += unit.own.count * dtype_size(unit.dtype);
            reduced += unit.bucket.num_elements() - unit.own.count;
          }
        }
        const bool rounded = compression == GradientCompression::kBf16;
        const std::string name = c.model.cuts[g].name + ".inner";
        EXPECT_EQ(bytes(name, CommKind::kAllGather), gathered);
        EXPECT_EQ(bytes(name, CommKind::kReduceScatter), rounded ? 0 : 4 * reduced);
        EXPECT_EQ(bytes(name, CommKind::kAllToAll), rounded ? 2 * reduced : 0);
      }
      EXPECT_EQ(bytes("dense.outer", CommKind::kAllReduce), plan.group_gradients[0].count);
      EXPECT_EQ(bytes("expert.outer", CommKind::kAllReduce), 0);
    });
  }
}

// F32 and BF16 weights are units of their own; so are weights of different groups.
TEST(FullySharded, ReducesOnlyWhatWasAddedTo) {
  Case c = fixed_case();
  const ReferenceModel reference(c.model, {});
  run_thread_world(4, [&](World& world) {
    Rank rank(c, world);
    const auto calls = [&](const std::string& name) {
      return world.statistics().count(name, CommKind::kReduceScatter).calls;
    };
    rank.sharded.reduce(1);
    EXPECT_EQ(calls("dense.inner"), 0);
    rank.accumulate(1, {1});
    rank.sharded.reduce(1);
    EXPECT_EQ(calls("dense.inner"), 1);
    EXPECT_EQ(calls("expert.inner"), 0);
    rank.accumulate(2, {1});
    rank.accumulate(3, {1});
    rank.sharded.reduce(1);
    EXPECT_EQ(calls("dense.inner"), 2);
    EXPECT_EQ(calls("expert.inner"), 1);
    rank.sharded.finish_gradients();
  });
}

TEST(FullySharded, BytesArePredictedAndFallWithTheGroup) {
  Random random(33, 0);
  for (int trial = 0; trial < 40; ++trial) {
    const Case c = random_case(random);
    run_thread_world(c.model.num_ranks, [&](World& world) {
      const Rank rank(c, world);
      EXPECT_EQ(rank.sharded.bytes(),
                FullySharded::count_bytes(rank.groups, rank.parameters, c.modules, c.sharding));
      EXPECT_TRUE(rank.sharded.bytes().staging == 0 ||
                  c.sharding.compression == GradientCompression::kBf16);
    });
  }
  const SpreadModel model = {.num_ranks = 1,
                             .cuts = {{.name = "dp", .groups = {{0}}}},
                             .parameters = {{.name = "w", .global = {4096, 64}}}};
  const auto parameters = parameters_of(model, 0);
  const auto bytes = [&](int64_t size) {
    std::vector<int64_t> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    const CommunicatorPtr shard = make_planned_world(0, size)->make_group("dp", ranks);
    return FullySharded::count_bytes({{.shard = shard}}, parameters, {{0}}, {});
  };
  constexpr int64_t kWeight = int64_t{4} * 4096 * 64;
  EXPECT_EQ(bytes(1), (FullySharded::Bytes{kWeight, kWeight, 2 * kWeight, 0, 0, 0}));
  EXPECT_EQ(bytes(8), (FullySharded::Bytes{kWeight / 8, kWeight / 8, kWeight / 4, 2 * kWeight,
                                           2 * kWeight, 0}));
}

TEST(FullySharded, TheNextModuleIsGatheredEarlyIntoTheOtherBuffer) {
  const Case c = fixed_case();
  run_thread_world(4, [&](World& world) {
    Rank rank(c, world);
    const auto calls = [&] {
      return world.statistics().count("dense.inner", CommKind::kAllGather).calls;
    };
    rank.sharded.gather(0);
    EXPECT_EQ(calls(), 1);
    rank.sharded.gather(1);
    EXPECT_EQ(calls(), 3) << "F32 and BF16 weights";
    rank.sharded.gather(0);
    EXPECT_EQ(calls(), 3);
    const Tensor embedding = rank.sharded.weight(0);
    EXPECT_NE(embedding.data, rank.sharded.weight(2).data);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(rank.sharded.weight(3).data) % 64, 0);
    EXPECT_THROW(rank.sharded.step({}), InternalError) << "modules are gathered";
    rank.sharded.release(0);
    rank.sharded.release(1);
    rank.sharded.gather(1);
    EXPECT_EQ(rank.sharded.weight(1).data, embedding.data) << "the first free buffer";
    rank.sharded.release(1);
  });
}

TEST(FullySharded, RefusesWhatHasNoBuffer) {
  Case c = fixed_case();
  c.modules = {{0}, {1, 2}, {3, 4}};
  run_thread_world(4, [&](World& world) {
    Rank rank(c, world);
    rank.sharded.gather(0);
    rank.sharded.gather(1);
    EXPECT_THROW(rank.sharded.gather(2), InternalError);
    rank.sharded.release(0);
    rank.sharded.release(1);
    rank.sharded.gradient(0);
    rank.sharded.gradient(1);
    EXPECT_THROW(rank.sharded.gradient(3), InternalError);
    EXPECT_THROW(rank.sharded.finish_gradients(), InternalError);
  });
  c.modules = {{0}, {1, 2}, {3, 4, 0}};
  run_thread_world(4, [&](World& world) { EXPECT_THROW(Rank(c, world), InternalError); });
}

TEST(FullySharded, NonFiniteGradientStopsAllAndTheNextStepGoesOn) {
  const Case c = fixed_case();
  ReferenceModel reference(c.model, {});
  run_thread_world(4, [&](World& world) {
    Rank rank(c, world);
    rank.micro_batch(0, reference);
    const float bad = world.rank() == 1 ? std::numeric_limits<float>::quiet_NaN() : 0.0F;
    rank.accumulate(4, {bad});
    rank.sharded.reduce(1);
    EXPECT_FALSE(rank.sharded.step({.lr = 0.1}).updated);
    EXPECT_THROW(rank.sharded.gradient(4), InternalError) << "no step has begun";
    rank.sharded.begin_step();
    rank.micro_batch(1, reference);
    rank.sharded.discard_gradients();
    rank.sharded.begin_step();
    rank.micro_batch(1, reference);
    EXPECT_TRUE(rank.sharded.step({.step_idx = 1, .lr = 0.1}).updated);
  });
}

}  // namespace
}  // namespace tessera

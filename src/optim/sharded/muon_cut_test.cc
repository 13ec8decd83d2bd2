#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "comm/planned_world.h"
#include "comm/thread/thread_world.h"
#include "core/random.h"
#include "core/slice.h"
#include "ops/adamw/moment_blocks.h"
#include "optim/optimizer.h"
#include "optim/sharded/sharded_optimizer.h"

namespace tessera {
namespace {

/// A weight of matrices one below the other, and how its parts are cut.
struct CutWeight {
  std::vector<int64_t> matrix_rows;
  int64_t columns = 1;
  bool by_columns = false;
  DType dtype = DType::kF32;

  Shape shape() const {
    int64_t rows = 0;
    for (const int64_t count : matrix_rows) rows += count;
    return {rows, columns};
  }
  Slice part(int64_t rank, int64_t num_parts) const {
    const int64_t width = columns / num_parts;
    if (by_columns) return Slice::of_columns(shape(), {rank * width, width});
    std::vector<IndexRange> ranges;
    int64_t begin = 0;
    for (const int64_t rows : matrix_rows) {
      const int64_t own = rows / num_parts;
      ranges.push_back({begin + rank * own, own});
      begin += rows;
    }
    return Slice::of_rows(shape(), std::move(ranges));
  }
  std::vector<int64_t> part_rows(int64_t num_parts) const {
    std::vector<int64_t> result = matrix_rows;
    if (by_columns) return result;
    for (int64_t& rows : result) rows /= num_parts;
    return result;
  }
};

OwnedTensor random_weight(const CutWeight& weight, uint64_t seed) {
  OwnedTensor result(weight.dtype, weight.shape());
  Random random(seed, 0);
  for (int64_t i = 0; i < result.get().num_elements(); ++i) {
    const auto value = static_cast<float>(random.next_normal());
    if (weight.dtype == DType::kF32) {
      result.get().as<float>()[i] = value;
    } else {
      result.get().as<Bf16>()[i] = Bf16(value);
    }
  }
  return result;
}

OwnedTensor random_gradient(CutWeight weight, uint64_t seed) {
  weight.dtype = DType::kF32;
  return random_weight(weight, seed);
}

OwnedTensor take_part(const Slice& slice, const Tensor& whole) {
  OwnedTensor part(whole.dtype, slice.shape());
  copy_slice_from(slice, whole, part);
  return part;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape &&
         std::memcmp(a.data, b.data, static_cast<size_t>(a.num_bytes())) == 0;
}

/// The parts of a rank, or, of one rank, the whole weights.
struct Part {
  Part(const std::vector<CutWeight>& weights, const CommunicatorPtr& ranks) : all(weights) {
    for (size_t i = 0; i < all.size(); ++i) {
      slices.push_back(all[i].part(ranks->rank(), ranks->size()));
      values.push_back(take_part(slices[i], random_weight(all[i], i)));
      grads.emplace_back(DType::kF32, slices[i].shape());
      parameters.push_back({.name = fmt::format("w{}", i),
                            .weight = values[i],
                            .grad = grads[i],
                            .matrix_rows = all[i].part_rows(ranks->size()),
                            .cut = {.parts = ranks, .by_columns = all[i].by_columns}});
    }
  }
  void step(Optimizer& optimizer, int64_t step) const {
    for (size_t i = 0; i < all.size(); ++i) {
      const OwnedTensor grad = random_gradient(all[i], 100 * static_cast<uint64_t>(step + 1) + i);
      copy_slice_from(slices[i], grad, grads[i]);
    }
    optimizer.step({.step_idx = step, .lr = 0.05});
  }

  std::vector<CutWeight> all;
  std::vector<Slice> slices;
  std::vector<OwnedTensor> values, grads;
  std::vector<Parameter> parameters;
};

/// While it lives, the calling thread has the threads that run_thread_world would give a rank: sums
/// of oneDNN's products may depend on their number.
class ThreadsOfARank {
 public:
  explicit ThreadsOfARank(int64_t num_ranks) : before_(omp_get_max_threads()) {
    omp_set_num_threads(std::max(1, before_ / static_cast<int>(num_ranks)));
  }
  ~ThreadsOfARank() { omp_set_num_threads(before_); }
  ThreadsOfARank(const ThreadsOfARank&) = delete;
  ThreadsOfARank& operator=(const ThreadsOfARank&) = delete;

 private:
  int before_;
};

/// Parts have the bits that the whole matrices have on one rank, in weights and state.
void expect_parts_of_whole(const std::vector<CutWeight>& weights, int64_t num_parts,
                           const OptimizerOptions& options, int64_t num_steps = 3) {
  const Part whole(weights, make_single_communicator("whole"));
  Optimizer expected(whole.parameters, options);
  {
    const ThreadsOfARank threads(num_parts);
    for (int64_t step = 0; step < num_steps; ++step) whole.step(expected, step);
  }
  run_thread_world(num_parts, [&](World& world) {
    const Part part(weights, world.make_world_group());
    Optimizer optimizer(part.parameters, options);
    EXPECT_EQ(Optimizer::workspace_bytes(part.parameters, options, optimizer_on_host()),
              optimizer.workspace_bytes());
    for (int64_t step = 0; step < num_steps; ++step) part.step(optimizer, step);
    for (size_t i = 0; i < weights.size(); ++i)
      EXPECT_TRUE(same_bits(take_part(part.slices[i], whole.values[i]), part.values[i]))
          << "weight " << i << ", rank " << world.rank();
    const auto state = optimizer.state();
    const auto whole_state = expected.state();
    ASSERT_EQ(state.size(), whole_state.size());
    for (size_t i = 0; i < state.size(); ++i) {
      const auto idx = static_cast<size_t>(std::stoi(state[i].name.substr(1)));
      const Slice& part_slice = part.slices[idx];
      const Slice slice = names_scales(state[i].name) ? slice_of_scales(part_slice) : part_slice;
      EXPECT_TRUE(same_bits(take_part(slice, whole_state[i].tensor), state[i].tensor))
          << state[i].name;
    }
  });
}

TEST(MuonCut, PartsHaveTheBitsOfWholeMatrices) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    expect_parts_of_whole(
        {{.matrix_rows = {12}, .columns = 20, .dtype = dtype},
         {.matrix_rows = {12}, .columns = 20, .by_columns = true, .dtype = dtype},
         {.matrix_rows = {8, 8, 4, 4, 12}, .columns = 6, .dtype = dtype},
         {.matrix_rows = {5, 7, 5}, .columns = 4, .by_columns = true, .dtype = dtype}},
        2, {.weight_decay = 0.3});
  }
}

TEST(MuonCut, AnyNumberOfPartsAndAnyState) {
  Random random(5, 0);
  for (int trial = 0; trial < 12; ++trial) {
    const auto below = [&](uint64_t n) { return static_cast<int64_t>(random.next_below(n)); };
    const int64_t num_parts = 2 + below(3);
    std::vector<CutWeight> weights;
    // Parts of rows would have scales of their own.
    const bool scaled = below(2) == 0;
    for (int64_t i = below(3); i >= 0; --i) {
      CutWeight weight{
          .matrix_rows = {}, .columns = 1 + below(20), .by_columns = !scaled && below(2) == 0};
      weight.dtype = below(2) == 0 ? DType::kF32 : DType::kBF16;
      if (weight.by_columns) weight.columns *= num_parts;
      for (int64_t k = below(6); k >= 0; --k)
        weight.matrix_rows.push_back(weight.by_columns ? below(9) : num_parts * below(5));
      weights.push_back(std::move(weight));
    }
    expect_parts_of_whole(
        weights, num_parts,
        {.formats = {.first_moment = static_cast<MomentKind>(below(2) + (scaled ? 2 : 0)),
                     .master = static_cast<MasterKind>(below(4))}});
  }
}

/// More matrices than a rank takes at a time.
TEST(MuonCut, BatchesOfParts) {
  expect_parts_of_whole({{.matrix_rows = {32, 32, 32}, .columns = 16400}}, 2, {}, 1);
}

TEST(MuonCut, FlopsAreSpreadOverTheRanks) {
  const std::vector<CutWeight> weights = {{.matrix_rows = {12, 12}, .columns = 20}};
  const Part whole(weights, make_single_communicator("whole"));
  const double expected = Optimizer::update_flops(whole.parameters, {});
  run_thread_world(3, [&](World& world) {
    const Part part(weights, world.make_world_group());
    EXPECT_DOUBLE_EQ(3 * Optimizer::update_flops(part.parameters, {}), expected);
  });
}

/// A model between an embedding and a head of so many rows, as one of two ranks with parts of its
/// matrices lists it.
std::vector<ReplicatedParameter> list_parts(int64_t vocabulary, const std::vector<int64_t>& rows) {
  std::vector<ReplicatedParameter> all;
  const auto append = [&](int64_t num_rows, std::optional<int64_t> layer) {
    const Shape shape = {num_rows, 8};
    Parameter parameter{.name = fmt::format("w{}", all.size()),
                        .weight = {nullptr, DType::kF32, shape},
                        .grad = {nullptr, DType::kF32, shape}};
    if (layer) {
      parameter.matrix_rows = {num_rows};
      parameter.cut.parts = make_planned_world(0, 2)->make_group("parts", {0, 1});
    }
    all.push_back(
        {.parameter = std::move(parameter), .slice = Slice::whole(shape), .layer = layer});
  };
  append(vocabulary, std::nullopt);
  for (size_t i = 0; i < rows.size(); ++i) append(rows[i], static_cast<int64_t>(i / 3));
  append(vocabulary, std::nullopt);
  return all;
}

/// The vocabulary, in whose parts one may have a row more, does not decide who owns which matrix.
TEST(MuonCut, RanksWithPartsOfAMatrixOwnTheSameOnes) {
  Random random(6, 0);
  for (int trial = 0; trial < 200; ++trial) {
    const auto below = [&](uint64_t n) { return static_cast<int64_t>(random.next_below(n)); };
    std::vector<int64_t> rows;
    for (int64_t i = below(12); i >= 0; --i) rows.push_back(1 + below(20));
    const int64_t vocabulary = 1 + below(40);
    const ShardingOptions sharding = {.bucket_bytes = 1 + below(4000)};
    const int64_t size = 1 + below(4);
    const ReplicaPlace places[] = {{size, below(static_cast<uint64_t>(size))}};
    const auto first = ShardedOptimizer::list_held(places, list_parts(vocabulary, rows), sharding);
    const auto second =
        ShardedOptimizer::list_held(places, list_parts(vocabulary + 1, rows), sharding);
    ASSERT_EQ(first.size(), second.size());
    for (size_t i = 1; i + 1 < first.size(); ++i)
      EXPECT_EQ(first[i].matrix_rows, second[i].matrix_rows) << "trial " << trial;
  }
}

}  // namespace
}  // namespace tessera

// Weights in FP8, whose blocks no share cuts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>

#include "comm/thread/thread_world.h"
#include "core/random.h"
#include "ops/quantize/quantize_testing.h"
#include "optim/sharded/sharded_optimizer.h"

namespace tessera {
namespace {

struct WeightCase {
  const char* name;
  Shape shape;
  DType dtype;
};
const WeightCase kCases[] = {{"norm", {100}, DType::kF32},
                             {"wide", {384, 128}, DType::kE4M3},
                             {"table", {61, 30}, DType::kBF16},
                             {"tall", {256, 384}, DType::kE4M3},
                             {"one_block", {128, 128}, DType::kE4M3}};

OwnedTensor random_values(const WeightCase& of, uint64_t stream) {
  OwnedTensor values(DType::kF32, of.shape);
  fill_normal(values.get().span<float>(), 5, mix(hash_text(of.name, std::strlen(of.name)), stream),
              1.0F);
  return values;
}

/// The weights that one rank holds.
struct HeldWeights {
  std::vector<OwnedTensor> weights, scales, grads;
  std::vector<ReplicatedParameter> parameters;

  HeldWeights() {
    for (const WeightCase& of : kCases) {
      const bool is_fp8 = of.dtype == DType::kE4M3;
      weights.emplace_back(of.dtype, of.shape);
      scales.emplace_back(DType::kF32, is_fp8 ? shape_of_block_scales(of.shape) : Shape{0});
      grads.emplace_back(DType::kF32, of.shape);
      parameters.push_back({.parameter = {.name = of.name,
                                          .weight = weights.back(),
                                          .grad = grads.back(),
                                          .scales = is_fp8 ? scales.back().get() : Tensor()},
                            .slice = Slice::whole(of.shape)});
    }
  }
};

void start(const ShardedOptimizer& optimizer) {
  for (const NamedSlice& held : optimizer.weight_slices(HeldPart::kHeld)) {
    const auto* const of = std::ranges::find(kCases, held.name, &WeightCase::name);
    const OwnedTensor whole = random_values(*of, 1);
    const OwnedTensor part(DType::kF32, held.slice.shape());
    copy_slice_from(held.slice, whole, part);
    const auto values = part.get().span<float>();
    if (held.tensor.dtype == DType::kF32) std::ranges::copy(values, held.tensor.as<float>());
    if (held.tensor.dtype == DType::kBF16)
      std::ranges::transform(values, held.tensor.as<Bf16>(), [](float x) { return Bf16(x); });
  }
  optimizer.reset_masters();
}

using Bytes = std::vector<std::byte>;

Bytes bytes_of(const HeldWeights& held) {
  Bytes all;
  for (const auto* tensors : {&held.weights, &held.scales}) {
    for (const OwnedTensor& tensor : *tensors) {
      const auto* const first = static_cast<const std::byte*>(tensor.get().data);
      all.insert(all.end(), first, first + tensor.get().num_bytes());
    }
  }
  return all;
}

/// What each rank has after two steps whose gradients are the first rank's, and before them.
std::vector<Bytes> run_ranks(int64_t num_ranks, const ShardingOptions& sharding) {
  std::vector<Bytes> ends;
  std::mutex mutex;
  run_thread_world(num_ranks, [&](World& world) {
    HeldWeights held;
    std::vector<int64_t> ranks(num_ranks);
    std::iota(ranks.begin(), ranks.end(), 0);
    ShardedOptimizer optimizer({{.outer = world.make_group("dp", ranks)}}, held.parameters,
                               world.make_world_group(), {}, sharding);
    start(optimizer);
    optimizer.cast_weights();
    Bytes bytes = bytes_of(held);
    for (int64_t step = 0; step < 2; ++step) {
      for (size_t i = 0; i < std::size(kCases); ++i) {
        const auto grad = held.grads[i].get().span<float>();
        std::ranges::fill(grad, 0.0F);
        if (world.rank() == 0)
          std::ranges::copy(random_values(kCases[i], 2 + step).get().span<float>(), grad.begin());
      }
      optimizer.step({.step_idx = step, .lr = 0.01});
      optimizer.wait_all_weights();
      const Bytes now = bytes_of(held);
      bytes.insert(bytes.end(), now.begin(), now.end());
    }
    for (const NamedSlice& owned : optimizer.weight_slices(HeldPart::kOwned)) {
      EXPECT_NE(owned.tensor.dtype, DType::kE4M3) << owned.name;
    }
    const std::scoped_lock lock(mutex);
    ends.push_back(std::move(bytes));
  });
  return ends;
}

TEST(Fp8Weights, AreTheSameForEverySharding) {
  const Bytes one = run_ranks(1, {}).front();
  for (const int64_t num_ranks : {2, 3}) {
    for (const int64_t bucket_bytes : {int64_t{0}, int64_t{300000}, int64_t{1} << 30}) {
      for (const bool shard_state : {true, false}) {
        SCOPED_TRACE(fmt::format("{} ranks, buckets of {}, {}", num_ranks, bucket_bytes,
                                 shard_state ? "shared out" : "all everywhere"));
        const ShardingOptions sharding{.shard_state = shard_state, .bucket_bytes = bucket_bytes};
        for (const Bytes& end : run_ranks(num_ranks, sharding)) EXPECT_EQ(end, one);
      }
    }
  }
}

TEST(Fp8Weights, AreCastFromTheirMasters) {
  const auto world = make_single_world();
  HeldWeights held;
  ShardedOptimizer optimizer({{.outer = make_single_communicator("dp")}}, held.parameters,
                             world->make_world_group(), {}, {});
  start(optimizer);
  optimizer.cast_weights();
  for (const NamedSlice& master : optimizer.weight_slices(HeldPart::kOwned)) {
    const auto* const of = std::ranges::find(kCases, master.name, &WeightCase::name);
    if (of->dtype != DType::kE4M3) continue;
    const testing::QuantizedBlocks expected = testing::quantize_blocks(master.tensor);
    const size_t idx = of - kCases;
    EXPECT_EQ(std::memcmp(held.weights[idx].get().data, expected.elements.get().data,
                          of->shape.num_elements()),
              0);
    EXPECT_EQ(std::memcmp(held.scales[idx].get().data, expected.scales.get().data,
                          expected.scales.get().num_bytes()),
              0);
  }
}

}  // namespace
}  // namespace tessera

// The routed operators together, as a layer puts them together: the whole chain and its derived
// gradient against a plain computation for each token in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "ops/add/add.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/permute/permute.h"
#include "ops/route_map/route_map.h"
#include "ops/router/router.h"
#include "ops/testing/op_test.h"
#include "program/differentiate.h"
#include "runtime/executable.h"

namespace tessera {
namespace {

/// Where the probability is applied.
enum class Weighting { kBeforeFc2, kAfterFc2 };

struct Layer {
  int64_t num_tokens = 0;
  int64_t hidden_size = 12;
  int64_t top_k = 2;
  std::vector<int64_t> expert_sizes;
  RouteMapSpec map = {};

  int64_t num_experts() const { return std::ssize(expert_sizes); }
  int64_t total_size() const {
    return std::accumulate(expert_sizes.begin(), expert_sizes.end(), int64_t{0});
  }
  std::vector<int64_t> gated_sizes() const {
    std::vector<int64_t> sizes = expert_sizes;
    for (int64_t& size : sizes) size *= 2;
    return sizes;
  }
  RouteMapSpec map_spec() const {
    RouteMapSpec spec = map;
    spec.num_experts = num_experts();
    spec.top_k = top_k;
    return spec;
  }
};

/// The values of x and the weights.
struct Values {
  OwnedTensor x, router, fc1, fc2;

  Values(const Layer& layer, DType dtype, uint64_t seed) {
    Random random(seed, 0);
    x = testing::random_tensor(dtype, {layer.num_tokens, layer.hidden_size}, random);
    router =
        testing::random_tensor(DType::kF32, {layer.num_experts(), layer.hidden_size}, random, 0.3);
    fc1 = testing::random_tensor(dtype, {2 * layer.total_size(), layer.hidden_size}, random, 0.3);
    fc2 = testing::random_tensor(dtype, {layer.total_size(), layer.hidden_size}, random, 0.3);
  }
  std::vector<const OwnedTensor*> all() const { return {&x, &router, &fc1, &fc2}; }
};

ValueType type_of(const Tensor& tensor) {
  return {.dtype = tensor.dtype, .shape = tensor.shape};
}

struct Chain {
  Program program{"moe"};
  std::vector<ValueId> bound;  ///< x, router, fc1, fc2
  ValueId y = -1, expert_idx = -1, row_of_TK = -1;

  Chain(const Layer& layer, const Values& values, Weighting weighting) {
    bound = {program.add_input("x", type_of(values.x)),
             program.add_weight("router", type_of(values.router)),
             program.add_weight("fc1", type_of(values.fc1)),
             program.add_weight("fc2", type_of(values.fc2))};
    const auto routed = program.add(
        make_router(
            {.num_experts = layer.num_experts(), .top_k = layer.top_k, .normalize_top_k = true}),
        {bound[0], bound[1]});
    const ValueId probs = routed[RouterOutput::kProbs];
    expert_idx = routed[RouterOutput::kExpertIdx];
    const auto map = program.add(make_route_map(layer.map_spec()), {expert_idx, probs});
    row_of_TK = map[RouteMapOutput::kRowOfTK];
    y = add_experts(layer, map, probs, weighting);
    program.set_outputs({y, expert_idx, row_of_TK});
  }

 private:
  ValueId add_experts(const Layer& layer, const std::vector<ValueId>& map, ValueId probs,
                      Weighting weighting) {
    const ValueId source_R = map[RouteMapOutput::kSourceR];
    const ValueId offsets = map[RouteMapOutput::kOffsets];
    const bool before = weighting == Weighting::kBeforeFc2;
    const ValueId rows = program.add1(make_permute(), {bound[0], source_R, row_of_TK}, "rows");
    const ValueId pre = program.add1(make_grouped_matmul({layer.gated_sizes(), GroupedSide::kOut}),
                                     {rows, bound[2], offsets}, "pre");
    std::vector<ValueId> activation_inputs{pre, offsets};
    if (before) {
      activation_inputs.insert(
          activation_inputs.begin() + 1,
          program.add1(make_permute_probs(), {probs, source_R, row_of_TK}, "probs_R"));
    }
    const ValueId act =
        program.add1(make_expert_activation({Activation::kSwiGLU, layer.expert_sizes, before}),
                     activation_inputs, "act");
    const ValueId out = program.add1(make_grouped_matmul({layer.expert_sizes, GroupedSide::kIn}),
                                     {act, bound[3], offsets}, "out");
    if (before) return program.add1(make_unpermute(), {out, row_of_TK, source_R}, "y");
    return program.add1(make_unpermute_weighted(), {out, probs, row_of_TK, source_R}, "y");
  }
};

KernelTable kernels() {
  KernelTable table;
  add_add_cpu(table);
  add_router_cpu(table);
  add_route_map_cpu(table);
  add_permute_cpu(table);
  add_expert_activation_cpu(table);
  add_grouped_matmul_cpu(table);
  return table;
}

struct Result {
  OwnedTensor y, expert_idx, row_of_TK;
  std::vector<OwnedTensor> grads;  ///< of x, router, fc1, fc2
  int64_t saved_bytes = 0;
};

/// Memory for the values that a caller binds, and for the slabs.
struct Memory {
  std::vector<Buffer> slabs;
  std::map<ValueId, OwnedTensor> tensors;

  OwnedTensor& add(const Program& program, Bindings& bindings, ValueId id) {
    OwnedTensor& tensor = tensors[id] = OwnedTensor(program.type(id).dtype, program.type(id).shape);
    bindings.tensors[id] = tensor;
    return tensor;
  }
  std::byte* add_slab(int64_t num_bytes) { return slabs.emplace_back(num_bytes, "a test").data(); }
};

/// Runs the chain forward and backward from the gradient of y.
Result run(const Layer& layer, const Values& values, Weighting weighting, const Tensor& grad_y) {
  const Chain chain(layer, values, weighting);
  const Backward backward =
      differentiate(chain.program, {.outputs = {chain.y}, .inputs = {chain.bound[0]}});
  std::vector<ValueId> saved;
  for (const Link& link : backward.saved) saved.push_back(link.forward);
  const KernelTable table = kernels();
  const Executable forward_run(chain.program, table, saved);
  const Executable backward_run(backward.program, table);
  Memory memory;
  Bindings forward = forward_run.make_bindings();
  for (size_t i = 0; i < chain.bound.size(); ++i) {
    forward.tensors[chain.bound[i]] = *values.all()[i];
  }
  for (const ValueId id : chain.program.outputs()) memory.add(chain.program, forward, id);
  forward.saved = memory.add_slab(forward_run.plan().saved_bytes);
  forward.transient = memory.add_slab(forward_run.plan().transient_bytes);
  forward_run.run(forward);

  Memory backward_memory;
  Bindings bindings = backward_run.make_bindings();
  for (const auto* links : {&backward.saved, &backward.bound}) {
    for (const Link& link : *links) {
      Tensor tensor = forward_run.view(forward, link.forward);
      tensor.shape = backward.program.type(link.backward).shape;
      bindings.tensors[link.backward] = tensor;
    }
  }
  bindings.tensors[backward.grad_outputs[0].backward] = grad_y;
  std::map<ValueId, ValueId> grad_of;
  for (const auto* links : {&backward.grad_inputs, &backward.accumulators}) {
    for (const Link& link : *links) {
      grad_of[link.forward] = link.backward;
      backward_memory.add(backward.program, bindings, link.backward);
    }
  }
  bindings.transient = backward_memory.add_slab(backward_run.plan().transient_bytes);
  backward_run.run(bindings);

  Result result;
  result.y = std::move(memory.tensors[chain.y]);
  result.expert_idx = std::move(memory.tensors[chain.expert_idx]);
  result.row_of_TK = std::move(memory.tensors[chain.row_of_TK]);
  for (const ValueId id : chain.bound) {
    result.grads.push_back(std::move(backward_memory.tensors[grad_of.at(id)]));
  }
  result.saved_bytes = backward.saved_bytes();
  return result;
}

using Row = std::vector<double>;

/// The layer token by token in double; the choice of experts and the drops are given.
class PlainLayer {
 public:
  PlainLayer(const Layer& layer, const Values& values, const Result& routing) : layer_(layer) {
    for (const OwnedTensor* tensor : values.all()) values_.push_back(testing::to_doubles(*tensor));
    for (const double e : testing::to_doubles(routing.expert_idx)) {
      expert_idx_.push_back(static_cast<size_t>(e));
    }
    row_of_ = testing::to_doubles(routing.row_of_TK);
    size_t start = 0;
    for (const int64_t size : layer.expert_sizes) {
      starts_.push_back(start);
      start += static_cast<size_t>(size);
    }
  }

  /// The values of x, router, fc1 and fc2, to change.
  Row& values(size_t which) { return values_[which]; }

  Row y() const {
    Row result;
    for (size_t t = 0; t < static_cast<size_t>(layer_.num_tokens); ++t) {
      const Row row = token(t);
      result.insert(result.end(), row.begin(), row.end());
    }
    return result;
  }

 private:
  size_t hidden() const { return static_cast<size_t>(layer_.hidden_size); }

  double dot(const Row& matrix, size_t row, const double* x) const {
    return std::inner_product(x, x + hidden(), matrix.data() + row * hidden(), 0.0);
  }

  Row token(size_t t) const {
    const size_t top_k = layer_.top_k;
    const double* x = values_[0].data() + t * hidden();
    double chosen_sum = 0;
    for (size_t i = t * top_k; i < (t + 1) * top_k; ++i) {
      chosen_sum += std::exp(dot(values_[1], expert_idx_[i], x));
    }
    Row y(hidden(), 0.0);
    for (size_t i = t * top_k; i < (t + 1) * top_k; ++i) {
      if (row_of_[i] < 0) continue;
      add_expert(expert_idx_[i], std::exp(dot(values_[1], expert_idx_[i], x)) / chosen_sum, x, y);
    }
    return y;
  }

  void add_expert(size_t expert, double prob, const double* x, Row& y) const {
    const size_t size = layer_.expert_sizes[expert];
    for (size_t f = 0; f < size; ++f) {
      const double gate = dot(values_[2], 2 * starts_[expert] + f, x);
      const double up = dot(values_[2], 2 * starts_[expert] + size + f, x);
      const double act = gate / (1 + std::exp(-gate)) * up;
      for (size_t h = 0; h < hidden(); ++h) {
        y[h] += prob * act * values_[3][(starts_[expert] + f) * hidden() + h];
      }
    }
  }

  const Layer& layer_;
  std::vector<Row> values_;
  std::vector<size_t> expert_idx_;
  Row row_of_;
  std::vector<size_t> starts_;
};

OwnedTensor as_tensor(const Shape& shape, const Row& row) {
  return testing::tensor_of(shape, {row.begin(), row.end()});
}

/// Compares probes of every gradient with central differences of the plain layer.
void expect_gradients_right(PlainLayer plain, const Result& result, const Tensor& grad_y) {
  const Row c = testing::to_doubles(grad_y);
  const auto weighted = [&] {
    const Row y = plain.y();
    return std::inner_product(y.begin(), y.end(), c.begin(), 0.0);
  };
  constexpr double kStep = 1e-5;
  Random random(1, 99);
  for (size_t which = 0; which < result.grads.size(); ++which) {
    const Row grads = testing::to_doubles(result.grads[which]);
    double largest = 1.0;
    for (const double g : grads) largest = std::max(largest, std::abs(g));
    for (int probe = 0; probe < 25 && !grads.empty(); ++probe) {
      const size_t at = random.next_below(grads.size());
      double& element = plain.values(which)[at];
      const double kept = element;
      element = kept + kStep;
      const double above = weighted();
      element = kept - kStep;
      const double below = weighted();
      element = kept;
      EXPECT_NEAR(grads[at], (above - below) / (2 * kStep), 3e-6 * largest)
          << "input " << which << ", element " << at;
    }
  }
}

void expect_layer_right(const Layer& layer, uint64_t seed) {
  const Values values(layer, DType::kF32, seed);
  Random random(seed, 1);
  const Shape shape{layer.num_tokens, layer.hidden_size};
  const OwnedTensor grad_y = testing::random_tensor(DType::kF32, shape, random);
  const Result before = run(layer, values, Weighting::kBeforeFc2, grad_y);
  const Result after = run(layer, values, Weighting::kAfterFc2, grad_y);
  const PlainLayer plain(layer, values, before);
  const OwnedTensor expected = as_tensor(shape, plain.y());
  testing::expect_rows_near(before.y, expected, 5e-6, "y, weighted before FC2");
  testing::expect_rows_near(after.y, expected, 5e-6, "y, weighted after FC2");
  expect_gradients_right(plain, before, grad_y);
  expect_gradients_right(plain, after, grad_y);
}

Layer make_layer(int64_t num_tokens, int64_t top_k, std::vector<int64_t> sizes,
                 const RouteMapSpec& map = {}) {
  Layer layer;
  layer.num_tokens = num_tokens;
  layer.top_k = top_k;
  layer.expert_sizes = std::move(sizes);
  layer.map = map;
  return layer;
}

TEST(MoeChain, DroplessAgreesWithThePlainLayer) {
  expect_layer_right(make_layer(0, 2, {8, 8, 8}), 1);
  expect_layer_right(make_layer(1, 2, {8, 8, 8, 8, 8, 8, 8, 8}), 2);
  expect_layer_right(make_layer(1, 1, {5}), 3);
  expect_layer_right(make_layer(29, 2, {16, 16, 16, 16}), 4);
  expect_layer_right(make_layer(33, 4, {9, 9, 9, 9}), 5);  // every token at every expert
}

TEST(MoeChain, ExpertsOfDifferentSizes) {
  expect_layer_right(make_layer(40, 2, {3, 20, 8, 1, 17}), 6);
}

TEST(MoeChain, AlignedRows) {
  expect_layer_right(make_layer(31, 2, {8, 8, 8, 8, 8}, {.alignment = 16}), 7);
}

TEST(MoeChain, CapacityWithDropsAndPadding) {
  for (const DropPolicy policy : {DropPolicy::kProbs, DropPolicy::kPosition}) {
    const RouteMapSpec drops{.capacity_factor = 0.6, .drop_policy = policy};
    expect_layer_right(make_layer(30, 2, {8, 8, 8, 8}, drops), 8);
    RouteMapSpec padded = drops;
    padded.pad_to_capacity = true;
    padded.alignment = 4;
    expect_layer_right(make_layer(30, 2, {8, 8, 8, 8}, padded), 9);
    padded.capacity_factor = 3;
    expect_layer_right(make_layer(30, 2, {8, 8, 8, 8}, padded), 10);
  }
}

TEST(MoeChain, Bf16StaysWithinItsRounding) {
  const Layer layer = make_layer(64, 2, {24, 24, 24, 24});
  const Values values(layer, DType::kBF16, 11);
  Random random(11, 1);
  const Shape shape{layer.num_tokens, layer.hidden_size};
  const OwnedTensor grad_y = testing::random_tensor(DType::kBF16, shape, random);
  for (const Weighting weighting : {Weighting::kBeforeFc2, Weighting::kAfterFc2}) {
    const Result result = run(layer, values, weighting, grad_y);
    const OwnedTensor expected = as_tensor(shape, PlainLayer(layer, values, result).y());
    const OwnedTensor y = as_tensor(shape, testing::to_doubles(result.y));
    testing::expect_rows_near(y, expected, 1.5e-2, "y");
  }
}

TEST(MoeChain, WeightingBeforeFc2KeepsNoExpertOutputs) {
  const Layer layer = make_layer(32, 2, {16, 16, 16, 16});
  const Values values(layer, DType::kF32, 12);
  const OwnedTensor grad_y(DType::kF32, {layer.num_tokens, layer.hidden_size});
  const Result before = run(layer, values, Weighting::kBeforeFc2, grad_y);
  const Result after = run(layer, values, Weighting::kAfterFc2, grad_y);
  const int64_t num_rows = layer.num_tokens * layer.top_k;
  const int64_t outputs = num_rows * layer.hidden_size * 4;
  const int64_t routed_probs = num_rows * 4;
  const int64_t probs = layer.num_tokens * layer.top_k * 4;
  EXPECT_EQ(after.saved_bytes - before.saved_bytes, outputs + probs - routed_probs);
}

}  // namespace
}  // namespace tessera

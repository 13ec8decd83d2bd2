#include "model/weights/weight_store.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>

#include "model/run/model_testing.h"

namespace tessera {
namespace {

using testing::ModelRig;
using testing::TestBatch;
using testing::tiny_config;
using testing::tiny_shape;

/// Gives every run of a program copies of its weights at new addresses, which are spoilt when it is
/// done, and new accumulators, which are then added to those of the set.
class MovingStore final : public WeightStore {
 public:
  explicit MovingStore(ParameterSet& set) : set_(set) {}

  void bind(const ProgramParameters& program, Bindings& bindings) override {
    for (const auto& place : program.weights) copies_.emplace(place.parameter, copy(place));
    for (const auto& [value, parameter] : program.weights)
      bindings.tensors[value] = copies_.at(parameter);
    for (const auto& [value, parameter] : program.gradients) {
      sums_[parameter] = OwnedTensor(DType::kF32, set_.all()[parameter].grad.shape);
      bindings.tensors[value] = sums_[parameter];
    }
  }
  void done(const ProgramParameters& program) override {
    for (const auto& place : program.weights) {
      std::ranges::fill(copies_.at(place.parameter).get().span<float>(),
                        std::numeric_limits<float>::quiet_NaN());
      spoilt_.push_back(std::move(copies_.at(place.parameter)));
      copies_.erase(place.parameter);
    }
    for (const auto& place : program.gradients) {
      const auto sum = set_.all()[place.parameter].grad.span<float>();
      std::ranges::transform(sum, sums_.at(place.parameter).get().span<float>(), sum.begin(),
                             std::plus());
    }
  }

  size_t num_copies() const { return spoilt_.size(); }

 private:
  OwnedTensor copy(const ProgramParameters::Place& place) const {
    const Tensor& weight = set_.all()[place.parameter].weight;
    OwnedTensor result(weight.dtype, weight.shape);
    std::memcpy(result.get().data, weight.data, weight.num_bytes());
    return result;
  }

  ParameterSet& set_;
  std::map<size_t, OwnedTensor> copies_;
  std::map<size_t, OwnedTensor> sums_;
  std::vector<OwnedTensor> spoilt_;  ///< kept, so that no address is used twice
};

struct StoreCase {
  std::string name;
  RecomputePolicy recompute;
  bool split_weights = false;
};

class MovingWeights : public ::testing::TestWithParam<StoreCase> {};

/// A model whose parameters have no memory of their own computes, out of the store, the bits of one
/// whose parameters stay in place.
TEST_P(MovingWeights, GiveTheBitsOfWeightsInPlace) {
  const ModelConfig config = tiny_config();
  const BatchShape shape = tiny_shape(2, 6);
  ModelRig rig(config, shape, GetParam().recompute);
  TestBatch batch(config, 2, 6, 5);
  const LossScales scales = {.loss = 0.1F, .balance = 0.01F};
  const double loss = rig.model.run(batch.view(), scales).loss;

  ParameterSet moving(list_parameters(config, shape.dtype), true);
  moving.initialize(3);
  MovingStore store(moving);
  ParameterSet placeless = ParameterSet::without_memory(list_parameters(config, shape.dtype));
  auto experts = make_expert_states(config);
  TrainingModel model(config, shape, {.recompute = parse_recompute(GetParam().recompute)},
                      make_cpu_kernels(), {.split_weights = GetParam().split_weights});
  model.bind(placeless, experts, &store);
  EXPECT_EQ(model.run(batch.view(), scales).loss, loss);
  for (size_t i = 0; i < moving.all().size(); ++i) {
    const ModelParameter& expected = rig.parameters.all()[i];
    EXPECT_EQ(std::memcmp(moving.all()[i].grad.data, expected.grad.data,
                          static_cast<size_t>(expected.grad.num_bytes())),
              0)
        << expected.spec.name;
  }
  EXPECT_GT(store.num_copies(), moving.all().size());
  EXPECT_EQ(model.evaluate(batch.view()), rig.model.evaluate(batch.view()));
}

INSTANTIATE_TEST_SUITE_P(All, MovingWeights,
                         ::testing::Values(StoreCase{"kept", {}, false},
                                           StoreCase{"recomputed", {"all"}, false},
                                           StoreCase{"split", {}, true}),
                         [](const auto& info) { return info.param.name; });

TEST(WeightStore, ProgramsKnowTheirParameters) {
  const ModelConfig config = tiny_config();
  const TrainingModel model(config, tiny_shape(1, 4), {}, make_cpu_kernels());
  const ParameterSet set = ParameterSet::without_memory(list_parameters(config, DType::kF32));
  const DerivedProgram& layer = model.layer_program(model.layer_kinds().front());
  const Program& program = layer.forward.program();
  const auto forward = find_parameters(program, program, {}, set, {&config, 1});
  const auto backward = find_parameters(layer.backward.program(), program,
                                        layer.derived.accumulators, set, {&config, 1});
  const auto in_layer = std::ranges::count_if(set.all(), [](const ModelParameter& parameter) {
    return parameter.spec.name.starts_with("layers.1.");
  });
  EXPECT_EQ(std::ssize(forward.weights), in_layer);
  EXPECT_TRUE(forward.gradients.empty());
  EXPECT_EQ(std::ssize(backward.gradients), in_layer);
  for (const auto& place : backward.gradients) {
    EXPECT_EQ(layer.backward.program().value(place.value).name,
              "grad." + set.all()[place.parameter].spec.name.substr(9));
  }
  EXPECT_THROW(find_parameters(program, program, {}, set, {&config, 1000}), InternalError);
}

}  // namespace
}  // namespace tessera

#include "program/compile/split_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "comm/thread/thread_world.h"
#include "ops/add_bias/add_bias.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/testing/op_test.h"
#include "program/testing/tp_block_testing.h"
#include "runtime/executable.h"

namespace tessera {
namespace {

std::vector<ValueId> forward_ids(const std::vector<Link>& links) {
  std::vector<ValueId> ids;
  for (const Link& link : links) ids.push_back(link.forward);
  return ids;
}

std::vector<std::string> operator_names(const Program& program) {
  std::vector<std::string> names;
  for (const Node& node : program.nodes()) names.emplace_back(node.op->name());
  return names;
}

/// Runs a forward program and its backward program, whole or in two parts, for several
/// micro-batches whose weight parts come after all input parts.
class SplitRun {
 public:
  SplitRun(const Program& forward, const DifferentiateRequest& request)
      : forward_(forward),
        kernels_(make_cpu_kernels()),
        whole_(differentiate(forward, request)),
        split_(split_weights(whole_)) {}

  const Backward& whole() const { return whole_; }
  const SplitBackward& split() const { return split_; }

  /// The gradients of inputs of each micro-batch, and the accumulators at the end.
  struct Result {
    std::vector<std::vector<double>> grads;
    std::map<ValueId, std::vector<double>> accumulators;
    bool operator==(const Result&) const = default;
  };
  Result run(bool in_parts, int64_t micro_batches) {
    std::deque<Batch> batches;
    accumulators_.clear();
    Result result;
    for (int64_t i = 0; i < micro_batches; ++i) {
      Batch& batch = batches.emplace_back();
      run_forward(batch, i);
      if (in_parts) {
        run_input_part(batch);
      } else {
        run_backward(batch, whole_, {});
      }
      for (const Link& link : whole_.grad_inputs)
        result.grads.push_back(testing::to_doubles(batch.values.at(grad_key(link.forward))));
    }
    for (Batch& batch : batches) {
      if (in_parts) run_weight_part(batch);
    }
    for (const auto& [id, tensor] : accumulators_)
      result.accumulators[id] = testing::to_doubles(tensor);
    return result;
  }

 private:
  /// Memory by forward value; gradients of forward value v are under grad_key(v).
  struct Batch {
    std::map<ValueId, OwnedTensor> values;
    std::vector<Buffer> slabs;
    std::map<ValueId, Tensor> kept;  ///< by value of the weight part
  };
  static ValueId grad_key(ValueId id) { return -1 - id.index(); }

  static const Tensor& own(std::map<ValueId, OwnedTensor>& memory, ValueId key,
                           const ValueType& type, uint64_t noise = 0) {
    const auto [at, is_new] = memory.try_emplace(key, type.dtype, type.shape);
    if (is_new && noise > 0) {
      Random random(noise, static_cast<uint64_t>(key.index() + 1000));
      for (float& x : at->second.get().span<float>()) x = static_cast<float>(random.next_normal());
    }
    return at->second.get();
  }

  /// Runs a program whose slabs live as long as the batch.
  Bindings start(const Executable& program, Batch& batch) const {
    Bindings bindings = program.make_bindings();
    bindings.saved = batch.slabs.emplace_back(program.plan().saved_bytes, "a test").data();
    bindings.transient = batch.slabs.emplace_back(program.plan().transient_bytes, "a test").data();
    return bindings;
  }

  void run_forward(Batch& batch, int64_t idx) {
    const Executable program(forward_, kernels_, forward_ids(whole_.saved));
    Bindings bindings = start(program, batch);
    for (ValueId id = 0; id < forward_.num_values(); ++id) {
      const Value& value = forward_.value(id);
      if (value.kind == ValueKind::kIntermediate && !forward_.is_output(id)) continue;
      const bool is_weight = value.kind == ValueKind::kWeight;
      bindings.tensors[id] =
          own(batch.values, id, value.type, is_weight ? 77 : static_cast<uint64_t>(1 + idx));
    }
    program.run(bindings);
    for (const Link& link : whole_.saved) {
      const Tensor value = program.at_bound(bindings, link.forward);
      const Tensor& copy = own(batch.values, link.forward, forward_.type(link.forward));
      std::memcpy(copy.data, value.data, value.num_bytes());
    }
    for (const Link& link : whole_.grad_outputs)
      own(batch.values, grad_key(link.forward), forward_.type(link.forward),
          static_cast<uint64_t>(1 + idx));
  }

  /// Binds what links name and runs; returns the run's kept values.
  std::vector<Tensor> run_backward(Batch& batch, const Backward& backward,
                                   const std::vector<ValueId>& kept,
                                   const std::vector<ValueId>& wanted = {}) {
    const Executable program(backward.program, kernels_, kept);
    Bindings bindings = start(program, batch);
    const auto bind = [&](ValueId id, const Tensor& tensor) { bindings.tensors[id] = tensor; };
    for (const auto& [id, tensor] : batch.kept) {
      if (&backward == &split_.weight) bind(id, tensor);
    }
    for (const auto* links : {&backward.saved, &backward.bound}) {
      for (const Link& link : *links) bind(link.backward, batch.values.at(link.forward));
    }
    for (const Link& link : backward.grad_outputs)
      bind(link.backward, batch.values.at(grad_key(link.forward)));
    for (const Link& link : backward.grad_inputs) {
      bind(link.backward,
           own(batch.values, grad_key(link.forward), backward.program.type(link.backward)));
    }
    for (const Link& link : backward.accumulators) {
      bind(link.backward,
           own(accumulators_, link.forward, backward.program.type(link.backward), 5));
    }
    program.run(bindings);
    std::vector<Tensor> values;
    for (const ValueId id : wanted) values.push_back(program.at_bound(bindings, id));
    return values;
  }

  void run_input_part(Batch& batch) {
    std::vector<ValueId> wanted;
    for (const KeptValue& value : split_.kept) wanted.push_back(value.input_part);
    const auto tensors = run_backward(batch, split_.input, split_.kept_intermediates(), wanted);
    for (size_t i = 0; i < tensors.size(); ++i) batch.kept[split_.kept[i].weight_part] = tensors[i];
  }

  void run_weight_part(Batch& batch) { run_backward(batch, split_.weight, {}); }

  Program forward_;
  KernelTable kernels_;
  Backward whole_;
  SplitBackward split_;
  std::map<ValueId, OwnedTensor> accumulators_;
};

TEST(SplitWeights, SplitsProductsAndKeepsTheRest) {
  const testing::TpBlock block(make_single_communicator("tp"), 5, 8, 12);
  const SplitRun run(block.program, block.request());
  EXPECT_THAT(operator_names(run.split().input.program),
              ::testing::ElementsAre("all_gather", "linear_dgrad", "activation_backward",
                                     "linear_dgrad", "reduce_scatter", "rmsnorm_backward", "add"));
  EXPECT_THAT(operator_names(run.split().weight.program),
              ::testing::ElementsAre("linear_wgrad", "linear_wgrad"));
  // rmsnorm_backward gives the gradient of x too: the norm's gradient stays in the input part.
  EXPECT_THAT(forward_ids(run.split().input.accumulators),
              ::testing::UnorderedElementsAre(block.norm_weight));
  EXPECT_THAT(forward_ids(run.split().weight.accumulators),
              ::testing::UnorderedElementsAre(block.fc1, block.fc2));
  EXPECT_EQ(run.split().kept.size(), 2U);
  EXPECT_EQ(run.split().kept_intermediates().size(), 2U);
  EXPECT_TRUE(run.split().weight.program.outputs().empty());
}

TEST(SplitWeights, KeepsTheBitsOfSeveralMicroBatches) {
  for (const int64_t ranks : {1, 2, 3}) {
    run_thread_world(ranks, [](World& world) {
      const testing::TpBlock block(world.make_world_group(), 5, 8, 12);
      SplitRun run(block.program, block.request());
      EXPECT_EQ(run.run(true, 3), run.run(false, 3));
    });
  }
}

/// One weight serves as a norm's, whose operator gives both kinds of gradients, and as a bias,
/// whose gradient could wait: it does not, since the order of the additions counts.
TEST(SplitWeights, AnAccumulatorIsOnOneSideOnly) {
  Program program("shared");
  const ValueId x = program.add_input("x", {DType::kF32, {4, 6}});
  const ValueId shared = program.add_weight("shared", {DType::kF32, {6}});
  const ValueId matrix = program.add_weight("matrix", {DType::kF32, {6, 6}});
  const ValueId biased = program.add1(make_add_bias(), {x, shared}, "biased");
  const ValueId normed = program.add(make_rmsnorm(1e-5), {biased, shared}, {"normed"})[0];
  const ValueId y = program.add1(make_linear(), {normed, matrix}, "y");
  const ValueId out = program.add1(make_add_bias(), {y, shared}, "out");
  program.set_outputs({out});
  SplitRun run(program, {{out}, {x}});
  EXPECT_THAT(operator_names(run.split().weight.program), ::testing::ElementsAre("linear_wgrad"));
  EXPECT_THAT(
      operator_names(run.split().input.program),
      ::testing::ElementsAre("add_bias_grad", "linear_dgrad", "rmsnorm_backward", "add_bias_grad"));
  EXPECT_EQ(run.run(true, 2), run.run(false, 2));
}

/// Where nothing wants a gradient of an input, everything is weight part; the gradient of the
/// output is still an input of the input part.
TEST(SplitWeights, AProgramWithoutGradientsOfInputs) {
  Program program("weights");
  const ValueId x = program.add_input("x", {DType::kF32, {4, 6}});
  const ValueId weight = program.add_weight("weight", {DType::kF32, {3, 6}});
  const ValueId out = program.add1(make_linear(), {x, weight}, "out");
  program.set_outputs({out});
  SplitRun run(program, {{out}, {}});
  EXPECT_TRUE(run.split().input.program.nodes().empty());
  EXPECT_EQ(run.split().input.grad_outputs.size(), 1U);
  EXPECT_EQ(run.split().weight.grad_outputs.size(), 1U);
  EXPECT_TRUE(run.split().kept.empty());
  EXPECT_EQ(run.run(true, 2), run.run(false, 2));
}

}  // namespace
}  // namespace tessera

#include "runtime/executable.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>

#include "ops/add/add.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/registry/cpu_kernels.h"
#include "program/dependencies.h"
#include "program/testing/program_testing.h"
#include "program/testing/random_program.h"

namespace tessera {
namespace {

using testing::SlowCopy;

/// With a kernel of SlowCopy that calls `slow_copy`.
template <typename Run>
KernelTable kernels_with(Run slow_copy) {
  KernelTable kernels = make_cpu_kernels();
  kernels["slow_copy"] = testing::slow_copy_kernel(slow_copy);
  return kernels;
}

TEST(Accumulators, ThatHoldNothingAreWrittenOrZeroedBeforeTheFirstAddition) {
  Program program("two additions");
  const ValueType type{DType::kF32, {2, 3}};
  const ValueId x = program.add_input("x", type);
  const ValueId grad = program.add_input("grad", {DType::kF32, {2, 2}});
  const ValueId sum = program.add_accumulator("sum", {DType::kF32, {2, 3}});
  const OperatorPtr wgrad = std::make_shared<LinearWgrad>();
  program.add(wgrad, {x, grad}, {"first"}, {sum});
  program.add(wgrad, {x, grad}, {"second"}, {sum});
  KernelTable zeroing = make_cpu_kernels();
  KernelTable setting = zeroing;
  add_kernel<LinearWgrad>(zeroing, [](const LinearWgrad& op, const KernelArgs& args) {
    ensure(!args.set_accumulators, "a kernel that only adds was asked to write");
    static const KernelTable kernels = make_cpu_kernels();
    kernels.at("linear_wgrad")(op, args);
  });
  const auto run = [&](const KernelTable& kernels, bool unset, float before) {
    const Executable executable(program, kernels);
    Bindings bindings = executable.make_bindings();
    std::vector<float> a{1, 2, 3, 4, 5, 6}, b{1, 0, 0, 1}, c(6, before);
    bindings.tensors[x] = view(std::span(a), {2, 3});
    bindings.tensors[grad] = view(std::span(b), {2, 2});
    bindings.tensors[sum] = view(std::span(c), {2, 3});
    if (unset) bindings.unset = {sum};
    executable.run(bindings);
    return c;
  };
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> twice{2, 4, 6, 8, 10, 12};
  EXPECT_EQ(run(setting, true, kNan), twice);
  EXPECT_EQ(run(zeroing, true, kNan), twice);
  EXPECT_EQ(run(setting, false, 1), (std::vector<float>{3, 5, 7, 9, 11, 13}));
}

/// A head without tokens goes through none of its products.
TEST(Accumulators, ThatHoldNothingAreZeroAfterAnOperatorWithoutRows) {
  Program program("no rows");
  ValueType x{DType::kF32, {5, 3}};
  x.ragged_dim = 0;
  x.extent = program.add_input("tokens", {DType::kI64, {1}});
  ValueType labels = x;
  labels.dtype = DType::kI32;
  labels.shape = {5};
  const std::vector<ValueId> inputs = {
      program.add_input("x", x), program.add_weight("weight", {DType::kF32, {2, 3}}),
      program.add_input("labels", labels), program.add_input("scale", {DType::kF32, {1}})};
  const ValueId sum = program.add_accumulator("sum", {DType::kF32, {2, 3}});
  const auto outputs = program.add(make_linear_cross_entropy_fused(), inputs,
                                   {"loss", "token_loss", "dx", "dweight"}, {sum});
  program.set_outputs({outputs[0], outputs[1], outputs[2]});
  const Executable executable(program, make_cpu_kernels());
  Bindings bindings = executable.make_bindings();
  std::map<ValueId, OwnedTensor> memory;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const ValueType& type = program.type(id);
    OwnedTensor& tensor = memory.emplace(id, OwnedTensor(type.dtype, type.shape)).first->second;
    std::memset(tensor.get().data, 0, tensor.get().num_bytes());
    bindings.tensors[id] = tensor.get();
  }
  const std::span<float> sums = memory.at(sum).get().span<float>();
  std::ranges::fill(sums, std::numeric_limits<float>::quiet_NaN());
  bindings.unset = {sum};
  const Buffer transient(executable.plan().transient_bytes, "scratch");
  bindings.transient = transient.data();
  executable.run(bindings);
  EXPECT_THAT(sums, ::testing::Each(0.0F));
}

TEST(Exchanges, AProgramComputesTheSameWhetherTheyAreStartedOrRun) {
  const KernelTable started = kernels_with(testing::start_slow_copy);
  const KernelTable run = kernels_with(testing::run_slow_copy);
  Random random(3, 0);
  for (int round = 0; round < 200; ++round) {
    const Program program =
        testing::make_random_program(random, 1 + static_cast<int64_t>(random.next_below(40)));
    EXPECT_EQ(testing::run_on_noise(program, started), testing::run_on_noise(program, run))
        << "round " << round;
  }
}

/// Events of a program by node, with the node that was next to run when each wait began.
struct EventLog {
  std::vector<std::string> lines;
  std::vector<NodeEvent> events;
  NodeObserver observer() {
    return [this](const NodeEvent& event) {
      constexpr const char* kPhases[] = {"run", "start", "wait"};
      lines.push_back(fmt::format("{} {}", kPhases[static_cast<size_t>(event.phase)],
                                  event.program.value(event.node.outputs[0]).name));
      events.push_back(event);
    };
  }
};

/// a → copy; meanwhile b + b and its square; then copy + b.
Program make_overlapping() {
  Program program("overlapping");
  const ValueType type{DType::kF32, {4, 4}};
  const ValueId a = program.add_input("a", type);
  const ValueId b = program.add_input("b", type);
  const ValueId copy = program.add1(std::make_shared<SlowCopy>(), {a}, "copy");
  const ValueId twice = program.add1(make_add(), {b, b}, "twice");
  const ValueId more = program.add1(make_add(), {twice, twice}, "more");
  const ValueId last = program.add1(std::make_shared<SlowCopy>(), {more}, "last");
  const ValueId sum = program.add1(make_add(), {copy, b}, "sum");
  program.set_outputs({sum, last});
  return program;
}

TEST(Exchanges, AreWaitedForJustBeforeTheirFirstUse) {
  EventLog log;
  const Program program = make_overlapping();
  EXPECT_EQ(find_waits(program), (std::vector<int>{4, 2, 3, 5, 5}));
  testing::run_on_noise(program, kernels_with(testing::start_slow_copy), log.observer());
  EXPECT_THAT(log.lines, ::testing::ElementsAre("start copy", "run twice", "run more", "start last",
                                                "wait copy", "run sum", "wait last"));
  for (size_t i = 0; i < log.events.size(); ++i) {
    EXPECT_LE(log.events[i].begin, log.events[i].end);
    EXPECT_GE(log.events[i].seconds(), 0);
    if (i > 0) {
      EXPECT_LE(log.events[i - 1].end, log.events[i].begin);
    }
  }
}

/// Scratch memory, inputs and outputs of an exchange are nobody else's until the wait.
TEST(Exchanges, HoldTheirMemoryUntilTheWait) {
  Program program("held");
  const ValueType type{DType::kF32, {4, 4}};
  const ValueId a = program.add_input("a", type);
  const ValueId sent = program.add1(make_add(), {a, a}, "sent");
  const ValueId copy = program.add1(std::make_shared<SlowCopy>(), {sent}, "copy");
  const ValueId b = program.add1(make_add(), {a, a}, "b");
  const ValueId c = program.add1(make_add(), {b, b}, "c");
  const ValueId d = program.add1(make_add(), {c, copy}, "d");
  program.set_outputs({d});
  const auto lifetimes = find_lifetimes(program);
  EXPECT_EQ(lifetimes[sent].last, 3);
  EXPECT_EQ(lifetimes[copy].last, 4);
  EXPECT_EQ(find_workspace_lifetimes(program)[1].last, 3);
  EXPECT_EQ(find_workspace_lifetimes(program)[2].last, 2);
  // sent, copy, b, c and the scratch memory live at once, each in its own place.
  const Backend backend(kernels_with(testing::start_slow_copy));
  const auto workspace = [&](const Operator& op, std::span<const ValueType> inputs) {
    return backend.workspace_bytes(op, inputs);
  };
  EXPECT_EQ(plan_memory(program, {}, workspace).transient_bytes,
            4 * 64 + SlowCopy::kWorkspaceBytes);
}

/// Counts what became of exchanges.
class CountedWork final : public Work {
 public:
  explicit CountedWork(int& abandoned) : abandoned_(abandoned) {}
  void wait() override { ADD_FAILURE() << "waited for while an exception is under way"; }
  bool done() override { return false; }
  void abandon() noexcept override { ++abandoned_; }

 private:
  int& abandoned_;
};

int& abandoned_works() {
  thread_local int count = 0;
  return count;
}

TEST(Exchanges, AreAbandonedWhenAKernelFails) {
  abandoned_works() = 0;
  KernelTable kernels = kernels_with([](const SlowCopy& /*op*/, const KernelArgs& /*args*/) {
    return Pending(std::make_unique<CountedWork>(abandoned_works()));
  });
  add_kernel<Add>(kernels, [](const Add& /*op*/, const KernelArgs& /*args*/) {
    throw UserError("this add fails");
  });
  EXPECT_THROW(testing::run_on_noise(make_overlapping(), kernels), UserError);
  EXPECT_EQ(abandoned_works(), 1);
}

TEST(Executable, RefusesAnAsynchronousKernelOfAnOperatorThatDoesNotCommunicate) {
  KernelTable kernels = kernels_with(testing::start_slow_copy);
  kernels["add"] = kernels["slow_copy"];
  EXPECT_THROW(Executable(make_overlapping(), kernels), InternalError);
}

TEST(Kernels, AreForOneClassOfOperators) {
  KernelTable kernels = make_cpu_kernels();
  add_kernel<Add>(kernels, "linear", [](const Add& /*op*/, const KernelArgs& /*args*/) {});
  EXPECT_THROW(kernels.at("linear")(*make_linear(), {}), InternalError);
  EXPECT_NO_THROW(kernels.at("linear")(*make_add(), {}));
  add_kernel<Add>(
      kernels, [](const Add& /*op*/, const KernelArgs& /*args*/) {},
      {.workspace = [](const Add& /*op*/, std::span<const ValueType> /*inputs*/) { return 64; }});
  EXPECT_EQ(kernels.at("add").workspace_bytes(*make_add(), {}), 64);
  EXPECT_THROW(kernels.at("add").workspace_bytes(*make_linear(), {}), InternalError);
  EXPECT_EQ(kernels.at("sigmoid_gate").workspace_bytes(*make_add(), {}), 0);
}

/// y = x for values of any format.
class Same final : public Operator {
 public:
  static constexpr std::string_view kName = "same";
  enum Input : int { kX };
  enum Output : int { kY };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override {
    return {inputs[kX]};
  }
};

void copy_value(const Same& /*op*/, const Args<Same>& args) {
  const Tensor& x = args.in(Same::kX);
  std::memcpy(args.out(Same::kY).data, x.data, x.num_bytes());
}

bool takes_blocks(const Format& format) {
  return is_unscaled(format) || format == Format(DType::kU8, ScaleLayout::mx());
}

/// A format that no other part of the program knows: its table row and the kernels that offer it.
TEST(Formats, RunWhereKernelsOfferThemAndAreRefusedElsewhere) {
  Program program("scaled");
  ValueType type{DType::kU8, {2, 40}};
  type.scale = ScaleLayout::mx();
  const ValueId x = program.add_input("x", type);
  const ValueId y = program.add1(std::make_shared<Same>(), {x}, "y");
  program.set_outputs({y});
  KernelTable kernels;
  add_kernel<Same>(kernels, copy_value);
  try {
    const Executable refused(program, kernels);
    FAIL() << "a kernel for unscaled values took scaled ones";
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(), "operator 'same' has no kernel for u8 mx on cpu");
  }
  add_kernel<Same>(kernels, copy_value, {.takes = takes_blocks});
  const Executable executable(program, kernels);
  const Buffer from(type.num_bytes(), "a test");
  const Buffer to(type.num_bytes(), "a test");
  std::fill_n(from.data(), from.num_bytes(), std::byte{7});
  Bindings bindings = executable.make_bindings();
  bindings.tensors[x] = {from.data(), type.dtype, type.shape, nullptr, type.scale};
  bindings.tensors[y] = {to.data(), type.dtype, type.shape, nullptr, type.scale};
  executable.run(bindings);
  EXPECT_EQ(std::memcmp(scales_of(bindings.tensors[y]).data, scales_of(bindings.tensors[x]).data,
                        scales_of(bindings.tensors[x]).num_bytes()),
            0);
  bindings.tensors[x].scale = {};
  EXPECT_THROW(executable.run(bindings), InternalError);
}

}  // namespace
}  // namespace tessera

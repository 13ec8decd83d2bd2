#include "ops/spread_norm/spread_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "comm/thread/thread_world.h"
#include "core/slice.h"
#include "ops/add/add.h"
#include "ops/collective/collective.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"

namespace tessera::testing {
namespace {

constexpr double kEps = 1e-5;

KernelTable kernels() {
  KernelTable table;
  add_spread_norm_cpu(table);
  add_collective_cpu(table);
  add_add_cpu(table);
  return table;
}

/// Rows of `width` elements on `parts` · `copies` ranks, each part held by `copies` neighbours.
struct Case {
  int64_t parts = 1;
  int64_t copies = 1;
  int64_t tokens_each = 3;  ///< the ranks' shares of the sums
  int64_t width = 12;
  DType dtype = DType::kF32;

  int64_t num_ranks() const { return parts * copies; }
  int64_t num_tokens() const { return num_ranks() * tokens_each; }
  /// A rank's columns of a row.
  IndexRange columns(int64_t rank) const {
    const int64_t part = rank / copies;
    const int64_t begin = width * part / parts;
    return {begin, width * (part + 1) / parts - begin};
  }
};

/// The whole rows, and the same outputs and gradients by RMSNorm.
struct WholeNorm {
  std::vector<TestInput> inputs;
  OwnedTensor grad_y;
  OwnedTensor y;
  std::vector<OwnedTensor> grads;

  explicit WholeNorm(const Case& c) {
    Random random(3, static_cast<uint64_t>(c.num_tokens() * c.width));
    const Shape shape = {c.num_tokens(), c.width};
    inputs.push_back({random_tensor(c.dtype, shape, random), Role::kValue, "x"});
    inputs.push_back({random_tensor(DType::kF32, {c.width}, random), Role::kWeight, "weight"});
    grad_y = random_tensor(c.dtype, shape, random);
    KernelTable table;
    add_rmsnorm_cpu(table);
    y = std::move(run_operator(*make_rmsnorm(kEps), table, inputs)[0]);
    std::vector<OwnedTensor> grad_outputs(2);
    grad_outputs[0] = OwnedTensor(c.dtype, shape);
    copy_slice_into(Slice::whole(shape), grad_y, grad_outputs[0]);
    grads = run_gradients(make_rmsnorm(kEps), table, inputs, grad_outputs);
  }
};

/// What the ranks leave, put together; gradients of the copies of a part are added.
struct Joined {
  OwnedTensor y, grad_x, grad_weight;

  explicit Joined(const Case& c)
      : y(c.dtype, {c.num_tokens(), c.width}),
        grad_x(DType::kF32, {c.num_tokens(), c.width}),
        grad_weight(DType::kF32, {c.width}) {}
};

/// Adds `from`, of either type, to the slice's elements of `whole` F32.
void add_slice(const Slice& slice, const Tensor& from, const Tensor& whole) {
  const auto values = to_doubles(from);
  const OwnedTensor local = tensor_of(slice.shape(), {values.begin(), values.end()});
  OwnedTensor expanded(DType::kF32, whole.shape);
  copy_slice_into(slice, local, expanded);
  for (size_t i = 0; i < whole.span<float>().size(); ++i)
    whole.span<float>()[i] += expanded.get().span<float>()[i];
}

void scale(const Tensor& tensor, float factor) {
  const auto values = to_doubles(tensor);
  for (size_t i = 0; i < values.size(); ++i) {
    const float scaled = static_cast<float>(values[i]) * factor;
    if (tensor.dtype == DType::kF32) tensor.as<float>()[i] = scaled;
    if (tensor.dtype == DType::kBF16) tensor.as<Bf16>()[i] = Bf16(scaled);
  }
}

Joined run_on_ranks(const Case& c, const WholeNorm& whole) {
  Joined joined(c);
  std::mutex mutex;
  run_thread_world(c.num_ranks(), [&](World& world) {
    const IndexRange columns = c.columns(world.rank());
    const Slice rows = Slice::of_columns({c.num_tokens(), c.width}, columns);
    const Slice elements = Slice::of_rows({c.width}, {columns});
    const CommunicatorPtr group = world.make_world_group();
    Program program("norm");
    const ValueId x = program.add_input("x", {c.dtype, rows.shape()});
    const ValueId weight = program.add_weight("weight", {DType::kF32, elements.shape()});
    const ValueId own = program.add1(make_square_sums(), {x}, "own");
    const ValueId summed = program.add1(make_reduce_scatter(group), {own}, "summed");
    const ValueId sums = program.add1(make_all_gather(group), {summed}, "sums");
    const auto norm = make_spread_norm({.num_elements = c.width * c.copies, .eps = kEps});
    const ValueId y = program.add1(norm, {x, weight, sums}, "y");
    program.set_outputs({y});
    const ProgramRun run(program, {{y}, {x}}, kernels());
    copy_slice_from(rows, whole.inputs[0].tensor, run.value(x));
    copy_slice_from(elements, whole.inputs[1].tensor, run.value(weight));
    copy_slice_from(rows, whole.grad_y, run.grad(y));
    // The copies' gradients differ and add up to the whole one: 1/2 and 1/2, or 1/4, 1/4 and 1/2.
    const int64_t copy = world.rank() % c.copies;
    const auto halvings = static_cast<int>(std::min(c.copies - 1, c.copies - copy));
    if (c.copies > 1) scale(run.grad(y), std::ldexp(1.0F, -halvings));
    run.run_forward();
    run.run_backward();
    const std::scoped_lock lock(mutex);
    copy_slice_into(rows, run.value(y), joined.y);
    add_slice(rows, run.grad(x), joined.grad_x);
    add_slice(elements, run.grad(weight), joined.grad_weight);
  });
  return joined;
}

TEST(SpreadNorm, IsTheNormOfWholeRows) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t parts : {1, 2, 3}) {
      for (const int64_t copies : {1, 2, 3}) {
        for (const int64_t tokens : {0, 1, 5}) {
          const Case c{parts, copies, tokens, 25, dtype};
          SCOPED_TRACE(::testing::Message() << parts << " parts of " << copies << " copies, "
                                            << tokens << " tokens each, " << dtype_name(dtype));
          const WholeNorm whole(c);
          const Joined joined = run_on_ranks(c, whole);
          const bool exact = dtype == DType::kF32;
          expect_rows_near(joined.y, whole.y, exact ? 1e-6 : 4e-3, "y");
          const auto grad_x = to_doubles(whole.grads[0]);
          expect_rows_near(joined.grad_x,
                           tensor_of({c.num_tokens(), c.width}, {grad_x.begin(), grad_x.end()}),
                           exact ? 4e-6 : 1.5e-2, "grad x");
          expect_rows_near(joined.grad_weight, whole.grads[1], exact ? 5e-6 : 1e-2, "grad weight");
        }
      }
    }
  }
}

TEST(SpreadNorm, GradientsAgainstFiniteDifferences) {
  Random random(12, 1);
  std::vector<float> sums;
  for (int row = 0; row < 6; ++row) sums.push_back(9.0F + static_cast<float>(row));
  check_gradients(make_spread_norm({.num_elements = 18, .eps = kEps}), kernels(),
                  list_inputs(TestInput{random_tensor(DType::kF32, {6, 9}, random)},
                              TestInput{random_tensor(DType::kF32, {9}, random), Role::kWeight},
                              TestInput{tensor_of({6}, sums)}));
  check_gradients(make_square_sums(), kernels(),
                  list_inputs(TestInput{random_tensor(DType::kF32, {6, 9}, random)}));
}

TEST(SpreadNorm, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 16}};
  const ValueType weight{DType::kF32, {16}};
  const ValueType sums{DType::kF32, {8}};
  const OperatorPtr norm = make_spread_norm({.num_elements = 32, .eps = kEps});
  EXPECT_EQ(norm->infer(std::vector{x, weight, sums}), std::vector{x});
  EXPECT_EQ(make_square_sums()->infer(std::vector{x}), std::vector{sums});
  EXPECT_EQ(norm->attributes(), "elements=32 eps=1e-05");
  const auto refuses = [](const OperatorPtr& op, const std::vector<ValueType>& wrong,
                          const char* message) {
    EXPECT_THAT([&] { op->infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses(norm, {x, weight, weight}, "the square sums must be f32 [8], got f32 [16]");
  refuses(norm, {x, sums, sums}, "the weight must be f32 [16], got f32 [8]");
  refuses(norm, {x, weight}, "takes 3 inputs, got 2");
  refuses(make_square_sums(), {weight}, "x must be f32 or bf16 [T, n]");
  EXPECT_THROW(make_spread_norm({.num_elements = 0}), UserError);
  EXPECT_THROW(make_spread_norm({.num_elements = 1, .eps = -1}), UserError);
}

}  // namespace
}  // namespace tessera::testing

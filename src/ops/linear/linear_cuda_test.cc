#include "ops/linear/linear.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>

#include "ops/quantize/quantize.h"
#include "ops/testing/addend_gpu_check.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

struct Case {
  int64_t tokens, in, out;
  bool bias = false;
  int64_t extent = -1;  ///< of ragged tokens, at most `tokens`
};

/// Rows up to the extent are normal, those beyond it NaN.
OwnedTensor ragged_values(int64_t rows, int64_t columns, int64_t extent, Random& random) {
  OwnedTensor tensor = random_tensor(DType::kF32, {rows, columns}, random);
  std::fill(tensor.get().as<float>() + extent * columns, tensor.get().as<float>() + rows * columns,
            std::numeric_limits<float>::quiet_NaN());
  return tensor;
}

CheckedProgram build(const Case& c, DType dtype) {
  CheckedProgram checked{Program("linear"), {}};
  Program& program = checked.program;
  ValueType x_type{dtype, {c.tokens, c.in}};
  if (c.extent >= 0) {
    x_type.ragged_dim = 0;
    x_type.extent = program.add_input("rows", {DType::kI64, {1}});
  }
  const ValueId x = program.add_input("x", x_type);
  std::vector<ValueId> inputs{x, program.add_weight("weight", {dtype, {c.out, c.in}})};
  if (c.bias) inputs.push_back(program.add_weight("bias", {DType::kF32, {c.out}}));
  const ValueId y = program.add1(make_linear(c.bias), inputs, "y");
  program.set_outputs({y});
  checked.request = {.outputs = {y}, .inputs = {x}};
  return checked;
}

using Values = std::map<std::string, OwnedTensor>;

class LinearCuda : public GpuTest {
 protected:
  void check(const Case& c, Values values = {}, GpuCheck check = {}) const {
    SCOPED_TRACE(fmt::format("T {} in {} out {} bias {} extent {}", c.tokens, c.in, c.out, c.bias,
                             c.extent));
    Random random(3, static_cast<uint64_t>(c.tokens));
    if (c.extent >= 0) {
      values.emplace("rows", tensor_of_i64({1}, {c.extent}));
      values.emplace("x", ragged_values(c.tokens, c.in, c.extent, random));
      values.emplace("grad.y", ragged_values(c.tokens, c.out, c.extent, random));
    }
    check.values = {values.begin(), values.end()};
    check_on_gpu([&](DType dtype) { return build(c, dtype); }, cpu(), gpu(), check);
  }
};

TEST_F(LinearCuda, MatchesTheCpuInAllShapes) {
  const int64_t shapes[][3] = {{0, 5, 3},       {1, 1, 1},       {7, 16, 33},    {33, 17, 64},
                               {6, 0, 4},       {600, 20, 9},    {64, 4096, 40}, {3000, 64, 72},
                               {256, 128, 384}, {1000, 72, 136}, {4100, 8, 5},   {1, 2048, 512},
                               {2, 8, 2},       {3, 264, 130},   {4, 72, 18},    {1, 24, 7},
                               {1, 40, 20000}};
  for (const auto& [tokens, in, out] : shapes) {
    for (const bool bias : {false, true}) check({tokens, in, out, bias});
  }
}

TEST_F(LinearCuda, RaggedRowsBeyondTheExtentDoNotCount) {
  for (const auto& [tokens, in, out, extent] : {std::array<int64_t, 4>{300, 64, 128, 0},
                                                {300, 64, 128, 1},
                                                {300, 136, 72, 211},
                                                {77, 9, 13, 50},
                                                {300, 200, 48, 300}}) {
    for (const bool bias : {false, true}) check({tokens, in, out, bias, extent});
  }
}

TEST_F(LinearCuda, TinyShape) {
  check({37, 16, 40, true}, {}, {.once = true});
}

TEST_F(LinearCuda, TinyOneRow) {
  check({1, 264, 34, false}, {}, {.once = true});
}

TEST_F(LinearCuda, TinyRaggedRows) {
  check({20, 24, 40, true, 11}, {}, {.once = true});
}

TEST_F(LinearCuda, AddsAnAddend) {
  const int64_t shapes[][3] = {{0, 5, 3},         {1, 1, 1},      {7, 16, 33},  {6, 0, 4},
                               {600, 20, 9},      {3000, 64, 72}, {5, 7, 0},    {256, 128, 384},
                               {1024, 512, 2048}, {1, 4096, 512}, {3, 264, 130}};
  for (const auto& [tokens, in, out] : shapes) {
    SCOPED_TRACE(fmt::format("T {} in {} out {}", tokens, in, out));
    const auto inputs = [](int64_t rows, int64_t width, const Shape& weight) {
      return [=](DType dtype) -> OperatorInputs {
        return {{"x", "w"}, {{dtype, {rows, width}}, {dtype, weight}}};
      };
    };
    check_addend_on_gpu(*make_linear(), inputs(tokens, in, {out, in}), cpu(), gpu());
    check_addend_on_gpu(LinearDgrad(), inputs(tokens, out, {out, in}), cpu(), gpu());
  }
}

TEST_F(LinearCuda, F32KeepsAllBitsOfItsInputs) {
  Random random(4, 1);
  Values values;
  values.emplace("x", random_tensor(DType::kF32, {512, 256}, random));
  values.emplace("weight", random_tensor(DType::kF32, {128, 256}, random));
  values.emplace("grad.y", random_tensor(DType::kF32, {512, 128}, random));
  check({512, 256, 128}, std::move(values), {.tolerance_f32 = 2e-6, .dtypes = {DType::kF32}});
}

/// Products of what a Quantize to F16 gives, forward alone: of halves there are no gradients.
CheckedProgram build_halves(const Case& c) {
  CheckedProgram checked{Program("halves"), {}};
  Program& program = checked.program;
  const auto half = [&](const char* name, const Shape& shape) {
    const ValueId values = program.add_input(name, {DType::kF32, shape});
    return program.add1(make_quantize(half_spec()), {values}, fmt::format("{}.f16", name));
  };
  const ValueId x = half("x", {c.tokens, c.in});
  const ValueId grad = half("grad", {c.tokens, c.out});
  const ValueId weight = half("weight", {c.out, c.in});
  const ValueId added = program.add_input("added", {DType::kF32, {c.tokens, c.out}});
  const ValueId bias = program.add_input("bias", {DType::kF32, {c.out}});
  program.set_outputs(
      {program.add1(make_linear(), {x, weight}, "y"),
       program.add1(make_linear(true), {x, weight, bias}, "with_bias"),
       program.add1(std::make_shared<Linear>(Linear::Extra::kAddend), {x, weight, added}, "sum"),
       program.add1(std::make_shared<LinearDgrad>(), {grad, weight}, "grad_x")});
  return checked;
}

void check_halves(const Case& c, const Backend& cpu, const Backend& gpu, bool once) {
  SCOPED_TRACE(fmt::format("T {} in {} out {}", c.tokens, c.in, c.out));
  check_on_gpu([&](DType /*dtype*/) { return build_halves(c); }, cpu, gpu,
               {.dtypes = {DType::kF32}, .once = once});
}

TEST_F(LinearCuda, HalvesMatchTheCpu) {
  for (const auto& [tokens, in, out] :
       {std::array<int64_t, 3>{1, 1, 1}, {7, 16, 33}, {600, 20, 9}, {256, 128, 384}, {3, 264, 130}})
    check_halves({tokens, in, out}, cpu(), gpu(), false);
}

TEST_F(LinearCuda, TinyHalves) {
  check_halves({5, 24, 16}, cpu(), gpu(), true);
}

}  // namespace
}  // namespace tessera::testing

#include "ops/linear/joined_linear.h"

#include <gtest/gtest.h>

#include "ops/linear/linear.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

struct Case {
  int64_t tokens, in;
  std::vector<int64_t> out;
  bool addend = false;
};

/// Of a size for the joined kernel, for cuBLASLt (rows that are no multiples of 16 bytes, many
/// tiles), and of nothing.
const Case kCases[] = {{0, 64, {64, 64}},
                       {1, 8, {8, 16}, true},
                       {130, 72, {8, 136, 40}},
                       {2048, 384, {384, 128, 128}},
                       {2048, 384, {384, 128, 128}, true},
                       {333, 200, {64, 72, 8, 24}, true},
                       {65, 33, {7, 12}, true},
                       {5000, 512, {512, 512, 512}}};

class JoinedLinearCuda : public GpuTest {
 protected:
  static CheckedProgram products(const Case& c, DType dtype) {
    CheckedProgram checked{Program("products"), {}};
    Program& program = checked.program;
    const ValueId x = program.add_input("x", {dtype, {c.tokens, c.in}});
    std::vector<ValueId> inputs = {x};
    for (const int64_t out : c.out)
      inputs.push_back(program.add_weight(fmt::format("w{}", inputs.size()), {dtype, {out, c.in}}));
    std::vector<std::string> names;
    for (size_t i = 0; i < c.out.size(); ++i) names.push_back(fmt::format("y{}", i));
    const auto outputs =
        program.add(std::make_shared<JoinedLinear>(static_cast<int>(c.out.size())), inputs, names);
    program.set_outputs(outputs);
    return checked;
  }

  static CheckedProgram sums(const Case& c, DType dtype) {
    CheckedProgram checked{Program("sums"), {}};
    Program& program = checked.program;
    std::vector<ValueId> inputs;
    for (size_t i = 0; i < c.out.size(); ++i) {
      inputs.push_back(program.add_input(fmt::format("g{}", i), {dtype, {c.tokens, c.out[i]}}));
      inputs.push_back(program.add_weight(fmt::format("w{}", i), {dtype, {c.out[i], c.in}}));
    }
    if (c.addend) inputs.push_back(program.add_input("addend", {dtype, {c.tokens, c.in}}));
    const ValueId sum =
        program.add1(std::make_shared<JoinedLinearDgrad>(static_cast<int>(c.out.size()), c.addend),
                     inputs, "sum");
    program.set_outputs({sum});
    return checked;
  }

  static CheckedProgram gradients(const Case& c, DType dtype) {
    CheckedProgram checked{Program("gradients"), {}};
    Program& program = checked.program;
    std::vector<ValueId> inputs = {program.add_input("x", {dtype, {c.tokens, c.in}})}, sums;
    for (const int64_t out : c.out) {
      inputs.push_back(
          program.add_input(fmt::format("g{}", inputs.size()), {dtype, {c.tokens, out}}));
      sums.push_back(
          program.add_accumulator(fmt::format("sum{}", sums.size()), {DType::kF32, {out, c.in}}));
    }
    program.add(std::make_shared<JoinedLinearWgrad>(static_cast<int>(c.out.size())), inputs, {},
                sums);
    return checked;
  }
};

TEST_F(JoinedLinearCuda, MatchesTheCpu) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(fmt::format("T {} in {} products {}", c.tokens, c.in, c.out.size()));
    check_on_gpu([&](DType dtype) { return products(c, dtype); }, cpu(), gpu());
    check_on_gpu([&](DType dtype) { return sums(c, dtype); }, cpu(), gpu());
    check_on_gpu([&](DType dtype) { return gradients(c, dtype); }, cpu(), gpu());
  }
}

TEST_F(JoinedLinearCuda, TinyProducts) {
  const Case c{70, 72, {8, 72}, true};
  check_on_gpu([&](DType dtype) { return products(c, dtype); }, cpu(), gpu(),
               {.dtypes = {DType::kBF16}, .once = true});
  check_on_gpu([&](DType dtype) { return sums(c, dtype); }, cpu(), gpu(),
               {.dtypes = {DType::kBF16}, .once = true});
  check_on_gpu([&](DType dtype) { return gradients(c, dtype); }, cpu(), gpu(),
               {.dtypes = {DType::kBF16}, .once = true});
}

}  // namespace
}  // namespace tessera::testing

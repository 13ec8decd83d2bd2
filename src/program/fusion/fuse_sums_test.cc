#include "program/fusion/fuse_sums.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/add/add.h"
#include "ops/linear/linear.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "program/memory_plan.h"
#include "program/testing/exchange_testing.h"
#include "program/testing/program_testing.h"

namespace tessera {
namespace {

constexpr int64_t kTokens = 6;
constexpr int64_t kWidth = 10;
const ValueType kRows{DType::kF32, {kTokens, kWidth}};

KernelTable kernels() {
  KernelTable table = make_cpu_kernels();
  table["slow_copy"] = testing::slow_copy_kernel(testing::start_slow_copy);
  return table;
}

/// Two inputs and a weight, to make programs of.
struct Parts {
  Program program{"sums"};
  ValueId a = program.add_input("a", kRows);
  ValueId b = program.add_input("b", kRows);
  ValueId weight = program.add_weight("weight", {DType::kF32, {kWidth, kWidth}});

  ValueId linear(ValueId x) { return program.add1(make_linear(), {x, weight}, "linear"); }
  ValueId copy(ValueId x) {
    return program.add1(std::make_shared<testing::SlowCopy>(), {x}, "copy");
  }
  ValueId add(ValueId x, ValueId y) { return program.add1(make_add(), {x, y}, "sum"); }
  /// The operators that are left of the program with these outputs.
  std::vector<std::string> fused(std::vector<ValueId> outputs) {
    program.set_outputs(std::move(outputs));
    std::vector<std::string> names;
    const Program result = fuse_sums(program);
    for (const Node& node : result.nodes())
      names.push_back(std::string(node.op->name()) +
                      (node.op->attributes() == "addend" ? "+" : ""));
    return names;
  }
};

using Names = std::vector<std::string>;

TEST(FuseSums, TheOperandMadeLastTakesTheOther) {
  Parts parts;
  const ValueId first = parts.linear(parts.a);
  const ValueId second = parts.linear(parts.b);
  EXPECT_EQ(parts.fused({parts.add(second, first)}), (Names{"linear", "linear+"}));
  Parts chain;
  ValueId sum = chain.linear(chain.a);
  for (int i = 0; i < 3; ++i) sum = chain.add(sum, chain.linear(chain.b));
  EXPECT_EQ(chain.fused({sum}), (Names{"linear", "linear+", "linear+", "linear+"}));
}

TEST(FuseSums, OneAddendForEachOperator) {
  Parts parts;
  const ValueId sum = parts.add(parts.linear(parts.a), parts.b);
  EXPECT_EQ(parts.fused({parts.add(sum, parts.a)}), (Names{"linear+", "add"}));
}

TEST(FuseSums, OperandsThatAreReadElsewhereStay) {
  Parts read;
  const ValueId product = read.linear(read.a);
  const ValueId sum = read.add(product, read.b);
  EXPECT_EQ(read.fused({sum, read.linear(product)}), (Names{"linear", "add", "linear"}));
  Parts output;
  const ValueId y = output.linear(output.a);
  EXPECT_EQ(output.fused({output.add(y, output.b), y}), (Names{"linear", "add"}));
  Parts twice;
  const ValueId x = twice.linear(twice.a);
  EXPECT_EQ(twice.fused({twice.add(x, x)}), (Names{"linear", "add"}));
}

TEST(FuseSums, WhatTakesNoAddendStays) {
  Parts parts;
  EXPECT_EQ(parts.fused({parts.add(parts.a, parts.b)}), (Names{"add"}));
  Parts copied;
  EXPECT_EQ(copied.fused({copied.add(copied.copy(copied.a), copied.b)}),
            (Names{"slow_copy", "add"}));
  Parts ragged;
  const ValueId rows = ragged.program.add_input("rows", {DType::kI64, {1}});
  const ValueType type{DType::kF32, {kTokens, kWidth}, 0, rows};
  const ValueId c = ragged.program.add_input("c", type);
  EXPECT_EQ(ragged.fused({ragged.add(ragged.linear(c), c)}), (Names{"linear", "add"}));
}

TEST(FuseSums, NoProductWaitsForAnExchangeThatItDoesNotNeed) {
  Parts hidden;
  const ValueId sent = hidden.copy(hidden.a);
  EXPECT_EQ(hidden.fused({hidden.add(sent, hidden.linear(hidden.b))}),
            (Names{"slow_copy", "linear", "add"}));
  Parts behind;
  const ValueId both = behind.copy(behind.a);
  EXPECT_EQ(behind.fused({behind.add(both, behind.linear(both))}), (Names{"slow_copy", "linear+"}));
}

/// Sums of all that takes an addend and all that does not, in which any value may be read again.
Program make_sums(Random& random, int64_t num_nodes) {
  Parts parts;
  Program& program = parts.program;
  const ValueId norm = program.add_weight("norm", {DType::kF32, {kWidth}});
  const ValueId norm_grad = program.add_accumulator("grad.norm", {DType::kF32, {kWidth}});
  std::vector<ValueId> values = {parts.a, parts.b};
  const auto pick = [&] { return values[random.next_below(values.size())]; };
  for (int64_t i = 0; i < num_nodes; ++i) {
    const uint64_t kind = random.next_below(9);
    ValueId next = -1;
    if (kind == 0) {
      next = parts.copy(pick());
    } else if (kind == 1) {
      next = parts.linear(pick());
    } else if (kind == 2) {
      next = program.add1(std::make_shared<LinearDgrad>(), {pick(), parts.weight}, "dgrad");
    } else if (kind == 3) {
      const ValueId x = pick();
      const auto y = program.add(make_rmsnorm(1e-5), {x, norm}, {"normed", "rstd"});
      next = program.add(std::make_shared<RmsNormBackward>(), {x, norm, y[1], y[0]}, {"grad"},
                         {norm_grad})[0];
    } else {
      next = parts.add(pick(), random.next_below(2) == 0 ? values.back() : pick());
    }
    values.push_back(next);
  }
  program.set_outputs({values.back()});
  return program;
}

/// The most bytes of intermediates that live at one time.
int64_t peak_of_live(const Program& program) {
  const IdVector<ValueId, Lifetime> lifetimes = find_lifetimes(program);
  int64_t peak = 0;
  for (int at = 0; at < std::ssize(program.nodes()); ++at) {
    int64_t live = 0;
    for (ValueId id = 0; id < program.num_values(); ++id) {
      const Lifetime& lifetime = lifetimes[id];
      const bool lives = lifetime.first <= at && at <= lifetime.last;
      if (lives && program.value(id).kind == ValueKind::kIntermediate && !program.is_output(id))
        live += program.type(id).num_bytes();
    }
    peak = std::max(peak, live);
  }
  return peak;
}

TEST(FuseSums, RandomProgramsKeepTheirNumbersAndTheirMemory) {
  size_t fused = 0;
  for (uint64_t seed = 0; seed < 80; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed, 1);
    const Program plain = make_sums(random, 3 + static_cast<int64_t>(random.next_below(20)));
    const Program result = fuse_sums(plain);
    fused += plain.nodes().size() - result.nodes().size();
    EXPECT_LE(peak_of_live(result), peak_of_live(plain));
    const auto expected = testing::run_on_noise(plain, kernels());
    const auto actual = testing::run_on_noise(result, kernels());
    ASSERT_EQ(expected.size(), actual.size());
    for (const auto& [id, values] : expected) {
      double norm = 0, error = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        norm += std::pow(values[i], 2.0);
        error += std::pow(static_cast<double>(actual.at(id)[i]) - values[i], 2.0);
      }
      EXPECT_LE(std::sqrt(error), 1e-4 * std::sqrt(norm)) << plain.value(id).name;
    }
  }
  EXPECT_GT(fused, 30U);
}

}  // namespace
}  // namespace tessera

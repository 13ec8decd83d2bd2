#include "program/fusion/join_products.h"

#include <gtest/gtest.h>

#include "ops/linear/joined_linear.h"
#include "ops/linear/linear.h"

namespace tessera {
namespace {

using Names = std::vector<std::string>;

Names operators_of(const Program& program) {
  Names names;
  for (const Node& node : program.nodes())
    names.push_back(fmt::format("{} {}", node.op->name(), node.inputs.size()));
  return names;
}

/// Rows that several weights multiply, and gradients of these products that are summed.
struct Parts {
  explicit Parts(int64_t tokens = 256, DType type = DType::kBF16) : dtype(type) {
    x = program.add_input("x", {dtype, {tokens, 64}});
  }

  ValueId weight() {
    return program.add_weight(fmt::format("w{}", program.num_values()), {dtype, {32, 64}});
  }
  ValueId product(ValueId rows, ValueId by) {
    return program.add1(make_linear(), {rows, by}, fmt::format("y{}", program.num_values()));
  }
  ValueId product() { return product(x, weight()); }
  ValueId gradient(std::optional<ValueId> addend = std::nullopt) {
    const int64_t tokens = program.type(x).shape[0];
    const ValueId grad =
        program.add_input(fmt::format("g{}", program.num_values()), {dtype, {tokens, 32}});
    std::vector<ValueId> inputs = {grad, weight()};
    if (addend) inputs.push_back(*addend);
    return program.add1(std::make_shared<LinearDgrad>(addend.has_value()), inputs,
                        fmt::format("d{}", program.num_values()));
  }
  Names joined(const std::vector<ValueId>& outputs, const std::vector<ValueId>& kept = {}) {
    program.set_outputs(outputs);
    result = join_products(program, kept);
    return operators_of(result);
  }

  DType dtype;
  Program program{"products"};
  ValueId x;
  Program result{""};
};

TEST(JoinProducts, OfTheSameRowsBecomeOne) {
  Parts parts;
  const ValueId a = parts.product();
  const ValueId b = parts.product();
  const ValueId c = parts.product();
  EXPECT_EQ(parts.joined({a, b, c}), (Names{"joined_linear 4"}));
  EXPECT_EQ(parts.result.nodes()[0].outputs, (std::vector<ValueId>{a, b, c}));
}

TEST(JoinProducts, AtMostFourAreJoined) {
  Parts parts;
  std::vector<ValueId> outputs;
  for (int i = 0; i < 7; ++i) outputs.push_back(parts.product());
  EXPECT_EQ(parts.joined(outputs), (Names{"joined_linear 5", "joined_linear 4"}));
}

TEST(JoinProducts, OfOtherRowsStay) {
  Parts parts;
  const ValueId a = parts.product();
  const ValueId back = parts.gradient();
  const ValueId b = parts.product(back, parts.weight());
  EXPECT_EQ(parts.joined({a, b}), (Names{"linear 2", "linear_dgrad 2", "linear 2"}));
}

TEST(JoinProducts, LargeOnesAndThoseInF32Stay) {
  Parts large(128 * 265);
  const ValueId a = large.product();
  const ValueId b = large.product();
  EXPECT_EQ(large.joined({a, b}), (Names{"linear 2", "linear 2"}));
  Parts wide(256, DType::kF32);
  const ValueId c = wide.product();
  const ValueId d = wide.product();
  EXPECT_EQ(wide.joined({c, d}), (Names{"linear 2", "linear 2"}));
}

TEST(JoinProducts, SummandsBecomeOneInTheirOrder) {
  for (const bool addend : {false, true}) {
    Parts parts;
    const ValueId first = addend ? parts.gradient(parts.x) : parts.gradient();
    const ValueId second = parts.gradient(first);
    const ValueId third = parts.gradient(second);
    EXPECT_EQ(parts.joined({third}),
              (Names{fmt::format("joined_linear_dgrad {}", addend ? 7 : 6)}));
    const Node& joint = parts.result.nodes()[0];
    EXPECT_EQ(joint.inputs[0], parts.program.nodes()[0].inputs[0]);
    EXPECT_EQ(joint.inputs[4], parts.program.nodes()[2].inputs[0]);
    EXPECT_EQ(joint.inputs.back() == parts.x, addend);
    EXPECT_EQ(joint.outputs, (std::vector<ValueId>{third}));
  }
}

TEST(JoinProducts, GradientsOfWeightsStandWhereTheLastStood) {
  Parts parts;
  std::vector<ValueId> sums, grads;
  const auto weight_gradient = [&](ValueId rows) {
    const ValueId grad = parts.program.add_input(fmt::format("g{}", parts.program.num_values()),
                                                 {parts.dtype, {256, 32}});
    sums.push_back(parts.program.add_accumulator(fmt::format("s{}", parts.program.num_values()),
                                                 {DType::kF32, {32, 64}}));
    grads.push_back(grad);
    parts.program.add(std::make_shared<LinearWgrad>(), {rows, grad}, {}, {sums.back()});
  };
  weight_gradient(parts.x);
  const ValueId other = parts.gradient();
  weight_gradient(parts.x);
  weight_gradient(other);
  EXPECT_EQ(parts.joined({other}),
            (Names{"linear_dgrad 2", "joined_linear_wgrad 3", "linear_wgrad 2"}));
  EXPECT_EQ(parts.result.nodes()[1].outputs, (std::vector<ValueId>{sums[1], sums[0]}));
  EXPECT_EQ(parts.result.nodes()[1].inputs, (std::vector<ValueId>{parts.x, grads[1], grads[0]}));
}

TEST(JoinProducts, SumsThatOthersReadAreMade) {
  Parts output;
  const ValueId a = output.gradient();
  const ValueId b = output.gradient(a);
  const Names apart = {"linear_dgrad 2", "linear_dgrad 3"};
  EXPECT_EQ(output.joined({a, b}), apart);
  Parts kept;
  const ValueId c = kept.gradient();
  const ValueId d = kept.gradient(c);
  EXPECT_EQ(kept.joined({d}, {c}), apart);
}

}  // namespace
}  // namespace tessera

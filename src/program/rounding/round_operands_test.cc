#include "program/rounding/round_operands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/add/add.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/linear/linear.h"
#include "ops/permute/permute.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/round_values/round_values.h"
#include "program/compile/keep_quantized.h"
#include "program/compile/recompute.h"
#include "program/rounding/delayed_roundings.h"
#include "program/rounding/fp8_products.h"
#include "program/testing/program_testing.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kRows = 6;
constexpr int64_t kWidth = 10;
constexpr int64_t kSize = 4;

/// x → linear → FC1 → FC2 → out.
struct Products {
  Program program{"products"};
  ValueId x, out;

  Products() {
    x = program.add_input("x", {DType::kF32, {kRows, kWidth}});
    const ValueId offsets = program.add_input("offsets", {DType::kI64, {3}});
    const ValueId dense = program.add_weight("dense.weight", {DType::kF32, {kWidth, kWidth}});
    const ValueId up = program.add_weight("experts.up.weight", {DType::kF32, {2 * kSize, kWidth}});
    const ValueId down =
        program.add_weight("experts.down.weight", {DType::kF32, {2 * kSize, kWidth}});
    const ValueId y = program.add1(make_linear(), {x, dense}, "y");
    const std::vector<int64_t> sizes = {kSize, kSize};
    const ValueId pre =
        program.add1(make_grouped_matmul({.group_sizes = sizes, .side = GroupedSide::kOut}),
                     {y, up, offsets}, "pre");
    out = program.add1(make_grouped_matmul({.group_sizes = sizes, .side = GroupedSide::kIn}),
                       {pre, down, offsets}, "out");
    program.set_outputs({out});
  }
  Backward backward() const { return differentiate(program, {{out}, {x}}); }
};

std::vector<std::string> list_roundings(const Program& program) {
  std::vector<std::string> lines;
  for (const Node& node : program.nodes()) {
    if (node.op->name() != RoundValues::kName) continue;
    const bool grouped = dynamic_cast<const RoundValues&>(*node.op).spec().offsets;
    lines.push_back(fmt::format("{}: {}{}", program.value(node.inputs[0]).name,
                                node.op->attributes(), grouped ? " by offsets" : ""));
  }
  return lines;
}

/// Of a recipe in which every operand is rounded in its own way.
TEST(RoundOperands, EveryOperandHasItsCast) {
  const Products products;
  const OperandRounding rounding{&find_recipe("nvfp4")};
  EXPECT_THAT(
      list_roundings(round_operands(products.program, rounding)),
      ElementsAre("x: e2m1 1x16 nested along rows", "dense.weight: e2m1 16x16 nested along rows",
                  "y: e2m1 1x16 nested along rows by offsets",
                  "experts.up.weight: e2m1 16x16 nested along rows",
                  "pre: e2m1 1x16 nested along rows by offsets",
                  "experts.down.weight: e2m1 16x16 nested down columns"));
  const Backward backward = round_operands(products.program, products.backward(), rounding);
  const std::string grad = " nested stochastic along rows";
  const std::string tokens = " nested rotated down columns";
  const std::string token_grad = " nested rotated stochastic down columns";
  const auto lines = list_roundings(backward.program);
  const auto name_of = [&](const std::string& reader, int input) {
    for (const Node& node : backward.program.nodes())
      if (node.op->name() == reader) return backward.program.value(node.inputs[input]).name;
    return std::string("?");
  };
  EXPECT_EQ(name_of("linear_wgrad", LinearWgrad::kX), "x.rounded");
  EXPECT_THAT(
      lines, ::testing::UnorderedElementsAre(
                 "grad.out: e2m1 1x16" + grad + " by offsets",
                 "experts.down.weight: e2m1 16x16 nested along rows",
                 "pre: e2m1 1x16" + tokens + " by offsets",
                 "grad.out: e2m1 1x16" + token_grad + " by offsets",
                 "grouped_matmul: e2m1 1x16" + grad + " by offsets",
                 "experts.up.weight: e2m1 16x16 nested down columns",
                 "y: e2m1 1x16" + tokens + " by offsets",
                 "grouped_matmul: e2m1 1x16" + token_grad + " by offsets",
                 "grouped_matmul: e2m1 1x16" + grad, "dense.weight: e2m1 16x16 nested down columns",
                 "x: e2m1 1x16" + tokens, "grouped_matmul: e2m1 1x16" + token_grad));
}

/// "x, dense.weight -> linear f32" of each product of halves.
std::vector<std::string> list_half_products(const Program& program) {
  std::vector<std::string> lines;
  for (const Node& node : program.nodes()) {
    if (node.op->name() == Quantize::kName) continue;
    EXPECT_EQ(program.type(node.inputs[0]).dtype, DType::kF16) << node.op->name();
    EXPECT_EQ(program.type(node.inputs[1]).dtype, DType::kF16) << node.op->name();
    EXPECT_EQ(program.type(node.outputs[0]).dtype, DType::kF32) << node.op->name();
    lines.push_back(fmt::format("{}, {} -> {}", program.value(node.inputs[0]).name,
                                program.value(node.inputs[1]).name, node.op->name()));
  }
  return lines;
}

/// Every operand of every product is rounded once, and what is saved is what forward products read.
TEST(RoundOperands, ProductsReadHalvesAndGiveF32) {
  const Products products;
  const OperandRounding rounding{.recipe = &f16_recipe(), .keeps_rounded = true};
  const Program forward = round_operands(products.program, rounding);
  EXPECT_THAT(list_half_products(forward),
              ElementsAre("x, dense.weight -> linear", "y, experts.up.weight -> grouped_matmul",
                          "pre, experts.down.weight -> grouped_matmul"));
  const Backward backward = round_operands(products.program, products.backward(), rounding);
  EXPECT_THAT(list_half_products(backward.program),
              ::testing::UnorderedElementsAre("grad.out, experts.down.weight -> grouped_matmul",
                                              "pre, grad.out -> grouped_matmul_wgrad",
                                              "grouped_matmul, experts.up.weight -> grouped_matmul",
                                              "grouped_matmul, y -> grouped_matmul_wgrad",
                                              "grouped_matmul, dense.weight -> linear_dgrad",
                                              "x, grouped_matmul -> linear_wgrad"));
  for (const Link& link : keep_quantized(forward, backward).saved)
    EXPECT_EQ(forward.type(link.forward).dtype, DType::kF16) << forward.value(link.forward).name;
}

/// Weights that something else reads, or whose blocks matrices would share, stay as they were.
TEST(RoundOperands, StoresWhatProductsAloneReadInFp8) {
  Program program;
  const ValueId x = program.add_input("x", {DType::kBF16, {128, 128}});
  const ValueId offsets = program.add_input("offsets", {DType::kI64, {3}});
  const auto weight = [&](const char* name, int64_t rows) {
    return program.add_weight(name, {DType::kBF16, {rows, 128}});
  };
  const auto linear = [&](const char* name, int64_t rows) {
    return program.add1(make_linear(), {x, weight(name, rows)}, "y");
  };
  const auto experts = [&](const char* name, int64_t rows) {
    return program.add1(
        make_grouped_matmul({.group_sizes = {rows, rows}, .side = GroupedSide::kOut}),
        {x, weight(name, 2 * rows), offsets}, "y");
  };
  std::vector<ValueId> outputs = {linear("dense", 256), linear("narrow", 192), linear("left", 128),
                                  experts("experts", 128), experts("small_experts", 64)};
  const ValueId shared = weight("shared", 128);
  outputs.push_back(program.add1(make_linear(), {x, shared}, "y"));
  outputs.push_back(program.add1(make_add(), {x, shared}, "y"));
  program.set_outputs(outputs);
  OperandRounding rounding{.recipe = &find_recipe("blockwise"), .plain = {"left"}};
  EXPECT_TRUE(list_fp8_weights(program, rounding).empty());
  rounding.fp8_weights = true;
  EXPECT_THAT(list_fp8_weights(program, rounding), ElementsAre("dense", "experts"));
  const Program rounded = round_operands(program, rounding);
  for (const Value& value : rounded.values()) {
    if (value.kind != ValueKind::kWeight) continue;
    const bool is_fp8 = value.name == "dense" || value.name == "experts";
    EXPECT_EQ(value.type.format(), is_fp8 ? fp8_weight_format() : Format(DType::kBF16))
        << value.name;
  }
  EXPECT_FALSE(can_store_weights(find_recipe("rowwise")));
}

/// A value that several products read rounded alike is rounded once.
TEST(RoundOperands, RoundsAValueOnce) {
  Program program;
  const ValueId x = program.add_input("x", {DType::kF32, {kRows, kWidth}});
  std::vector<ValueId> outputs;
  for (const std::string name : {"q", "k"}) {
    const ValueId weight = program.add_weight(name + ".weight", {DType::kF32, {kSize, kWidth}});
    outputs.push_back(program.add1(make_linear(), {x, weight}, name));
  }
  program.set_outputs(outputs);
  EXPECT_THAT(list_roundings(round_operands(program, {&find_recipe("mxfp8")})),
              ElementsAre("x: e4m3 1x32 along rows", "q.weight: e4m3 1x32 along rows",
                          "k.weight: e4m3 1x32 along rows"));
}

TEST(RoundOperands, LeavesPlainWeightsAlone) {
  const Products products;
  const auto count = [&](const std::vector<std::string>& plain) {
    const OperandRounding rounding{&find_recipe("rowwise"), plain};
    return list_roundings(round_operands(products.program, rounding)).size() * 100 +
           list_roundings(round_operands(products.program, products.backward(), rounding).program)
               .size();
  };
  EXPECT_EQ(count({}), 612U);
  EXPECT_EQ(count({"dense"}), 408U);
  EXPECT_EQ(count({"experts.down"}), 408U);
  EXPECT_EQ(count({"experts", "dense.weight"}), 0U);
  EXPECT_EQ(count({"exp"}), 612U);
  EXPECT_EQ(count({"all"}), 0U);
  EXPECT_THAT(product_weights(products.program),
              ElementsAre("dense.weight", "experts.up.weight", "experts.down.weight"));
}

/// x → linear → + x → FC1 → FC2 → out, in BF16, of sizes that tensor cores take.
struct Fp8Products {
  static constexpr int64_t kTokens = 24;
  static constexpr int64_t kHidden = 256;
  static constexpr int64_t kInner = 128;

  Program program{"fp8"};
  ValueId x, out;

  Fp8Products() {
    const DType dtype = DType::kBF16;
    x = program.add_input("x", {dtype, {kTokens, kHidden}});
    const ValueId offsets = program.add_input("offsets", {DType::kI64, {4}});
    const ValueId dense = program.add_weight("dense.weight", {dtype, {kHidden, kHidden}});
    const ValueId up = program.add_weight("experts.up.weight", {dtype, {3 * kInner, kHidden}});
    const ValueId down = program.add_weight("experts.down.weight", {dtype, {3 * kInner, kHidden}});
    const OperatorPtr linear = std::make_shared<Linear>(Linear::Extra::kAddend);
    const ValueId y = program.add1(linear, {x, dense, x}, "y");
    const std::vector<int64_t> sizes(3, kInner);
    const ValueId pre =
        program.add1(make_grouped_matmul({.group_sizes = sizes}), {y, up, offsets}, "pre");
    out = program.add1(make_grouped_matmul({.group_sizes = sizes, .side = GroupedSide::kIn}),
                       {pre, down, offsets}, "out");
    program.set_outputs({out});
  }

  /// What the rounded programs give, by name: the result, the gradients of x and of the weights.
  std::map<std::string, std::vector<float>> run(const OperandRounding& rounding) const {
    std::map<std::string, std::vector<float>> results;
    const auto run_one = [&](const Program& part) {
      for (auto& [id, values] : testing::run_on_noise(part, make_cpu_kernels(), {}, kOffsets))
        results[part.value(id).name] = std::move(values);
    };
    run_one(round_operands(program, rounding));
    run_one(round_operands(program, backward(), rounding).program);
    return results;
  }
  Backward backward() const { return differentiate(program, {{out}, {x}}); }

  inline static const std::map<std::string, std::vector<int64_t>> kOffsets = {
      {"offsets", {0, 5, 5, kTokens}}};
};

/// The names of products.
std::vector<std::string> list_products(const Program& program) {
  std::vector<std::string> lines;
  for (const Node& node : program.nodes()) {
    if (node.op->name().find("linear") != std::string_view::npos ||
        node.op->name().find("matmul") != std::string_view::npos ||
        node.op->name().find("wgrad") != std::string_view::npos)
      lines.emplace_back(node.op->name());
  }
  return lines;
}

TEST(RoundOperands, TensorCoresMultiplyFp8) {
  const Fp8Products products;
  for (const char* recipe : {"rowwise", "blockwise"}) {
    SCOPED_TRACE(recipe);
    OperandRounding rounding{&find_recipe(recipe)};
    const auto emulated = products.run(rounding);
    rounding.fp8_products = true;
    EXPECT_THAT(
        list_products(round_operands(products.program, rounding)),
        ElementsAre("scaled_grouped_matmul", "scaled_grouped_matmul", "scaled_grouped_matmul"));
    const bool has_wgrads = std::string(recipe) == "rowwise";
    const auto backward =
        list_products(round_operands(products.program, products.backward(), rounding).program);
    EXPECT_EQ(backward.size(), 6);
    EXPECT_EQ(std::ranges::count(backward, "scaled_grouped_matmul"), 3);
    EXPECT_EQ(std::ranges::count(backward, "scaled_grouped_wgrad"), has_wgrads ? 3 : 0);
    const auto found = products.run(rounding);
    ASSERT_EQ(found.size(), emulated.size());
    for (const auto& [name, values] : found) {
      SCOPED_TRACE(name);
      const std::vector<float>& expected = emulated.at(name);
      double difference = 0;
      double norm = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        difference += (values[i] - expected[i]) * (values[i] - expected[i]);
        norm += expected[i] * expected[i];
      }
      // Roundings of results to BF16 that differ let some of the next operands' differ by 1/16.
      EXPECT_LE(difference, 1e-3 * norm);
      EXPECT_GT(norm, 0);
    }
  }
}

/// What the gradient of a weight [rows, columns] of 40 tokens becomes.
std::optional<Fp8Wgrad> find_gradient(const char* recipe, int64_t rows, int64_t columns,
                                      DType dtype = DType::kBF16) {
  const Recipe& casts = find_recipe(recipe);
  const ValueType narrow{dtype, {40, rows}};
  const ValueType wide{dtype, {40, columns}};
  return find_fp8_wgrad({narrow, {.cast = casts.token_gradient, .sum_dim = 0}},
                        {wide, {.cast = casts.token_activation, .sum_dim = 0}},
                        ExpertSizes({rows}, "test"));
}

TEST(RoundOperands, GradientsOfWeightsInFp8NeedSizesThatSuit) {
  EXPECT_EQ(find_gradient("rowwise", 48, 16)->scales, TokenScales::kGroup);
  EXPECT_FALSE(find_gradient("rowwise", 40, 16));
  EXPECT_FALSE(find_gradient("rowwise", 48, 24));
  EXPECT_FALSE(find_gradient("rowwise", 48, 16, DType::kF32));
  for (const char* recipe : {"tensorwise", "blockwise", "mxfp8", "nvfp4"})
    EXPECT_FALSE(find_gradient(recipe, 48, 16)) << recipe;
}

/// A product of permuted tokens, which may gather them itself; of as many as came, where they are
/// ragged.
struct PermutedProduct {
  static constexpr int64_t kTokens = 8;

  Program program;
  ValueId y;

  explicit PermutedProduct(bool gathers, bool is_ragged = false) {
    ValueType tokens{DType::kBF16, {kTokens, 32}};
    if (is_ragged) {
      tokens.ragged_dim = 0;
      tokens.extent = program.add_input("tokens", {DType::kI64, {1}});
    }
    const ValueId x = program.add_input("x", tokens);
    const ValueId source = program.add_input("source", {DType::kI32, {2 * kTokens}});
    const ValueId row_of =
        program.add_input("row_of", with_last_dim(with_dtype(tokens, DType::kI32), 2));
    const ValueId offsets = program.add_input("offsets", {DType::kI64, {3}});
    const ValueId weight = program.add_weight("weight", {DType::kBF16, {16, 32}});
    const OperatorPtr product = make_grouped_matmul({.group_sizes = {8, 8}, .gather = gathers});
    if (gathers) {
      y = program.add1(product, {x, weight, offsets, source, row_of}, "y");
    } else {
      const ValueId rows = program.add1(make_permute(), {x, source, row_of}, "rows");
      y = program.add1(product, {rows, weight, offsets}, "y");
    }
    program.set_outputs({y});
  }

  Program round(bool fp8_products) const {
    OperandRounding rounding{&find_recipe("rowwise")};
    rounding.fp8_products = fp8_products;
    return round_operands(program, rounding);
  }
  std::vector<float> run(bool fp8_products) const {
    return testing::run_on_noise(
               round(fp8_products), make_cpu_kernels(), {},
               {{"tokens", {kTokens}},
                {"offsets", {0, 7, 2 * kTokens}},
                {"source", {5, 0, 3, -1, 9, 15, 2, 8, 1, 4, 7, 6, 11, -1, 13, 10}},
                {"row_of", std::vector<int64_t>(2 * kTokens, 0)}})
        .at(y);
  }
};

/// The numbers are those of permuting first.
TEST(RoundOperands, TokensAreQuantizedBeforeTheyArePermuted) {
  for (const bool is_ragged : {false, true}) {
    const PermutedProduct apart(false, is_ragged);
    const PermutedProduct gathering(true, is_ragged);
    std::vector<std::string> names;
    const Program rounded = gathering.round(true);
    for (const Node& node : rounded.nodes()) names.emplace_back(node.op->name());
    EXPECT_THAT(names, ElementsAre("quantize", "permute", "quantize", "scaled_grouped_matmul"));
    const std::vector<float> expected = apart.run(false);
    EXPECT_EQ(gathering.run(false), expected);
    const std::vector<float> found = apart.run(true);
    EXPECT_EQ(gathering.run(true), found);
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 0.1);
  }
}

TEST(RoundOperands, OtherProductsAreEmulated) {
  const Fp8Products products;
  for (const char* recipe : {"tensorwise", "mxfp8", "nvfp4"}) {
    OperandRounding rounding{&find_recipe(recipe)};
    rounding.fp8_products = true;
    EXPECT_THAT(list_products(round_operands(products.program, rounding)),
                ElementsAre("linear", "grouped_matmul", "grouped_matmul"))
        << recipe;
  }
  OperandRounding rounding{&find_recipe("rowwise")};
  rounding.fp8_products = true;
  EXPECT_THAT(list_products(round_operands(Products().program, rounding)),  // of F32
              ElementsAre("linear", "grouped_matmul", "grouped_matmul"));
}

TEST(RoundOperands, WeightGradientsCanReadWhatIsNotRounded) {
  const Products products;
  const OperandRounding rounding{.recipe = &find_recipe("mxfp8"), .plain_weight_gradients = true};
  EXPECT_EQ(list_roundings(round_operands(products.program, rounding)).size(), 6U);
  EXPECT_EQ(list_roundings(round_operands(products.program, products.backward(), rounding).program)
                .size(),
            6U);
}

/// By delayed scales, a value is rounded once for all products that read it and either pass.
TEST(RoundOperands, DelayedScalesAreOfOperands) {
  Program program;
  const ValueId x = program.add_input("x", {DType::kF32, {kRows, kWidth}});
  std::vector<ValueId> outputs;
  for (const std::string name : {"q", "k"}) {
    const ValueId weight = program.add_weight(name + ".weight", {DType::kF32, {kSize, kWidth}});
    outputs.push_back(program.add1(make_linear(), {x, weight}, name));
  }
  program.set_outputs(outputs);
  const OperandRounding rounding{.recipe = &find_recipe("tensorwise_delayed"), .overflows = true};
  const Program forward = round_operands(program, rounding);
  // k before q, and of each activation, weight, gradient.
  EXPECT_THAT(list_roundings(forward), ElementsAre("x: e4m3 delayed 3 0, overflows, tallied",
                                                   "q.weight: e4m3 delayed 4, overflows, tallied",
                                                   "k.weight: e4m3 delayed 1, overflows, tallied"));
  EXPECT_EQ(forward.type(forward.find(kScalesName)).shape, (Shape{6}));
  EXPECT_EQ(forward.type(forward.find(kTallyName)).shape, (Shape{6, 4}));
  const Backward backward =
      round_operands(program, differentiate(program, {outputs, {x}}), rounding);
  EXPECT_THAT(list_roundings(backward.program),
              ::testing::UnorderedElementsAre("grad.k: e5m2 delayed 2, overflows, tallied",
                                              "k.weight: e4m3 delayed 1, overflows",
                                              "x: e4m3 delayed 0, overflows",
                                              "grad.q: e5m2 delayed 5, overflows, tallied",
                                              "q.weight: e4m3 delayed 4, overflows"));
  EXPECT_EQ(backward.program.type(backward.program.find(kGradScalesName)).shape, (Shape{6}));
}

/// What runs again tallies nothing.
TEST(RoundOperands, RecomputedRoundingsAreNotTallied) {
  const Products products;
  const OperandRounding rounding{&find_recipe("tensorwise_delayed")};
  const Backward backward = round_operands(products.program, products.backward(), rounding);
  const Program forward = round_operands(products.program, rounding);
  const Backward again = recompute(forward, backward, {forward.find("pre")});
  const auto tallied = [](const Program& program) {
    return std::ranges::count_if(list_roundings(program),
                                 [](const auto& line) { return line.ends_with("tallied"); });
  };
  EXPECT_GT(list_roundings(again.program).size(), list_roundings(backward.program).size());
  EXPECT_EQ(tallied(again.program), tallied(backward.program));
}

/// What the product gives is that of the values that its operands were rounded to.
TEST(RoundOperands, ProductsReadWhatWasRounded) {
  Program plain;
  const ValueId x = plain.add_input("x", {DType::kF32, {kRows, kWidth}});
  const ValueId weight = plain.add_weight("weight", {DType::kF32, {kSize, kWidth}});
  const ValueId y = plain.add1(make_linear(), {x, weight}, "y");
  plain.set_outputs({y});
  Program rounded = round_operands(plain, {&find_recipe("tensorwise")});
  const ValueId rounded_x = rounded.find("x.rounded");
  const ValueId rounded_weight = rounded.find("weight.rounded");
  rounded.set_outputs({y, rounded_x, rounded_weight});
  const KernelTable kernels = make_cpu_kernels();
  auto results = testing::run_on_noise(rounded, kernels);
  for (int64_t t = 0; t < kRows; ++t) {
    for (int64_t f = 0; f < kSize; ++f) {
      double sum = 0;
      for (int64_t k = 0; k < kWidth; ++k)
        sum += static_cast<double>(results[rounded_x][t * kWidth + k]) *
               results[rounded_weight][f * kWidth + k];
      EXPECT_NEAR(results[y][t * kSize + f], sum, 1e-5);
    }
  }
  EXPECT_NE(testing::run_on_noise(plain, kernels).at(y), results[y]);
}

}  // namespace
}  // namespace tessera

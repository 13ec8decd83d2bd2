// Products with an activation: the bits of the two operators that they stand for.
#include "ops/expert_activation/activated_product_testing.h"

namespace tessera {
namespace {

using testing::check_activated;

Backend host() {
  KernelTable table;
  add_grouped_matmul_cpu(table);
  add_expert_activation_cpu(table);
  add_activated_product_cpu(table);
  return Backend(table);
}

TEST(ActivatedProduct, GivesTheBitsOfProductAndActivation) {
  const Backend backend = host();
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Activation kind : {Activation::kSwiGLU, Activation::kGeGLU, Activation::kGelu}) {
      for (const bool prob : {true, false}) {
        check_activated({{8, 8, 8}, {3, 0, 17}, 24, 0, kind, prob, 0, dtype}, ++seed, backend, 0);
        check_activated({{5, 13}, {1, 9}, 7, 0, kind, prob, 0, dtype}, ++seed, backend, 0);
        check_activated({{16, 16}, {6, 11}, 40, 0, kind, prob, 3, dtype}, ++seed, backend, 0);
      }
    }
  }
  check_activated({{8, 8}, {0, 0}}, ++seed, backend, 0);
}

TEST(ActivatedProduct, RefusesWhatDoesNotFit) {
  const GroupedMatmul product({.group_sizes = {16, 16}});
  const ExpertActivation fits({.expert_sizes = {8, 8}, .apply_prob = true});
  const ExpertActivation other({.expert_sizes = {16, 16}});
  EXPECT_THROW(ActivatedProduct(product, other, true), UserError);
  EXPECT_THROW(ActivationGradProduct(product, fits), UserError);
  EXPECT_THROW(
      ActivationGradProduct(GroupedMatmul({.group_sizes = {8, 8}, .side = GroupedSide::kIn}), fits),
      UserError);
  const ActivatedProduct op(product, fits, true);
  const ValueType a{.dtype = DType::kF32, .shape = {5, 24}};
  const ValueType weight{.dtype = DType::kF32, .shape = {32, 24}};
  const ValueType offsets{.dtype = DType::kI64, .shape = {3}};
  const ValueType probs{.dtype = DType::kF32, .shape = {5}};
  const auto infer = [&](std::vector<ValueType> types) { return op.infer(types); };
  const auto made = infer({a, weight, offsets, probs, offsets});
  ASSERT_EQ(made.size(), 2);
  EXPECT_EQ(made[0].shape, (Shape{5, 8}));
  EXPECT_EQ(made[1].shape, (Shape{5, 16}));
  EXPECT_THROW(infer({a, weight, offsets}), UserError);
  EXPECT_THROW(infer({a, weight, offsets, offsets}), UserError);
  EXPECT_THROW(infer({a, weight, offsets, with_dtype(probs, DType::kBF16), offsets}), UserError);
}

TEST(ActivatedProduct, CostsItsProduct) {
  const GroupedMatmul product({.group_sizes = {16, 16}});
  const ActivatedProduct op(product, ExpertActivation({.expert_sizes = {8, 8}}), false);
  const std::vector<ValueType> inputs{{.dtype = DType::kF32, .shape = {5, 24}},
                                      {.dtype = DType::kF32, .shape = {32, 24}},
                                      {.dtype = DType::kI64, .shape = {3}},
                                      {.dtype = DType::kI64, .shape = {3}}};
  EXPECT_EQ(op.cost(inputs, op.infer(inputs)).flops, 2.0 * 5 * 24 * 16);
}

}  // namespace
}  // namespace tessera

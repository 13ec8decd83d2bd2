#include "program/fusion/fuse_quantize.h"

#include <gtest/gtest.h>

#include "ops/expert_activation/expert_activation.h"
#include "program/testing/expert_parts_testing.h"

namespace tessera {
namespace {

using testing::Names;
using testing::operators_of;

const QuantizeSpec kShortBlocks = {.scale = ScaleLayout::block(1, 128)};

/// An activation of two experts of the size, whose result is quantized.
Program make_program(int64_t size, const QuantizeSpec& spec) {
  Program program("quantized");
  const ValueId pre = program.add_input("pre", {DType::kBF16, {6, 2 * size}});
  const ValueId offsets = program.add_input("offsets", {DType::kI64, {3}});
  const ValueId act =
      program.add1(make_expert_activation({.expert_sizes = {size, size}}), {pre, offsets}, "act");
  const ValueId twice = program.add1(make_add(), {act, act}, "twice");
  const ValueId fp8 = program.add1(make_quantize(spec), {act}, "act.fp8");
  program.set_outputs({act, twice, fp8});
  return program;
}

TEST(FuseQuantize, AnActivationGivesItsFp8) {
  const Program program = make_program(256, kShortBlocks);
  const Program result = fuse_quantize(program);
  EXPECT_EQ(operators_of(result), (Names{"expert_activation 2", "add 1"}));
  EXPECT_EQ(result.outputs(), program.outputs());
  EXPECT_EQ(result.nodes()[0].outputs.back(), program.outputs()[2]);
  EXPECT_EQ(operators_of(fuse_quantize(result)), operators_of(result));
}

TEST(FuseQuantize, OtherScalesAndSizesStay) {
  const Names names = {"expert_activation 1", "add 1", "quantize 1"};
  for (const QuantizeSpec& spec :
       {QuantizeSpec{}, QuantizeSpec{.scale = ScaleLayout::block(1, 32)},
        QuantizeSpec{.element = DType::kE5M2, .scale = kShortBlocks.scale}})
    EXPECT_EQ(operators_of(fuse_quantize(make_program(256, spec))), names);
  EXPECT_EQ(operators_of(fuse_quantize(make_program(192, kShortBlocks))), names);
}

TEST(FuseQuantize, AGradientGivesItsFp8AndOneOnly) {
  Program program("gradient");
  const ExpertActivation forward({.expert_sizes = {128, 128}, .apply_prob = true});
  const ValueId grad = program.add_input("grad", {DType::kBF16, {6, 128}});
  const ValueId pre = program.add_input("pre", {DType::kBF16, {6, 256}});
  const ValueId probs = program.add_input("probs", {DType::kF32, {6}});
  const ValueId offsets = program.add_input("offsets", {DType::kI64, {3}});
  const auto grads = program.add(std::make_shared<ExpertActivationBackward>(forward),
                                 {grad, pre, probs, offsets}, {"grad_pre", "grad_probs"});
  const ValueId once = program.add1(make_quantize(kShortBlocks), {grads[0]}, "once");
  const ValueId again = program.add1(make_quantize(kShortBlocks), {grads[0]}, "again");
  program.set_outputs({grads[0], grads[1], once, again});
  const Program result = fuse_quantize(program);
  EXPECT_EQ(operators_of(result), (Names{"expert_activation_backward 3", "quantize 1"}));
}

TEST(FuseQuantize, WhatComesFromOutsideStays) {
  Program program("input");
  const ValueId x = program.add_input("x", {DType::kBF16, {6, 128}});
  program.set_outputs({program.add1(make_quantize(kShortBlocks), {x}, "x.fp8")});
  EXPECT_EQ(operators_of(fuse_quantize(program)), (Names{"quantize 1"}));
}

}  // namespace
}  // namespace tessera

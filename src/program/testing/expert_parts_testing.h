#pragma once

#include <string>
#include <vector>

#include "ops/add/add.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "program/program.h"

namespace tessera::testing {

/// A program of experts' products and activations in the making.
struct ExpertParts {
  static constexpr int64_t kRows = 6;
  static constexpr int64_t kWidth = 10;
  static constexpr int64_t kSize = 4;

  Program program{"experts"};
  ValueId a, fc1, fc2, offsets, others, probs;

  ExpertParts() {
    a = program.add_input("a", {DType::kF32, {kRows, kWidth}});
    fc1 = program.add_weight("fc1", {DType::kF32, {4 * kSize, kWidth}});
    fc2 = program.add_weight("fc2", {DType::kF32, {2 * kSize, kWidth}});
    offsets = program.add_input("offsets", {DType::kI64, {3}});
    others = program.add_input("other_offsets", {DType::kI64, {3}});
    probs = program.add_input("probs", {DType::kF32, {kRows}});
  }

  ValueId product() {
    return program.add1(make_grouped_matmul({{2 * kSize, 2 * kSize}, GroupedSide::kOut}),
                        {a, fc1, offsets}, "pre");
  }
  /// What product() makes, kept by a forward pass.
  ValueId kept_pre() { return program.add_input("pre", {DType::kF32, {kRows, 2 * kSize}}); }
  ValueId activation(ValueId pre, ValueId by, bool apply_prob = true) {
    std::vector<ValueId> inputs = {pre};
    if (apply_prob) inputs.push_back(probs);
    inputs.push_back(by);
    return program.add1(
        make_expert_activation({.expert_sizes = {kSize, kSize}, .apply_prob = apply_prob}), inputs,
        "act");
  }
  ValueId grad_of_act() {
    return program.add1(make_grouped_matmul({{kSize, kSize}, GroupedSide::kOut}), {a, fc2, offsets},
                        "grad_act");
  }
  std::vector<ValueId> backward(ValueId grad, ValueId pre) {
    const ExpertActivation forward({.expert_sizes = {kSize, kSize}, .apply_prob = true});
    return program.add(std::make_shared<ExpertActivationBackward>(forward),
                       {grad, pre, probs, offsets}, {"grad_pre", "grad_probs"});
  }
  /// Something that reads a value.
  ValueId twice(ValueId id) { return program.add1(make_add(), {id, id}, "twice"); }

  Program with_outputs(std::vector<ValueId> outputs) {
    program.set_outputs(std::move(outputs));
    return program;
  }
};

using Names = std::vector<std::string>;

/// The operators, each with how many values it gives.
inline Names operators_of(const Program& program) {
  Names names;
  for (const Node& node : program.nodes())
    names.push_back(fmt::format("{} {}", node.op->name(), node.outputs.size()));
  return names;
}

}  // namespace tessera::testing

#pragma once

#include "comm/communicator.h"
#include "ops/activation/activation.h"
#include "ops/add/add.h"
#include "ops/collective/collective.h"
#include "ops/linear/linear.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "program/differentiate.h"

namespace tessera::testing {

/// An MLP block with tensor and sequence parallelism, as the passes meet them: norm of a rank's own
/// tokens, all-gather, column-parallel product, activation, row-parallel product, reduce-scatter,
/// residual.
struct TpBlock {
  Program program{"tp_block"};
  ValueId x, norm_weight, fc1, fc2, out;

  TpBlock(const CommunicatorPtr& group, int64_t tokens, int64_t hidden, int64_t inner) {
    x = program.add_input("x", {DType::kF32, {tokens, hidden}});
    norm_weight = program.add_weight("norm", {DType::kF32, {hidden}});
    fc1 = program.add_weight("fc1", {DType::kF32, {inner, hidden}});
    fc2 = program.add_weight("fc2", {DType::kF32, {hidden, inner}});
    const ValueId normed = program.add(make_rmsnorm(1e-5), {x, norm_weight}, {"normed", "rstd"})[0];
    const ValueId gathered = program.add1(make_all_gather(group), {normed}, "gathered");
    const ValueId up = program.add1(make_linear(), {gathered, fc1}, "up");
    const ValueId act = program.add1(make_activation(Activation::kGelu), {up}, "act");
    const ValueId part = program.add1(make_linear(), {act, fc2}, "part");
    const ValueId sum = program.add1(make_reduce_scatter(group), {part}, "sum");
    out = program.add1(make_add(), {x, sum}, "out");
    program.set_outputs({out});
  }
  DifferentiateRequest request() const { return {{out}, {x}}; }
};

}  // namespace tessera::testing

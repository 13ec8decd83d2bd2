#pragma once

#include <functional>

#include "comm/communicator.h"
#include "core/random.h"
#include "ops/testing/program_run.h"

namespace tessera::testing {

/// One rank's part of a linear map over all ranks: a program that maps x to y, by values that are
/// constants to the gradient, which `fill` writes before the run.
struct LinearMap {
  Program program;
  ValueId x = -1;
  ValueId y = -1;
  std::function<void(const ProgramRun&)> fill = [](const ProgramRun&) {};
};

/// Called on every rank.
using BuildLinearMap = std::function<LinearMap(World&)>;

/// Fills with integers from -4 to 4, whose sums over a few ranks are exact in F32 and BF16.
void fill_small_integers(const Tensor& tensor, Random& random);

/// Runs the map and its derived backward program over threads, with random small integers as x and
/// as the gradient of y, and expects
///   sum over ranks of ⟨y, gradient of y⟩ = sum over ranks of ⟨x, gradient of x⟩
/// exactly: the gradient is the transpose of the map.
void check_transpose(int64_t num_ranks, const BuildLinearMap& build, const KernelTable& kernels,
                     uint64_t seed);

}  // namespace tessera::testing

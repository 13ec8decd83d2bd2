#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/memory.h"
#include "ops/backend.h"
#include "program/differentiate.h"

namespace tessera::testing {

/// A forward program and what of it is differentiated.
struct CheckedProgram {
  Program program;
  DifferentiateRequest request;  ///< no outputs: forward alone
};

/// How a program on the GPU is compared with the CPU's.
struct GpuCheck {
  /// Values of inputs and weights by name; F32 ones are rounded to the program's own type. Those
  /// left out are random normal (F32 and BF16 alone), as are all gradients of outputs.
  std::map<std::string, Tensor> values = {};
  double deviation = 1.0;  ///< of random values
  uint64_t seed = 1;
  /// The largest relative error of a row in F32.
  double tolerance_f32 = 2e-5;
  /// The largest relative error of a row in BF16 is this, or `bf16_factor` times the CPU's own.
  double tolerance_bf16 = 2e-3;
  double bf16_factor = 2.0;
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16};
  bool repeatable = true;  ///< two runs must give the same bits
  /// Whether a program runs on the GPU once, neither again nor replayed: for the tests of one tiny
  /// shape, named "Tiny...", that tools/gpu_sanitizers.sh runs under tools that slow kernels down a
  /// thousand times.
  bool once = false;
};

/// Runs the program that `build` makes for each element type forward and backward, on the CPU and
/// on the GPU, from the same values, and compares every output, gradient and accumulator row by row
/// (last dim): integers must be equal; F32 must be within the tolerance; BF16 is measured against
/// the F32 program on the same values, and may be off by the tolerance or by a multiple of what the
/// CPU's BF16 operators are. Values must have the same ids for all types. Working memory starts as
/// NaN; the GPU runs twice and must give the same bits. Adds gtest failures.
void check_on_gpu(const std::function<CheckedProgram(DType)>& build, const Backend& cpu,
                  const Backend& gpu, const GpuCheck& check = {});

/// "y0", "y1", ...: a name for each output of an operator, since values are told apart by name.
std::vector<std::string> numbered_outputs(const std::vector<ValueType>& inputs, const Operator& op);

/// The same for an operator alone, whose inputs have the types that `inputs` gives for an element
/// type. Inputs named "w..." are weights, those named "x..." are differentiated, others are
/// constants; `values` has their values by name. Inputs of the same name are one value. Gradients
/// are given for the outputs listed.
struct OperatorInputs {
  std::vector<std::string> names;
  std::vector<ValueType> types;
};
void check_operator_on_gpu(const OperatorPtr& op,
                           const std::function<OperatorInputs(DType)>& inputs,
                           const std::vector<int>& outputs_with_grad, const Backend& cpu,
                           const Backend& gpu, const GpuCheck& check = {});

}  // namespace tessera::testing

#pragma once

#include <cstdint>

#include "core/slice.h"
#include "ops/cuda/check.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/context.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// The rows of `width` elements that input `idx` consists of; its ragged dim, if any, is the first.
inline RowCount rows_of(const KernelArgs& args, size_t idx, int64_t width) {
  const Tensor& x = args.in(idx);
  const int64_t rows = width == 0 ? 0 : x.num_elements() / width;
  const int64_t* extent = args.in_extent(idx);
  return {.bound = rows, .extent = extent, .scale = rows == 0 || !extent ? 1 : rows / x.shape[0]};
}

/// What an accumulating output is to a kernel; without sums where nobody wants it.
inline Accumulator accumulator_of(const KernelArgs& args, const Tensor& output) {
  return {.sums = output ? output.as<float>() : nullptr, .sets = args.set_accumulators};
}

/// The same of a kernel that has `rows` of the output alone. The others are cleared where the
/// accumulator holds nothing yet.
inline Accumulator accumulator_of_rows(const KernelArgs& args, const Tensor& output,
                                       const IndexRange& rows) {
  Accumulator accumulator = accumulator_of(args, output);
  if (accumulator.sums == nullptr || rows.count == output.shape[0]) return accumulator;
  if (accumulator.sets) check(cudaMemsetAsync(output.data, 0, output.num_bytes(), stream_of(args)));
  accumulator.sums += rows.begin * (output.num_elements() / output.shape[0]);
  return accumulator;
}

/// Elements of a row to kernels that take each element alone: rows matter only where some are not
/// in use, or all elements are too many for one.
inline int64_t width_of_elements(const Tensor& x, bool ragged) {
  const int64_t count = x.num_elements();
  if (!ragged && count < int64_t{1} << 30) return count;
  return x.shape[0] == 0 ? 0 : count / x.shape[0];
}

/// For kernels without scratch memory whose operators allow any dim to be ragged: refuses all but
/// the first, since of the others the rows in use do not lie at the front of memory.
inline int64_t no_workspace_first_ragged(const Operator& op, std::span<const ValueType> inputs) {
  for (const ValueType& input : inputs)
    check_shape(op, input.ragged_dim <= 0, "on a GPU only the first dim may be ragged, got {}",
                input.to_string());
  return 0;
}

}  // namespace tessera::cuda

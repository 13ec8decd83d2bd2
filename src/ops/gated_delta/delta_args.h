#pragma once

#include "ops/cuda/row_args.h"
#include "ops/gated_delta/gated_delta_kernels.h"

/// From the arguments of delta rules' operators to kernels' operands.
namespace tessera::cuda {

struct DeltaSizes {
  int64_t key_heads;
  int64_t heads;
  int64_t key_size;
  int64_t value_size;
};

template <typename Op>
DeltaOperands delta_operands(const DeltaSizes& sizes, const Args<Op>& args) {
  const Tensor& v = args.in(Op::kV);
  return {.dtype = v.dtype,
          .tokens = static_cast<int>(v.shape[0]),
          .key_heads = static_cast<int>(sizes.key_heads),
          .heads = static_cast<int>(sizes.heads),
          .key_size = static_cast<int>(sizes.key_size),
          .value_size = static_cast<int>(sizes.value_size),
          .q = args.in(Op::kQ).data,
          .k = args.in(Op::kK).data,
          .v = v.data,
          .decay = args.in(Op::kDecay).template as<float>(),
          .beta = args.in(Op::kBeta).template as<float>()};
}

/// With the sequences that are packed.
template <typename Op>
DeltaOperands packed_delta_operands(const DeltaSizes& sizes, const Args<Op>& args) {
  const Tensor& bounds = args.in(Op::kCuSeqlens);
  DeltaOperands x = delta_operands(sizes, args);
  x.bounds = bounds.template as<int32_t>();
  x.num_sequences = static_cast<int>(bounds.shape[0] - 1);
  return x;
}

}  // namespace tessera::cuda

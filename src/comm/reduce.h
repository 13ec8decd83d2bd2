#pragma once

#include <span>

#include "comm/communicator.h"

namespace tessera {

/// out[i] = inputs[0][i] op inputs[1][i] op ... for `count` elements, in the order of the inputs,
/// so that all back ends give the same bits. BF16 is summed in F32 and rounded once. out may be one
/// of the inputs, whole: an element is read from all inputs before it is written. Types: F32, BF16,
/// F64, I32 and I64.
void reduce_elements(DType dtype, ReduceOp op, std::span<const void* const> inputs, void* out,
                     int64_t count);

}  // namespace tessera

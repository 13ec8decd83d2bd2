#pragma once

#include "core/tensor.h"
#include "ops/operator.h"

/// Rows of FP8 whose scales are of one row each, or of parts of one: whoever moves rows takes these
/// along.
namespace tessera {

bool has_scaled_rows(const Format& format);

/// The type of the values of `dtype` that E4M3 rows stand for. Throws UserError, in the name of the
/// operator that reads them, where `rows` are none or have no scales of their own.
ValueType values_of_scaled_rows(const Operator& op, const ValueType& rows, DType dtype);

/// What a kernel that moves rows takes (KernelOptions::takes): those, and elements without scales,
/// F16 too.
bool takes_scaled_rows(const Format& format);

/// The elements alone, and the scales: tensors of as many rows, without scales of their own.
Tensor elements_of(const Tensor& rows);
Tensor row_scales_of(const Tensor& rows);

/// Neighbours of a row that share a scale: all `num_columns`, or those of a block.
int64_t columns_of_scale(const ScaleLayout& scale, int64_t num_columns);

}  // namespace tessera

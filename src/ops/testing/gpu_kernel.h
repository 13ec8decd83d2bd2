#pragma once

#include <span>
#include <vector>

#include "ops/testing/gpu_check.h"

namespace tessera::testing {

/// check_operator_on_gpu for operators on ragged rows: an I64 input "extent" comes before the
/// operator's own, as value 0, which types with raggedness name as their extent; it is `extent`.
/// Rows of random inputs beyond the extent are NaN.
void check_ragged_operator_on_gpu(const OperatorPtr& op,
                                  const std::function<OperatorInputs(DType)>& inputs,
                                  const std::vector<int>& outputs_with_grad, int64_t extent,
                                  const Backend& cpu, const Backend& gpu, GpuCheck check = {});

/// `type` with a ragged first dim whose extent is value 0.
ValueType ragged_rows(DType dtype, const Shape& shape);

/// Copies between the host's memory and a back end's.
OwnedTensor copy_to(const Backend& backend, const Tensor& host);
OwnedTensor copy_to_host(const Backend& backend, const Tensor& tensor);

/// Runs an operator's kernel alone, on tensors in the back end's memory without raggedness, to the
/// end. Scratch memory starts as NaN.
void run_kernel(const Operator& op, const Backend& backend, std::span<const Tensor> inputs,
                std::span<const Tensor> outputs);

}  // namespace tessera::testing

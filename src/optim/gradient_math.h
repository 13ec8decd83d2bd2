#pragma once

#include <cstddef>
#include <span>

#include "core/slice.h"
#include "ops/backend.h"
#include "ops/bf16_sum/bf16_sum.h"

namespace tessera {

/// What happens to gradients beside communication, in the order of a device's work; on the host at
/// once. `backend` has the kernels of `ops/add` and `ops/bf16_sum`.
class GradientMath {
 public:
  explicit GradientMath(const Backend& backend)
      : backend_(backend), add_to_bf16_(make_add_to_bf16()) {}

  Device& device() const { return backend_.device(); }
  bool is_host() const { return backend_.is_host(); }
  /// A view of flat elements of the device's memory, `range` counting from `memory`.
  Tensor elements(std::byte* memory, DType dtype, IndexRange range) const;

  void copy(const Tensor& from, const Tensor& to) const;
  /// F32 to BF16. On the host `to` may begin where `from` does, or before.
  void round(const Tensor& from, const Tensor& to) const;
  /// As SumBf16Parts: `parts` BF16, flat, without part `own` of `num_parts`, which is what `sum`,
  /// F32 or BF16, holds.
  void sum_parts(const Tensor& parts, int64_t num_parts, int64_t own, const Tensor& sum) const;
  /// sum += values, F32 and BF16, or sum = values, rounded, where it `sets`. Both of one shape.
  void add_rounded(const Tensor& values, const Tensor& sum, bool sets) const;
  /// sum += values, F32.
  void add(const Tensor& values, const Tensor& sum) const;

 private:
  void run(const Operator& op, std::span<const Tensor> inputs, const Tensor& output,
           bool sets = false) const;

  Backend backend_;
  OperatorPtr add_to_bf16_;  // which recorded steps run again
};

}  // namespace tessera

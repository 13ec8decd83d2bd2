#pragma once

#include "ops/operator.h"

namespace tessera {

/// Two tensors one below the other: (a A [R, D], b A [Q, D]) -> A [R + Q, D]. A is F32 or BF16.
class JoinRows final : public Operator {
 public:
  static constexpr std::string_view kName = "join_rows";
  enum Input : int { kA, kB };
  enum Output : int { kY };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// The way back, JoinRows' gradient: (x A [R + Q, D]) -> (its first R rows, the others).
class SplitRows final : public Operator {
 public:
  static constexpr std::string_view kName = "split_rows";
  enum Input : int { kX };
  enum Output : int { kA, kB };

  /// Throws UserError where num_first is negative.
  explicit SplitRows(int64_t num_first);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  int64_t num_first_;
};

OperatorPtr make_join_rows();
void add_join_rows_cpu(KernelTable& table);
void add_join_rows_cuda(KernelTable& table);

}  // namespace tessera

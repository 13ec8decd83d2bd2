#pragma once

#include "comm/communicator.h"
#include "ops/operator.h"
#include "ops/scaled_rows.h"

namespace tessera {

/// Exchanges between the ranks of a group, as operators. Rows are along the first dim, parts are in
/// the order of the ranks, A is any element type unless said otherwise, or FP8 whose scales are of
/// single rows (ops/scaled_rows.h), which go along where rows are not added up. The gradient rule
/// of each is the exact transpose of the linear map from the inputs of all ranks to the outputs of
/// all ranks: where the objective is the sum over ranks of each rank's loss, every rank gets the
/// gradient of that sum, without any factor.
///
/// All kernels are asynchronous (Kernel::Start).
class CollectiveOperator : public Operator {
 public:
  enum Input : int { kX };
  enum Output : int { kY };

  /// Throws InternalError where there is no communicator.
  explicit CollectiveOperator(CommunicatorPtr comm);
  Communicator& comm() const { return *comm_; }
  const CommunicatorPtr& comm_ptr() const { return comm_; }

  /// "group=tp size=4".
  std::string attributes() const override;
  bool communicates() const override { return true; }

 protected:
  /// Checks that x has rows and, unless `may_be_ragged`, a fixed number of them.
  void check_rows(std::span<const ValueType> inputs, bool may_be_ragged) const;

 private:
  CommunicatorPtr comm_;
};

/// (x A [n, ...]) -> A [P·n, ...]: all ranks' rows. Its gradient is ReduceScatter.
class AllGather final : public CollectiveOperator {
 public:
  static constexpr std::string_view kName = "all_gather";
  using CollectiveOperator::CollectiveOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x A [P·n, ...]) -> A [n, ...]: the sum over ranks of their part number rank(). A is F32, BF16
/// (summed in F32 and rounded once), F64, I32 or I64. Its gradient is AllGather.
class ReduceScatter final : public CollectiveOperator {
 public:
  static constexpr std::string_view kName = "reduce_scatter";
  using CollectiveOperator::CollectiveOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x F32, F64, I32 or I64, any shape) -> the sum over ranks, on all of them. A constant to the
/// gradient, as expert counts are: what reaches the output goes no further.
class AllReduceConstant final : public CollectiveOperator {
 public:
  static constexpr std::string_view kName = "all_reduce_constant";
  using CollectiveOperator::CollectiveOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
};

/// (x A [P·n, ...]) -> A [P·n, ...]: part i goes to rank i, and stands there at this rank's place.
/// Its own gradient.
class AllToAll final : public CollectiveOperator {
 public:
  static constexpr std::string_view kName = "all_to_all";
  using CollectiveOperator::CollectiveOperator;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

OperatorPtr make_all_gather(CommunicatorPtr comm);
OperatorPtr make_reduce_scatter(CommunicatorPtr comm);
OperatorPtr make_all_reduce_constant(CommunicatorPtr comm);
OperatorPtr make_all_to_all(CommunicatorPtr comm);

/// The kernels of these, of ragged_collective.h and of head_exchange.h.
void add_collective_cpu(KernelTable& table);
/// The same for Hopper GPUs. The counts of ragged_collective.h are read by the host, which waits
/// until the GPU has found them (ops/cuda/host_counts.h).
void add_collective_cuda(KernelTable& table);

}  // namespace tessera

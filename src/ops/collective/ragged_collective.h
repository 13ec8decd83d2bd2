#pragma once

#include "ops/collective/collective.h"

namespace tessera {

/// What the exchanges with counted rows have in common. x A [R, ...] may be ragged or not; more
/// rows than the counts say may follow, and are not sent. The output has at most `max_rows` rows:
/// it is ragged where the last input `extent` I64 [1], which another operator computes, is given,
/// and has exactly max_rows rows where it is not. Rows past those that arrive are zeros. Several
/// values that move by the same counts (rows, probabilities, expert ids) share counts and extent.
class RaggedCollective : public CollectiveOperator {
 public:
  /// Throws InternalError where max_rows is negative.
  RaggedCollective(CommunicatorPtr comm, int64_t max_rows);
  int64_t max_rows() const { return max_rows_; }
  /// "group=ep size=4 max_rows=4096".
  std::string attributes() const override;

 protected:
  /// The type of the output for inputs (x, `num_counts` counts I64 [P] [, extent]).
  ValueType infer_rows(std::span<const ValueType> inputs, int num_counts) const;
  /// Emits `op`, which makes the gradient of x from the output's and `counts`, the forward inputs
  /// with the counts, in the order in which `op` takes them.
  static void differentiate_rows(GradientBuilder& builder, OperatorPtr op,
                                 const std::vector<int>& counts);

 private:
  int64_t max_rows_;
};

/// Who knows the counts of an exchange before it begins.
enum class CountsOf : uint8_t {
  kHost,    ///< the host, which on a device waits for them
  kDevice,  ///< the device alone, where the communicator can (takes_device_counts)
};

/// (x A [R, ...], send_rows I64 [P], receive_rows I64 [P] [, extent I64 [1]]) -> A [R', ...]: the
/// first send_rows[0] rows of x go to rank 0, the next send_rows[1] to rank 1, ...; the rows that
/// arrive stand in the order of the ranks that sent them, receive_rows[i] from rank i. Its gradient
/// is the same operator with both counts exchanged.
class AllToAllV final : public RaggedCollective {
 public:
  static constexpr std::string_view kName = "all_to_all_v";
  static constexpr std::string_view kOnDevice = "all_to_all_v_on_device";
  enum Input : int { kX, kSendRows, kReceiveRows, kExtent };
  enum Output : int { kY };
  AllToAllV(CommunicatorPtr comm, int64_t max_rows, CountsOf counts)
      : RaggedCollective(std::move(comm), max_rows), counts_(counts) {}
  std::string_view name() const override { return counts_ == CountsOf::kHost ? kName : kOnDevice; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  CountsOf counts_;
};

/// (x A [R, ...], counts I64 [P] [, extent I64 [1]]) -> A [R', ...]: the first counts[i] rows of
/// each rank i, in the order of the ranks. counts is the same on all ranks. Its gradient is
/// ReduceScatterV.
class AllGatherV final : public RaggedCollective {
 public:
  static constexpr std::string_view kName = "all_gather_v";
  enum Input : int { kX, kCounts, kExtent };
  enum Output : int { kY };
  using RaggedCollective::RaggedCollective;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x A [R, ...], counts I64 [P] [, extent I64 [1]]) -> A [R', ...]: counts[0] rows of x are for
/// rank 0, the next counts[1] for rank 1, ...; each rank gets the sum of those for it. A as for
/// ReduceScatter. Its gradient is AllGatherV.
class ReduceScatterV final : public RaggedCollective {
 public:
  static constexpr std::string_view kName = "reduce_scatter_v";
  enum Input : int { kX, kCounts, kExtent };
  enum Output : int { kY };
  using RaggedCollective::RaggedCollective;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

OperatorPtr make_all_to_all_v(CommunicatorPtr comm, int64_t max_rows,
                              CountsOf counts = CountsOf::kHost);
OperatorPtr make_all_gather_v(CommunicatorPtr comm, int64_t max_rows);
OperatorPtr make_reduce_scatter_v(CommunicatorPtr comm, int64_t max_rows);

}  // namespace tessera

#pragma once

#include "ops/collective/ragged_collective.h"

namespace tessera {

/// What Permute and AllToAllV make one behind the other of rows whose numbers a device alone knows:
/// (x A [T, H], send_rows I64 [P], receive_rows I64 [P], extent I64 [1], source_R I32 [R],
/// row_of_TK I32 [T, K]) -> A [R', H], ragged. The rows of x that source_R names are sent in its
/// order, zeros where it names none, and no copy of them is made where the communicator gathers as
/// it sends. Scaled rows are not taken. A pass puts it in place of the two behind the last that
/// asks for gradients (program/fusion/fuse_dispatch.h), so it has none.
class DispatchRows final : public RaggedCollective {
 public:
  static constexpr std::string_view kName = "dispatch_rows";
  enum Input : int { kX, kSendRows, kReceiveRows, kExtent, kSource, kRowOf };
  enum Output : int { kY };
  using RaggedCollective::RaggedCollective;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

  /// What Permute makes of these inputs: rows in the order in which they are sent.
  static ValueType sent_rows(std::span<const ValueType> inputs);
};

OperatorPtr make_dispatch_rows(CommunicatorPtr comm, int64_t max_rows);

void add_dispatch_rows_cpu(KernelTable& table);
/// For communicators that take counts which only a device knows.
void add_dispatch_rows_cuda(KernelTable& table);

}  // namespace tessera

#pragma once

#include <string>
#include <vector>

#include "ops/operator.h"

namespace tessera {

/// Of which ranks a plan's EP are.
enum class PlanReach : uint8_t {
  kAll,     ///< all of them
  kNodes,   ///< those in the same place of every node; experts are then a node's
  kWithin,  ///< those of a node
};

/// The EP · ETP ranks that hold one copy of a layer's experts, seen from one of them. Rank
/// e · ETP + t of them holds the experts of EP coordinate e, and of each its inner columns of ETP
/// coordinate t.
struct DispatchPlanSpec {
  /// The experts of EP coordinate e are [first_experts[e], first_experts[e + 1]); [EP + 1].
  std::vector<int64_t> first_experts = {0, 1};
  int64_t etp_size = 1;
  PlanReach reach = PlanReach::kAll;
  int64_t ep_rank = 0;
  int64_t etp_rank = 0;
  /// The most rows that may arrive over EP, and then stand there gathered over ETP.
  int64_t max_received = 0;
  int64_t max_gathered = 0;
  /// The same where routing is balanced; -1: as many.
  int64_t balanced_received = -1;
  int64_t balanced_gathered = -1;
  /// Whether the host is told what comes out. Otherwise a device alone knows, and values have
  /// memory for the most rows.
  bool tells_the_host = true;

  int64_t ep_size() const { return std::ssize(first_experts) - 1; }
  int64_t num_experts() const { return first_experts.back(); }
  int64_t first_local() const { return first_experts[ep_rank]; }
  int64_t num_local() const { return first_experts[ep_rank + 1] - first_local(); }
};

// clang-format off
/// What an exchange of routed rows needs to know, from what every rank has for every expert:
///   counts I64 [EP·ETP · E], the ranks' counts one after the other ->
///   send_rows    I64 [EP]            this rank's rows for each rank of its EP group
///   receive_rows I64 [EP]            the rows for its experts from each
///   received     I64 [1]             their sum
///   gather_rows  I64 [ETP]           the rows that each rank of its ETP group receives
///   gathered     I64 [1]             their sum
///   expert_idx   I32 [R'' ragged]    the local expert of every row once they are gathered over ETP
// clang-format on
/// Rows stand ETP rank by ETP rank, of each source rank by source rank of EP, of each expert by
/// expert. So with ETP = 1 expert_idx is that of the received rows. A pure function; no gradient;
/// never recomputed. Throws InternalError for more rows than the spec allows.
class DispatchPlan final : public Operator {
 public:
  static constexpr std::string_view kName = "dispatch_plan";
  static constexpr std::string_view kOnDevice = "dispatch_plan_on_device";
  enum Input : int { kCounts };
  enum Output : int { kSendRows, kReceiveRows, kReceived, kGatherRows, kGathered, kExpertIdx };

  /// Throws UserError where a rank has no experts, or is not among the ranks.
  explicit DispatchPlan(const DispatchPlanSpec& spec);
  const DispatchPlanSpec& spec() const { return spec_; }

  std::string_view name() const override { return spec_.tells_the_host ? kName : kOnDevice; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }
  int64_t balanced_extent(int output, std::span<const ValueType> inputs) const override;

 private:
  DispatchPlanSpec spec_;
};

/// For those who want its outputs alone.
using DispatchPlanOutput = DispatchPlan;

OperatorPtr make_dispatch_plan(const DispatchPlanSpec& spec);

void add_dispatch_plan_cpu(KernelTable& table);
/// Up to 1024 ranks of EP.
void add_dispatch_plan_cuda(KernelTable& table);

}  // namespace tessera

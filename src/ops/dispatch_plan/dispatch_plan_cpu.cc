#include <algorithm>
#include <numeric>

#include "ops/dispatch_plan/dispatch_plan.h"

namespace tessera {
namespace {

/// The gathered counts, by the coordinates of the rank that has the rows.
struct Counts {
  const DispatchPlanSpec& spec;
  std::span<const int64_t> counts;

  int64_t of(int64_t ep_rank, int64_t etp_rank, int64_t expert) const {
    const int64_t rank = ep_rank * spec.etp_size + etp_rank;
    return counts[rank * spec.num_experts() + expert];
  }
  /// The rows of one rank for the experts of EP coordinate `target`.
  int64_t between(int64_t ep_rank, int64_t etp_rank, int64_t target) const {
    int64_t sum = 0;
    const auto& first = spec.first_experts;
    for (int64_t e = first[target]; e < first[target + 1]; ++e) {
      sum += of(ep_rank, etp_rank, e);
    }
    return sum;
  }
};

int64_t sum_of(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

void write_exchange(const Counts& counts, const Args<DispatchPlan>& args) {
  const DispatchPlanSpec& spec = counts.spec;
  const auto send = args.out(DispatchPlan::kSendRows).span<int64_t>();
  const auto receive = args.out(DispatchPlan::kReceiveRows).span<int64_t>();
  for (int64_t peer = 0; peer < spec.ep_size(); ++peer) {
    send[peer] = counts.between(spec.ep_rank, spec.etp_rank, peer);
    receive[peer] = counts.between(peer, spec.etp_rank, spec.ep_rank);
  }
  *args.out(DispatchPlan::kReceived).as<int64_t>() = sum_of(receive);
}

void write_gather(const Counts& counts, const Args<DispatchPlan>& args) {
  const DispatchPlanSpec& spec = counts.spec;
  const auto gather = args.out(DispatchPlan::kGatherRows).span<int64_t>();
  for (int64_t etp_rank = 0; etp_rank < spec.etp_size; ++etp_rank) {
    int64_t rows = 0;
    for (int64_t source = 0; source < spec.ep_size(); ++source) {
      rows += counts.between(source, etp_rank, spec.ep_rank);
    }
    gather[etp_rank] = rows;
  }
  *args.out(DispatchPlan::kGathered).as<int64_t>() = sum_of(gather);
}

void write_experts(const Counts& counts, int32_t* expert_of) {
  const DispatchPlanSpec& spec = counts.spec;
  for (int64_t etp_rank = 0; etp_rank < spec.etp_size; ++etp_rank) {
    for (int64_t source = 0; source < spec.ep_size(); ++source) {
      for (int64_t local = 0; local < spec.num_local(); ++local) {
        expert_of = std::fill_n(expert_of, counts.of(source, etp_rank, spec.first_local() + local),
                                static_cast<int32_t>(local));
      }
    }
  }
}

void check_bounds(const DispatchPlanSpec& spec, const Args<DispatchPlan>& args) {
  const int64_t received = *args.out(DispatchPlan::kReceived).as<int64_t>();
  const int64_t gathered = *args.out(DispatchPlan::kGathered).as<int64_t>();
  ensure(received <= spec.max_received && gathered <= spec.max_gathered,
         "dispatch_plan: {} rows arrive and {} are gathered, at most {} and {} were expected",
         received, gathered, spec.max_received, spec.max_gathered);
}

void dispatch_plan(const DispatchPlan& op, const Args<DispatchPlan>& args) {
  const DispatchPlanSpec& spec = op.spec();
  const auto given = args.in(DispatchPlan::kCounts).span<int64_t>();
  ensure(std::ranges::all_of(given, [](int64_t count) { return count >= 0; }),
         "dispatch_plan: a count is negative");
  const Counts counts{spec, given};
  write_exchange(counts, args);
  write_gather(counts, args);
  check_bounds(spec, args);
  write_experts(counts, args.out(DispatchPlan::kExpertIdx).as<int32_t>());
}

}  // namespace

void add_dispatch_plan_cpu(KernelTable& table) {
  add_kernel<DispatchPlan>(table, dispatch_plan, {.tells_the_host = true});
  add_kernel<DispatchPlan>(table, DispatchPlan::kOnDevice, dispatch_plan);
}

}  // namespace tessera

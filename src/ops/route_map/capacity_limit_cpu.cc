#include <algorithm>

#include "ops/route_map/capacity_limit.h"
#include "ops/route_map/expert_sort.h"

namespace tessera {
namespace {

/// All assignments in the micro-batch's order.
struct Ordered {
  int64_t num_tokens;
  int64_t top_k;
  int32_t* expert_idx_TK;
  float* probs_TK;
  int32_t* row_of_T;  ///< the input row of each token
};

/// Inverts the positions. Throws InternalError unless each token has exactly one row.
void find_rows(const Args<CapacityLimit>& args, bool has_positions, const Ordered& ordered) {
  const auto num_tokens = ordered.num_tokens;
  std::fill_n(ordered.row_of_T, num_tokens, -1);
  for (int64_t row = 0; row < num_tokens; ++row) {
    const int64_t token =
        has_positions ? args.in(CapacityLimit::kPositions).as<int32_t>()[row] : row;
    ensure(token >= 0 && token < num_tokens && ordered.row_of_T[token] < 0,
           "capacity_limit: the positions are no permutation of {} tokens: {} is wrong or double",
           num_tokens, token);
    ordered.row_of_T[token] = static_cast<int32_t>(row);
  }
}

void put_in_order(const Args<CapacityLimit>& args, const Ordered& ordered) {
  const auto* expert_idx = args.in(CapacityLimit::kExpertIdx).as<int32_t>();
  const auto* probs = args.in(CapacityLimit::kProbs).as<float>();
  const int64_t top_k = ordered.top_k;
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < ordered.num_tokens; ++token) {
    const int64_t row = ordered.row_of_T[token];
    std::copy_n(expert_idx + row * top_k, top_k, ordered.expert_idx_TK + token * top_k);
    std::copy_n(probs + row * top_k, top_k, ordered.probs_TK + token * top_k);
  }
}

/// Leaves the index of what is kept of this rank's tokens; returns how many of them are.
int64_t keep_own(const ExpertSort& sort, const Ordered& ordered, const IndexRange& own,
                 int32_t* own_idx) {
  int64_t kept = 0;
  for (int64_t expert = 0; expert < sort.num_local(); ++expert) {
    const int32_t* first = sort.sorted + sort.kept_starts[expert];
    for (const int32_t* at = first; at < first + sort.counts_kept[expert]; ++at) {
      const int64_t row = ordered.row_of_T[*at / ordered.top_k];
      if (row < own.begin || row >= own.end()) continue;
      own_idx[(row - own.begin) * ordered.top_k + *at % ordered.top_k] =
          static_cast<int32_t>(expert);
      ++kept;
    }
  }
  return kept;
}

int64_t count_assigned(const Args<CapacityLimit>& args, const IndexRange& own, int64_t top_k) {
  const auto* first = args.in(CapacityLimit::kExpertIdx).as<int32_t>() + own.begin * top_k;
  return std::count_if(first, first + own.count * top_k, [](int32_t e) { return e >= 0; });
}

}  // namespace

void capacity_limit(const CapacityLimit& op, const Args<CapacityLimit>& args) {
  const RouteMapSpec& rule = op.spec().route;
  const int64_t num_tokens = args.in(CapacityLimit::kExpertIdx).shape[0];
  const CapacityLimitWorkspace layout(rule, num_tokens);
  const Ordered ordered{.num_tokens = num_tokens,
                        .top_k = rule.top_k,
                        .expert_idx_TK = workspace_part<int32_t>(args.workspace, layout.expert_idx),
                        .probs_TK = workspace_part<float>(args.workspace, layout.probs),
                        .row_of_T = workspace_part<int32_t>(args.workspace, layout.row_of)};
  find_rows(args, op.spec().has_positions, ordered);
  put_in_order(args, ordered);
  ExpertSort sort = ExpertSort::in_workspace(rule, num_tokens * rule.top_k, args.workspace);
  sort.capacity = op.route().capacity(num_tokens);
  sort.expert_of = ordered.expert_idx_TK;
  sort.probs = ordered.probs_TK;
  sort.counts_kept = workspace_part<int64_t>(args.workspace, layout.counts_kept);
  sort.run();

  const IndexRange& own = op.spec().tokens;
  auto* own_idx = args.out(CapacityLimit::kKept).as<int32_t>();
  std::fill_n(own_idx, own.count * rule.top_k, -1);
  *args.out(CapacityLimit::kDropped).as<int64_t>() =
      count_assigned(args, own, rule.top_k) - keep_own(sort, ordered, own, own_idx);
}

}  // namespace tessera

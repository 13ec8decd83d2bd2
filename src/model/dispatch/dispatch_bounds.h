#pragma once

#include "model/dispatch/dispatchers.h"

/// The worst that routing can do to a rank, with `num_tokens` (T) tokens on each.
namespace tessera {

/// Experts, top_k and the rule by which assignments are dropped, over whatever tokens.
RouteMapSpec drop_rule(const DispatchSpec& spec);

/// Rows that one expert can get from this rank's tokens under a shared capacity; 0: it has none of
/// its own (no capacity, or one shared by experts).
int64_t shared_expert_capacity(const DispatchSpec& spec, int64_t num_tokens);

/// The same from all ranks under either capacity.
int64_t expert_limit(const DispatchSpec& spec, int64_t num_tokens);

/// Rows for this rank's experts from `num_ranks` ranks: a token has at most min(K, local experts),
/// and no more stay than capacities leave.
int64_t max_arriving_rows(const DispatchSpec& spec, int64_t num_ranks, int64_t num_tokens);

/// The same where routing is balanced.
int64_t balanced_arriving_rows(const DispatchSpec& spec, int64_t num_ranks, int64_t num_tokens);

/// Of a rank's tokens those that have experts on one of `members` ranks (or nodes), where routing
/// is balanced.
double balanced_reach(const DispatchSpec& spec, int64_t members);

/// Rows from one rank for the experts of another, the same for all of them: what a bounded
/// all-to-all always moves.
int64_t max_rows_to_peer(const DispatchSpec& spec, int64_t num_tokens);

}  // namespace tessera

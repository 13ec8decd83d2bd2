#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// How routed tokens reach their experts and come back.
enum class DispatcherKind : uint8_t {
  kLocal,      ///< all experts are here, whole
  kAllToAll,   ///< rows to their experts' ranks (EP), then all-gather over ETP; the same way back
  kAllGather,  ///< all tokens to all ranks (EP x ETP), each takes its experts'; reduce-scatter back
  kDeduplicated,  ///< as all-to-all, but a token goes once to each rank with experts for it
  kHierarchical,  ///< once to each node with such ranks, and from there to these
};

/// "local", "all_to_all", "all_gather", "deduplicated" or "hierarchical".
std::string_view dispatcher_name(DispatcherKind kind);

/// How many rows an all-to-all moves between two ranks.
enum class ExchangeSizes : uint8_t {
  kExact,    ///< those that routing sends; the host must know them
  kDirect,   ///< the same; where GPUs address one another's memory, they alone know
  kBounded,  ///< as many as it can send at most, always; nobody waits for numbers
};

/// What is asked for: a kind, or the choice by volume.
enum class DispatcherRequest : uint8_t {
  kAuto,
  kAllToAll,
  kAllGather,
  kDeduplicated,
  kHierarchical
};

/// What is asked for, of a request other than auto.
DispatcherKind kind_of(DispatcherRequest request);

/// Which experts tokens may choose.
struct RoutedExperts {
  int64_t num_experts = 1;
  int64_t top_k = 1;
  int64_t num_groups = 1;  ///< of equally many experts, of which a token's are in top_groups
  int64_t top_groups = 1;
};

/// The share of tokens that have an expert on one of `ep` ranks (or nodes), where routing is even.
double reach_of_rank(const RoutedExperts& routed, int64_t ep);

struct DispatchSizes {
  int64_t top_k = 1;
  int64_t ep = 1;
  int64_t etp = 1;
  /// The bandwidth that an all-to-all reaches, as a share of an all-gather's: 1 counts bytes alone.
  /// On 8 H800s 6/8 puts the limit where MegaScale-MoE measured it (figure 7: all-gather wins where
  /// top-k > 6).
  double all_to_all_efficiency = 1.0;
  /// Rows that an all-to-all moves from a rank to each of EP, for each of its tokens; 0: what even
  /// routing sends, K / EP.
  double rows_per_peer = 0;
  /// The tokens that a deduplicated exchange moves from a rank to each of EP, for each of its
  /// tokens (reach_of_rank); 0: as if each choice named any rank.
  double reach = 0;
  /// The nodes that EP spans, and the same of them.
  int64_t nodes = 1;
  double node_reach = 0;
};

/// Rows of width H that leave a rank, dispatch and combine together, for each of its own tokens,
/// routing being even. For ETP = 1 and n = EP ranks with b·s tokens together these are equations 3
/// and 4 of MegaScale-MoE, section 3.2: 2k/n · bsh(n-1)/n for all-to-all, 2bsh(n-1)/n for
/// all-gather and reduce-scatter, each divided by the b·s/n tokens of a rank and by h. The
/// all-gather over ETP moves every row to ETP - 1 ranks more. Deduplicated, a token is a row for
/// each rank that it goes to, beside which its choices and probabilities are not counted;
/// hierarchically also for each node, and a rank passes on what others sent to its node.
/// H is the width at which rows are dispatched, the latent size where experts have one. Both kinds
/// move rows of that width, so the choice between them does not depend on it.
struct DispatchVolumes {
  double all_to_all = 0;
  double all_gather = 0;
  double deduplicated = 0;
  double hierarchical = 0;
  double between_nodes = 0;  ///< of the hierarchical ones

  double of(DispatcherKind kind) const;
};
DispatchVolumes dispatch_volumes(const DispatchSizes& sizes);

struct DispatchChoice {
  DispatcherKind kind = DispatcherKind::kLocal;
  DispatchVolumes volumes;
  double all_to_all_efficiency = 1.0;  ///< that the volumes were weighed with
  bool by_request = false;

  /// "all_gather: 6 rows a token leave a rank, all_to_all would move 7.5"; where the efficiency is
  /// not 1 also what the all-to-all's rows count.
  std::string to_string() const;
};

/// The dispatcher that moves less, the all-to-all's volume divided by its efficiency; of equal ones
/// all-to-all. With ETP = 1 that is all-gather where top-k exceeds the number of ranks. A request
/// decides instead; where all experts are here, whole, it is the local one whatever is asked.
/// Throws UserError for sizes below 1 or an efficiency that is not above 0.
DispatchChoice choose_dispatcher(const DispatchSizes& sizes,
                                 DispatcherRequest request = DispatcherRequest::kAuto);

}  // namespace tessera

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

// Dynamic context parallelism: how the ranks of DP · CP share the documents of a step. In each
// micro-batch they fall into groups of neighbours, each of a degree of its own, a power of two,
// that begin at multiples of it. A group of degree d holds whole documents of up to d · T tokens,
// of which each of its ranks has T; within a group each document is dealt in zigzag
// (core/zigzag.h), so that it takes a multiple of 2d tokens.

/// What a rank's work takes, in any unit.
struct ContextCosts {
  double token = 1;     ///< a token of its own, padding or not
  double pair = 0;      ///< a query and a key that it sees
  double exchange = 0;  ///< keys and values of a token, from another rank, beside attention
};

struct ContextPlanSpec {
  int64_t num_ranks = 1;      ///< DP · CP
  int64_t rank_tokens = 1;    ///< T
  int64_t max_degree = 1;     ///< divides num_ranks
  int64_t max_documents = 1;  ///< of a group
  ContextCosts costs;
  /// Whether all ranks meet in every micro-batch, as where experts are spread over them: then those
  /// at a time should take equally long. Otherwise only their sums over the step should.
  bool meets = false;
};

/// The ranks that share a micro-batch, and what they have in it.
struct ContextGroup {
  int64_t degree = 1;
  int64_t first_rank = 0;          ///< among DP · CP
  std::vector<int32_t> documents;  ///< by their number, in order
  bool operator==(const ContextGroup&) const = default;
};

struct ContextPlan {
  /// Groups of each micro-batch, by their first ranks; every rank is in one.
  std::vector<std::vector<ContextGroup>> micro_batches;
  double cost = 0;  ///< of the step, see cost_of

  int64_t num_micro_batches() const { return std::ssize(micro_batches); }
  const ContextGroup& group_of(int64_t micro_batch, int64_t rank) const;
};

/// Tokens that a document takes in a group: a multiple of twice its degree.
int64_t padded_length(int64_t length, int64_t degree);
/// The largest power of two that divides `num_ranks`.
int64_t largest_context(int64_t num_ranks);

/// Chooses degrees and micro-batches such that the step's slowest rank is done early: a pure
/// function, the same on every rank. Tries numbers of micro-batches from the fewest that hold all
/// tokens, and shares of a rank's mean work beyond which a document gets more ranks; for each it
/// places long documents first, and packs the others by falling length where least is to be done.
/// REQUIRES that no document is longer than max_degree · T.
ContextPlan plan_contexts(std::span<const int64_t> lengths, const ContextPlanSpec& spec);

/// Of each of the ranks that share a micro-batch, each with so much attention.
double cost_of_group(int64_t degree, double attention, const ContextPlanSpec& spec);
/// When the last rank is done: of a group all ranks begin together, and of a micro-batch where they
/// meet.
double cost_of(const ContextPlan& plan, std::span<const int64_t> lengths,
               const ContextPlanSpec& spec);
}  // namespace tessera

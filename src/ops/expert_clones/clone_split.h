#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace tessera {

/// A rank with at most this part of the mean beyond it (a sixteenth) keeps its tokens: a clone
/// would cost more than it spares.
inline constexpr int64_t kCloneTolerance = 16;

/// What a plan of clones decides, as both its kernels find the rest from: `slots` [P · S] and the
/// tokens of all ranks that each slot gets, `quotas` [P · S].
struct CloneSplit {
  const int64_t* counts;  ///< [P, E]
  const int64_t* slots;
  const int64_t* quotas;
  int64_t num_experts;
  int64_t num_ranks;
  int64_t rank;
  int64_t slots_per_rank;

  struct Range {
    int64_t begin;
    int64_t end;
  };

  /// Of this rank's tokens of the expert in `slot`, those that go there. The expert's copies, home
  /// first, then by slot, share out first what their own ranks have, then the rest rank by rank.
  TESSERA_HOST_DEVICE Range of(int64_t slot) const {
    const int64_t expert = slots[slot];
    if (expert < 0) return {0, 0};
    const int64_t home = expert / (num_experts / num_ranks);
    Shares shares = begin_shares(expert, home);
    int64_t begin = take(shares, home, shares.home_quota);
    for (int64_t other = 0; other < slot; ++other) {
      if (slots[other] == expert) begin += take(shares, other / slots_per_rank, quotas[other]);
    }
    return {begin, begin + take(shares, slot / slots_per_rank, quotas[slot])};
  }

 private:
  /// A walk over the copies of an expert. Tokens that are not kept where they are stand in one row,
  /// by the ranks that have them; copies take them from its front.
  struct Shares {
    int64_t expert;
    int64_t home_quota;
    int64_t first;      ///< of this rank's tokens in that row
    int64_t last;       ///< behind them
    int64_t taken = 0;  ///< of the row, by the copies so far
  };

  TESSERA_HOST_DEVICE int64_t count(int64_t of_rank, int64_t expert) const {
    return counts[of_rank * num_experts + expert];
  }

  TESSERA_HOST_DEVICE int64_t kept(int64_t of_rank, int64_t expert, int64_t quota) const {
    const int64_t there = count(of_rank, expert);
    return there < quota ? there : quota;
  }

  TESSERA_HOST_DEVICE Shares begin_shares(int64_t expert, int64_t home) const {
    Shares shares{.expert = expert, .home_quota = 0, .first = 0, .last = 0};
    for (int64_t source = 0; source < num_ranks; ++source) {
      shares.home_quota += count(source, expert);
      if (source < rank) shares.first += count(source, expert);
    }
    shares.last = shares.first + count(rank, expert);
    for (int64_t slot = 0; slot < num_ranks * slots_per_rank; ++slot) {
      if (slots[slot] != expert) continue;
      shares.home_quota -= quotas[slot];
      keep(shares, slot / slots_per_rank, quotas[slot]);
    }
    keep(shares, home, shares.home_quota);
    return shares;
  }

  /// What the rank of a copy keeps is not in the row.
  TESSERA_HOST_DEVICE void keep(Shares& shares, int64_t of_rank, int64_t quota) const {
    const int64_t tokens = kept(of_rank, shares.expert, quota);
    if (of_rank < rank) shares.first -= tokens;
    if (of_rank <= rank) shares.last -= tokens;
  }

  /// This rank's tokens that the next copy gets.
  TESSERA_HOST_DEVICE int64_t take(Shares& shares, int64_t of_rank, int64_t quota) const {
    const int64_t own = kept(of_rank, shares.expert, quota);
    const int64_t from = shares.taken;
    shares.taken += quota - own;
    const int64_t begin = from > shares.first ? from : shares.first;
    const int64_t end = shares.taken < shares.last ? shares.taken : shares.last;
    return (end > begin ? end - begin : 0) + (of_rank == rank ? own : 0);
  }
};

}  // namespace tessera

#pragma once

#include <cstdint>

#include "comm/communicator.h"

namespace tessera {

// Checks that every back end must pass. Each rank calls them with the same arguments; failures are
// GoogleTest's. The reference of every operation is computed from all ranks' inputs, which each
// rank can make.

/// How a back end sums F32 and F64; BF16 is always summed in F32 in the order of the ranks.
enum class SumOrder : uint8_t {
  kRanks,
  kAny,  ///< those types get whole numbers, of which every order makes the same sum
};

/// Random operations of every kind in random groups (a random cut of the world, so several groups
/// work at a time), with random types and sizes, zero rows among them, several pending at once;
/// results are compared bitwise with sums in the order of ranks, statistics with their formulas.
void check_random_collectives(World& world, uint64_t seed, int64_t num_rounds,
                              SumOrder order = SumOrder::kRanks);

/// Messages between all ranks: sent before received, received before sent, both ways between two
/// ranks, in order.
void check_messages(World& world, uint64_t seed);

/// Collectives over buffers of `bytes`, which may exceed what one message of the back end holds.
void check_large(World& world, int64_t bytes);

/// An all-to-all of messages of random lengths, some of many bytes, none and odd numbers among
/// them.
void check_sizes(World& world, uint64_t seed);

/// Operations of several kinds are started in one order and waited for in another, which differs
/// between ranks, with messages in between.
void check_wait_order(World& world, uint64_t seed);

}  // namespace tessera

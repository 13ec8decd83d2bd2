#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/scratch.h"
#include "comm/transport.h"

namespace tessera {

/// Messages that go at the same time, and what is done when all have arrived.
struct Round {
  std::vector<Message> messages;
  std::function<void()> then = {};
};

/// Collectives as rounds of messages. `schedule(step, round)` fills round `step`, or returns false
/// when there are no more; it is called when the round before is complete.
using Schedule = std::function<bool(int64_t step, Round& round)>;

/// The group that a schedule is for.
struct Place {
  int64_t rank = 0;
  int64_t size = 1;
};

/// Every rank sends its rows to every other at once.
Schedule all_gather_schedule(const Place& place, const Tensor& in, const Tensor& out,
                             std::span<const int64_t> rows);
/// Every rank sends part i to rank i, which sums them in the order of the ranks. Parts travel in
/// pieces, so the scratch memory has a bound (ScratchPool::kBytes).
Schedule reduce_scatter_schedule(const Place& place, const Tensor& in, const Tensor& out,
                                 std::span<const int64_t> rows, ScratchPool& scratch);
/// For few bytes every rank gets all inputs; otherwise the elements are cut evenly over the ranks,
/// each sums its part, and the parts are gathered, piece by piece.
Schedule all_reduce_schedule(const Place& place, const Tensor& in, const Tensor& out, ReduceOp op,
                             ScratchPool& scratch);
/// Every rank sends to every other at once.
Schedule all_to_all_schedule(const Place& place, const Tensor& in, const Tensor& out,
                             std::span<const int64_t> send_rows,
                             std::span<const int64_t> receive_rows);
/// All of them at once, round by round.
Schedule joint_schedule(std::vector<Schedule> schedules);
/// Along a binomial tree.
Schedule broadcast_schedule(const Place& place, const Tensor& tensor, int64_t root);
/// Dissemination: in round k every rank tells the one 2^k places further (Hensgen, Finkel, Manber,
/// "Two algorithms for barrier synchronization", 1988).
Schedule barrier_schedule(const Place& place);
/// One message; none where it has no bytes.
Schedule message_schedule(bool is_send, int64_t peer, const Tensor& tensor);

}  // namespace tessera

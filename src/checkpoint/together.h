#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace tessera {

// What ranks need in order to succeed or fail together, whatever happens to one of them. All are
// collective. They throw CommError where a rank is lost; no other operation works after that.

/// Runs `action`, which must not communicate, on every rank and waits until all have ended. Where
/// it threw on some ranks, throws on all of them the error of the lowest such rank, with its number
/// in front: UserError if it was one, InternalError otherwise.
void together(Communicator& world, const std::function<void()>& action);

/// Runs `action`, which must not communicate, on rank 0 alone, for as long as it takes, while the
/// others wait. What it is given is to be called now and then, by one thread at a time: while that
/// happens at shorter intervals than the communicator's time limit, nobody takes rank 0 for lost.
/// Ends as `together`.
void on_first_rank(Communicator& world,
                   const std::function<void(const std::function<void()>& alive)>& action);

/// Each rank's text, of any length, at rank 0, in the order of the ranks; nothing elsewhere.
std::vector<std::string> gather_texts(Communicator& world, std::string text);

/// Rank 0's texts, on all ranks. Those given by others count for nothing.
std::vector<std::string> broadcast_texts(Communicator& world,
                                         const std::vector<std::string>& texts);

}  // namespace tessera

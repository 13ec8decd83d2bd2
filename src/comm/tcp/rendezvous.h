#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/tcp/socket.h"

namespace tessera {

/// How the ranks of a run find one another.
struct TcpJoin {
  int64_t rank = 0;
  int64_t num_ranks = 1;
  bool one_machine = false;  ///< all ranks are on this machine: nothing else can connect
  std::string host;          ///< rank 0's machine; not looked at where all are on one
  uint16_t port = 0;         ///< where rank 0 listens
  std::string run;           ///< names the run: ranks of others are turned away
  double timeout_seconds = 600;
};

/// A connection to another rank.
struct TcpPeer {
  Socket socket;
  Address address;
};

/// Connects every rank with every other; all must call. Rank 0 listens at the port, and the others
/// tell it where they listen themselves: at the address of this machine that reaches rank 0. When
/// all have come, rank 0 sends each the list of addresses and a token of random bytes; each
/// connects to the ranks between 0 and itself and shows the token. The result is by rank, empty at
/// the own one. Throws CommError, which names who did not come and where it was waited for, or why
/// this rank was turned away.
std::vector<TcpPeer> join_ranks(const TcpJoin& join);

}  // namespace tessera

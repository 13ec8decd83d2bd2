#pragma once

#include <memory>

#include "comm/tcp/rendezvous.h"
#include "comm/transport.h"

namespace tessera {

/// Joins the ranks by TCP (see join_ranks): one connection between any two, without encryption, so
/// for networks whose machines are trusted. All must call. Throws CommError. Its destructor waits
/// until all ranks have come to theirs, or are lost, at most for the time limit.
std::unique_ptr<Transport> connect_tcp(const TcpJoin& join);

}  // namespace tessera

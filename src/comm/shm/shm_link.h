#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>

#include "comm/shm/peer_memory.h"
#include "comm/shm/shm_segment.h"
#include "comm/transport.h"

namespace tessera {

/// One message of an exchange and how far it is. Must stay where it is until it is done.
struct ShmTransfer {
  Message message;
  bool done = false;
};

/// Messages between this rank and another of the same machine. The sender offers a message, the
/// receiver fetches it from the sender's memory and says so: one copy, which the receiver makes
/// whenever it is moved on. A rank that has ended, or gave up, leaves messages as they are; whoever
/// waits for them looks for lost ranks.
class ShmLink {
 public:
  /// `out` is in this rank's segment, `in` in the other's, whose header is `header`.
  struct Lanes {
    ShmLane* out = nullptr;
    ShmLane* in = nullptr;
    const ShmSegment::Header* header = nullptr;
  };
  ShmLink(int64_t rank, const Lanes& lanes, PeerMemory memory);

  void send(const ShmEnvelope& envelope, ShmTransfer& transfer);
  void receive(const ShmEnvelope& envelope, ShmTransfer& transfer);
  /// Takes what the other rank has told, and fetches what there is. Throws CommError where the
  /// system refuses, InternalError where sizes or groups differ.
  void progress();

 private:
  struct Expected {
    ShmEnvelope envelope;
    ShmTransfer* transfer = nullptr;
  };
  struct Fetch {
    ShmOffer offer;
    ShmTransfer* transfer = nullptr;
  };

  void offer_more();
  void take_offers();
  void begin(const ShmOffer& offer, const ShmEnvelope& envelope, ShmTransfer& transfer);
  /// False where the other rank is gone. Whole messages at once: to come back in between would be
  /// to yield the processor, which on a busy machine takes longer than the copy.
  bool fetch(const ShmOffer& offer, ShmTransfer& transfer);
  bool peer_is_there() const;
  void say_fetched(uint64_t id);

  int64_t rank_;
  Lanes lanes_;
  PeerMemory memory_;

  uint64_t num_offered_ = 0;
  std::deque<ShmOffer> waiting_;              ///< offers that have no room yet
  std::map<uint64_t, ShmTransfer*> sending_;  ///< by the offer's id
  int64_t num_out_ = 0;                       ///< offers that the other rank has not answered

  std::list<Expected> expected_;
  std::list<ShmOffer> arrived_;  ///< before their receives
  std::deque<Fetch> fetching_;
};

}  // namespace tessera

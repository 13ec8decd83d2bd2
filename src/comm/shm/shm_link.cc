#include "comm/shm/shm_link.h"

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "comm/copy.h"
#include "comm/error.h"

namespace tessera {

ShmLink::ShmLink(int64_t rank, const Lanes& lanes, PeerMemory memory)
    : rank_(rank), lanes_(lanes), memory_(std::move(memory)) {}

void ShmLink::send(const ShmEnvelope& envelope, ShmTransfer& transfer) {
  const uint64_t id = num_offered_++;
  sending_[id] = &transfer;
  const auto address = reinterpret_cast<uint64_t>(transfer.message.data);
  waiting_.push_back({envelope, id, address, transfer.message.bytes});
  offer_more();
}

// As many are out as the answers have room for.
void ShmLink::offer_more() {
  while (!waiting_.empty() && num_out_ < ShmLane::kSlots) {
    if (!lanes_.out->offers.push(waiting_.front())) return;
    waiting_.pop_front();
    ++num_out_;
  }
}

void ShmLink::receive(const ShmEnvelope& envelope, ShmTransfer& transfer) {
  const auto found = std::ranges::find_if(
      arrived_, [&](const ShmOffer& offer) { return offer.envelope.matches(envelope); });
  if (found == arrived_.end()) {
    expected_.push_back({envelope, &transfer});
    return;
  }
  const ShmOffer offer = *found;
  arrived_.erase(found);
  begin(offer, envelope, transfer);
}

void ShmLink::begin(const ShmOffer& offer, const ShmEnvelope& envelope, ShmTransfer& transfer) {
  ensure(offer.envelope.group == envelope.group,
         "rank {} sent a message of another group: all ranks must make the same groups in the same "
         "order",
         rank_);
  ensure(offer.bytes == transfer.message.bytes,
         "{} bytes came from member {} of the group where {} were expected", offer.bytes,
         transfer.message.peer, transfer.message.bytes);
  fetching_.push_back({offer, &transfer});
}

void ShmLink::say_fetched(uint64_t id) {
  ensure(lanes_.out->fetched.push(id), "rank {} has more offers out than there is room for", rank_);
}

void ShmLink::take_offers() {
  ShmOffer offer;
  while (lanes_.in->offers.take(offer)) {
    const auto found = std::ranges::find_if(expected_, [&](const Expected& expected) {
      return expected.envelope.matches(offer.envelope);
    });
    if (found == expected_.end()) {
      arrived_.push_back(offer);
      continue;
    }
    const Expected expected = *found;
    expected_.erase(found);
    begin(offer, expected.envelope, *expected.transfer);
  }
}

bool ShmLink::peer_is_there() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read comes before
  return lanes_.header->gave_up.load(std::memory_order_seq_cst) == 0;
}

bool ShmLink::fetch(const ShmOffer& offer, ShmTransfer& transfer) {
  const PeerMemory::Outcome outcome =
      memory_.read(offer.address, transfer.message.data, offer.bytes);
  const int error = errno;
  if (!peer_is_there() || outcome == PeerMemory::Outcome::kGone) return false;
  if (outcome == PeerMemory::Outcome::kRefused) {
    if (memory_.has_ended()) return false;
    throw CommError(fmt::format(
        "the memory of rank {} cannot be read any more: {}; set run.shared_memory = \"off\"", rank_,
        describe_errno(error)));
  }
  transfer.done = true;
  say_fetched(offer.id);
  return true;
}

void ShmLink::progress() {
  uint64_t id = 0;
  while (lanes_.in->fetched.take(id)) {
    const auto found = sending_.find(id);
    ensure(found != sending_.end(), "rank {} fetched what nobody offered", rank_);
    found->second->done = true;
    sending_.erase(found);
    --num_out_;
  }
  offer_more();
  take_offers();
  while (!fetching_.empty() && fetch(fetching_.front().offer, *fetching_.front().transfer))
    fetching_.pop_front();
}

}  // namespace tessera

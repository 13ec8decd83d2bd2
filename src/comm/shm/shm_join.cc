#include "comm/shm/shm_join.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <optional>

#include "comm/gather_value.h"
#include "comm/process_watch.h"
#include "core/error.h"

namespace tessera {
namespace {

/// What a rank tells all others of itself.
struct Card {
  ProcessName process;
  uint64_t token = 0;
  uint64_t token_address = 0;  ///< of a copy of the token in memory that is its own alone
  int32_t segment_file = -1;
  int32_t shares = 0;
};

/// A rank of this machine that can be read.
struct Reached {
  ShmSegment segment;
  std::optional<PeerMemory> memory;
};

bool are_neighbours(const Card& a, const Card& b) {
  return a.process.machine == b.process.machine && a.process.pid != b.process.pid;
}

Reached reach(const Card& card, int64_t num_ranks) {
  FileDescriptor process(
      static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(card.process.pid), 0)));
  if (!process) return {};
  ShmSegment segment = ShmSegment::open(card.process.pid, card.segment_file, num_ranks, card.token);
  if (!segment) return {};
  PeerMemory memory(card.process.pid, std::move(process));
  uint64_t token = 0;
  const auto outcome = memory.read(card.token_address, &token, sizeof(token));
  if (outcome != PeerMemory::Outcome::kRead || token != card.token) return {};
  return {std::move(segment), std::move(memory)};
}

/// Tells each rank whether this one reaches it, and learns which reach this one.
std::vector<uint8_t> exchange_reach(Communicator& group, std::vector<uint8_t>& reaches) {
  std::vector<uint8_t> reached_by(reaches.size());
  const Shape shape = {group.size(), 1};
  group.all_to_all({reaches.data(), DType::kU8, shape}, {reached_by.data(), DType::kU8, shape})
      .wait();
  return reached_by;
}

Card make_card(const ShmSegment& segment, const uint64_t& token) {
  Card card;
  card.process = ProcessName::of_this_process();
  if (segment) {
    card.shares = 1;
    card.segment_file = segment.descriptor();
    card.token = token;
    card.token_address = reinterpret_cast<uint64_t>(&token);
  }
  return card;
}

/// Empty where this rank does not share memory, or has none to share.
ShmSegment make_segment(const CommOptions& options, int64_t num_ranks) {
  if (options.shared_memory == SharedMemory::kOff) return {};
  try {
    return ShmSegment(num_ranks);
  } catch (const UserError&) {
    return {};
  }
}

}  // namespace

void join_by_memory(World& world, const CommOptions& options, ShmMesh& mesh) {
  const CommunicatorPtr group = world.make_world_group();
  mesh.set_own(make_segment(options, world.size()));
  const uint64_t token = mesh.own() ? mesh.own().header().token : 0;
  const Card own = make_card(mesh.own(), token);
  const std::vector<Card> cards = gather_value(*group, own);
  std::vector<Reached> reached(cards.size());
  std::vector<uint8_t> reaches(cards.size());
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    const Card& card = cards[rank];
    if (own.shares == 0 || card.shares == 0 || !are_neighbours(own, card)) continue;
    reached[rank] = reach(card, world.size());
    reaches[rank] = reached[rank].segment ? 1 : 0;
  }
  const std::vector<uint8_t> reached_by = exchange_reach(*group, reaches);
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    if (reaches[rank] == 0 || reached_by[rank] == 0) continue;
    mesh.add(static_cast<int64_t>(rank), world.rank(), std::move(reached[rank].segment),
             std::move(*reached[rank].memory));
  }
  mesh.own().close_file();  // all have told what they reach
}

}  // namespace tessera

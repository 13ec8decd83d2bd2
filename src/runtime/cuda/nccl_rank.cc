#include "runtime/cuda/nccl_rank.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>

namespace tessera::cuda {

void NcclRank::abort_all() noexcept {
  for (const auto& [group, ring] : rings) ring->abort();
  // All at once: NCCL gives memory back as it ends, for which the driver lets it wait until no
  // kernel of any group is left.
  std::vector<std::thread> at_work;
  for (NcclChannel* channel : channels) {
    try {
      at_work.emplace_back([channel] { channel->abort(); });
    } catch (const std::system_error&) {  // no more threads
      channel->abort();
    }
  }
  for (std::thread& thread : at_work) thread.join();
}

void NcclRank::fail(FailedWait wait, Device::Time begin, const std::string& reason) {
  wait.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  wait.reason = reason;
  for (const auto& [group, ring] : rings) {
    const int64_t missing = ring->waits_for();
    if (group == wait.group && missing >= 0) wait.missing = {wait.ranks[missing]};
  }
  abort_all();
  throw CommError(describe(wait));
}

std::string NcclRank::find_reason(Device::Time begin) const {
  for (const NcclChannel* channel : channels) {
    if (std::string reason = channel->failure(); !reason.empty()) return reason;
  }
  if (host.ending()) return "another rank has ended, or the job is being ended";
  if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() >
      options.timeout_seconds)
    return fmt::format("the time limit is {} s", options.timeout_seconds);
  return "";
}

void NcclRank::watch_device(Device::Time begin) {
  const std::string reason = find_reason(begin);
  if (reason.empty()) return;
  // With nothing under way the GPU itself is at work, however long that takes.
  for (NcclChannel* channel : channels) {
    if (const auto wait = channel->first_unfinished()) fail(*wait, begin, reason);
  }
}

WatchedChannel::WatchedChannel(NcclRank& shared, const NcclPlace& place, Communicator& host)
    : shared_(shared),
      channel_(
          shared.device, place, share_id(place, host),
          [&shared](const FailedWait& wait, Device::Time begin) {
            if (const std::string reason = shared.find_reason(begin); !reason.empty())
              shared.fail(wait, begin, reason);
          },
          [&shared] { shared.abort_all(); }) {
  shared_.channels.push_back(&channel_);
}

WatchedChannel::~WatchedChannel() {
  // Peers that are lost never complete what is under way.
  if (std::uncaught_exceptions() > 0) shared_.abort_all();
  std::erase(shared_.channels, &channel_);
}

ncclUniqueId WatchedChannel::share_id(const NcclPlace& place, Communicator& host) {
  ncclUniqueId id{};
  const auto root = std::ranges::find(host.ranks(), place.ranks[0]) - host.ranks().begin();
  if (host.rank() == root) NcclLibrary::get().check(NcclLibrary::get().get_unique_id(&id));
  host.broadcast({&id, DType::kU8, {static_cast<int64_t>(sizeof(id))}}, root).wait();
  return id;
}

}  // namespace tessera::cuda

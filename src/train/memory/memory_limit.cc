#include "train/memory/memory_limit.h"

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "train/setup/device_overhead.h"
#include "train/setup/machine.h"

namespace tessera {
namespace {

/// What predictions and other programs may err by: the largest difference measured is a thousandth
/// of a GPU's memory.
constexpr int64_t kSpareShare = 100;
/// Of the host's free memory, shared by the ranks of a machine, what a rank may have: a quarter is
/// for data and other programs.
int64_t share_of_host(int64_t free, int64_t num_here) {
  constexpr double kShare = 0.75;
  return static_cast<int64_t>(kShare * static_cast<double>(free)) / num_here;
}

/// What a rank says of itself.
struct RankRoom {
  int64_t machine = 0;  ///< the same on ranks of one machine
  int64_t room = 0;     ///< of its device
  int64_t lacks = 0;    ///< 1 where what is predicted does not fit
  int64_t device = 0;   ///< bytes
  int64_t host = 0;     ///< free in all, for all ranks of the machine
};

}  // namespace

std::optional<MemoryLimit> given_limit(const TrainSettings& train) {
  const std::optional<int64_t> bytes = train.parse_memory_limit();
  if (!bytes) return std::nullopt;
  return MemoryLimit{.bytes = *bytes};
}

bool chooses_for_device(const TrainSettings& train, const Backend& backend) {
  return train.memory_limit == kDeviceLimit && !backend.is_host() && train.recompute.empty() &&
         train.offload.empty() && !train.stashes();
}

MemoryLimit limit_of_device(const std::string& device, int64_t device_bytes, int64_t num_here) {
  return {.bytes = device_bytes,
          .host_bytes = share_of_host(available_memory(), num_here),
          .device = device,
          .spare = device_bytes / kSpareShare};
}

int64_t find_room(const Settings& settings, const RunLayout& layout, const TrainingModel& model,
                  const Backend& backend, int64_t device_bytes) {
  const auto overhead = [&](bool groups_are_made) {
    return predict_overhead(settings, layout, model, backend, groups_are_made).total();
  };
  return device_bytes - backend.device().used_bytes() + overhead(false) - overhead(true);
}

std::optional<MemoryLimit> find_lacking(bool fits, int64_t room, const Device& device,
                                        int64_t device_bytes, Communicator& world) {
  RankRoom own{.machine = static_cast<int64_t>(std::hash<std::string>()(machine_name())),
               .room = room,
               .lacks = fits ? 0 : 1,
               .device = device_bytes,
               .host = available_memory()};
  constexpr int64_t kNumbers = sizeof(RankRoom) / sizeof(int64_t);
  std::vector<RankRoom> all(world.size());
  world
      .all_gather({&own, DType::kI64, {1, kNumbers}},
                  {all.data(), DType::kI64, {world.size(), kNumbers}})
      .wait();
  if (std::ranges::none_of(all, [](const RankRoom& rank) { return rank.lacks != 0; }))
    return std::nullopt;
  const auto tightest = std::ranges::min_element(all, {}, &RankRoom::room);
  MemoryLimit limit{
      .bytes = tightest->room, .device = device.name(), .spare = tightest->device / kSpareShare};
  for (const RankRoom& rank : all) {
    const int64_t here = std::ranges::count(all, rank.machine, &RankRoom::machine);
    limit.host_bytes = std::min(limit.host_bytes, share_of_host(rank.host, here));
  }
  return limit;
}

}  // namespace tessera

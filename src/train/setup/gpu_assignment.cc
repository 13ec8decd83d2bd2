#include "train/setup/gpu_assignment.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "train/setup/machine.h"

namespace tessera {
namespace {

constexpr size_t kMostGpus = 64;

/// A RankGpus as bytes of one size.
struct Record {
  std::array<char, 64> machine{};
  int64_t can_communicate = 0;
  int64_t num_gpus = 0;
  std::array<uint64_t, kMostGpus> gpus{};
  std::array<int64_t, kMostGpus> indices{};
};

Record pack(const RankGpus& own) {
  Record record;
  own.machine.copy(record.machine.data(), record.machine.size() - 1);
  record.can_communicate = own.can_communicate ? 1 : 0;
  const size_t count = std::min(own.gpus.size(), kMostGpus);
  record.num_gpus = static_cast<int64_t>(count);
  std::copy_n(own.gpus.begin(), count, record.gpus.begin());
  std::copy_n(own.indices.begin(), count, record.indices.begin());
  return record;
}

RankGpus unpack(const Record& record) {
  RankGpus rank{.machine = record.machine.data(),
                .can_communicate = record.can_communicate != 0,
                .gpus = {},
                .indices = {}};
  for (size_t i = 0; i < static_cast<size_t>(record.num_gpus); ++i) {
    rank.gpus.push_back(record.gpus[i]);
    rank.indices.push_back(static_cast<int>(record.indices[i]));
  }
  return rank;
}

/// Ranks of the machine of rank `idx`, up to and with it.
int64_t count_on_machine(std::span<const RankGpus> ranks, size_t idx) {
  return std::ranges::count(ranks, ranks[idx].machine, &RankGpus::machine);
}

std::string describe_shortage(std::span<const RankGpus> ranks, size_t idx) {
  const RankGpus& rank = ranks[idx];
  if (rank.gpus.empty())
    return fmt::format("rank {} on {} sees no GPU that the kernels run on", idx, rank.machine);
  return fmt::format(
      "{} of the {} ranks are on {}, where rank {} sees {} GPU{}, and lower ranks have "
      "taken what it sees",
      count_on_machine(ranks, idx), ranks.size(), rank.machine, idx, rank.gpus.size(),
      rank.gpus.size() == 1 ? "" : "s");
}

}  // namespace

RankGpus find_own_gpus() {
  RankGpus own{.machine = machine_name(),
               .can_communicate = find_nccl().version > 0,
               .gpus = {},
               .indices = {}};
  const GpuList list = list_gpus();
  for (size_t i = 0; i < list.gpus.size(); ++i) {
    if (!list.gpus[i].is_supported()) continue;
    own.gpus.push_back(list.gpus[i].id);
    own.indices.push_back(static_cast<int>(i));
  }
  return own;
}

std::vector<RankGpus> exchange_gpus(const RankGpus& own, World& world) {
  Record record = pack(own);
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Record));
  std::vector<Record> records(world.size());
  world.make_group("gpus", world.make_world_group()->ranks())
      ->all_gather({&record, DType::kU8, {kBytes}},
                   {records.data(), DType::kU8, {kBytes * world.size()}})
      .wait();
  std::vector<RankGpus> ranks;
  for (const Record& one : records) ranks.push_back(unpack(one));
  return ranks;
}

GpuAssignment assign_gpus(std::span<const RankGpus> ranks) {
  GpuAssignment assignment;
  std::map<uint64_t, size_t> owners;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto is_free = [&](uint64_t gpu) { return !owners.contains(gpu); };
    const auto found = std::ranges::find_if(ranks[r].gpus, is_free);
    if (found == ranks[r].gpus.end()) return {.indices = {}, .why = describe_shortage(ranks, r)};
    if (ranks.size() > 1 && !ranks[r].can_communicate)
      return {.indices = {},
              .why = fmt::format("rank {} on {} has no NCCL, by which GPUs communicate "
                                 "(`tessera doctor` says why)",
                                 r, ranks[r].machine)};
    owners[*found] = r;
    assignment.indices.push_back(ranks[r].indices[found - ranks[r].gpus.begin()]);
  }
  return assignment;
}

}  // namespace tessera

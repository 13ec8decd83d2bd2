#include "train/setup/rank_binding.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/setup/machine.h"

namespace tessera {
namespace {

/// What a rank tells the others of.
struct RankPlace {
  std::array<char, 64> machine{};
  int64_t process = 0;
  int32_t near = -1;
  int32_t is_bound = 0;
};

std::vector<RankPlace> exchange(const RankPlace& own, World& world) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(RankPlace));
  std::vector<RankPlace> records(world.size());
  RankPlace sent = own;
  world.make_world_group()
      ->all_gather({&sent, DType::kU8, {kBytes}},
                   {records.data(), DType::kU8, {kBytes * world.size()}})
      .wait();
  return records;
}

size_t place_of(std::span<const NumaNode> nodes, int number) {
  return std::ranges::find(nodes, number, &NumaNode::number) - nodes.begin();
}

/// The nodes of a rank, as the first and the one behind the last.
using Span = std::pair<size_t, size_t>;

std::vector<Span> spread(std::span<const NumaNode> nodes, std::span<const int> near) {
  std::vector<Span> spans;
  for (size_t rank = 0; rank < near.size(); ++rank) {
    const size_t at = place_of(nodes, near[rank]);
    if (at < nodes.size()) {
      spans.emplace_back(at, at + 1);
      continue;
    }
    const size_t first = rank * nodes.size() / near.size();
    spans.emplace_back(first, std::max(first + 1, (rank + 1) * nodes.size() / near.size()));
  }
  return spans;
}

/// A share of a node's cores.
std::vector<int> take_cores(const NumaNode& node, size_t rank, size_t num_ranks) {
  const size_t count = node.cores.size();
  const size_t first = rank * count / num_ranks;
  const size_t last = std::max(first + 1, (rank + 1) * count / num_ranks);
  std::vector<int> processors;
  for (size_t core = first; core < last; ++core)
    processors.insert(processors.end(), node.cores[core].begin(), node.cores[core].end());
  std::ranges::sort(processors);
  return processors;
}

bool is_bound(std::span<const NumaNode> nodes) {
  size_t count = 0;
  for (const NumaNode& node : nodes) count += node.processors().size();
  return bound_processors().size() < count;
}

/// What run.bind means here.
RankBinding resolve(const Settings& settings, std::span<const NumaNode> nodes, bool bound,
                    bool has_reason) {
  if (settings.run.bind != RankBinding::kAuto) return settings.run.bind;
  return nodes.size() > 1 && !bound && has_reason ? RankBinding::kNuma : RankBinding::kNone;
}

}  // namespace

std::vector<std::vector<int>> share_processors(std::span<const NumaNode> nodes, RankBinding mode,
                                               std::span<const int> near) {
  const std::vector<Span> spans = spread(nodes, near);
  std::vector<std::vector<int>> shares;
  for (size_t rank = 0; rank < spans.size(); ++rank) {
    const auto [first, last] = spans[rank];
    if (mode == RankBinding::kCores && last == first + 1) {
      const auto before = static_cast<size_t>(
          std::count(spans.begin(), spans.begin() + static_cast<ptrdiff_t>(rank), spans[rank]));
      const auto all = static_cast<size_t>(std::ranges::count(spans, spans[rank]));
      shares.push_back(take_cores(nodes[first], before, all));
      continue;
    }
    std::vector<int>& share = shares.emplace_back();
    for (size_t node = first; node < last; ++node) {
      const std::vector<int> more = nodes[node].processors();
      share.insert(share.end(), more.begin(), more.end());
    }
    std::ranges::sort(share);
  }
  return shares;
}

std::string bind_rank(const Settings& settings, World& world, int gpu) {
  if (settings.run.bind == RankBinding::kNone) return "";
  const std::vector<NumaNode> nodes = find_numa_nodes();
  RankPlace own{.process = getpid(),
                .near = gpu < 0 ? -1 : numa_node_of(gpu_pci_address(gpu)),
                .is_bound = is_bound(nodes) ? 1 : 0};
  machine_name().copy(own.machine.data(), own.machine.size() - 1);
  const std::vector<RankPlace> all =
      world.size() == 1 ? std::vector<RankPlace>{own} : exchange(own, world);
  std::vector<int> near;
  size_t place = 0;
  bool bound = false;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].machine != own.machine) continue;
    if (rank == static_cast<size_t>(world.rank())) place = near.size();
    // Ranks that are threads of one process cannot be bound one by one.
    if (rank != static_cast<size_t>(world.rank()) && all[rank].process == own.process) return "";
    near.push_back(all[rank].near);
    bound = bound || all[rank].is_bound != 0;
  }
  const RankBinding mode = resolve(settings, nodes, bound, near.size() > 1 || own.near >= 0);
  if (mode == RankBinding::kNone) return "";
  require(!bound,
          "run.bind asks to bind ranks to processors, but what started them has bound some "
          "already; leave run.bind out, or start them unbound (mpirun --bind-to none)");
  require(!nodes.empty(), "run.bind: the machine's processors cannot be found out; leave it out");
  const auto shares = share_processors(nodes, mode, near);
  const std::vector<int>& share = shares[place];
  require(bind_process(share),
          "run.bind: this process cannot be bound to processors {}; leave it out",
          format_ranges(share));
  const auto sharing = static_cast<int>(std::ranges::count(shares, share));
  const int room = std::max(1, static_cast<int>(share.size()) / sharing);
  omp_set_num_threads(std::min(omp_get_max_threads(), room));
  return fmt::format("rank {} runs on processors {}", world.rank(), format_ranges(share));
}

}  // namespace tessera

// Collectives between processes, started by a launcher (`mpirun -n 4 comm_bench`): of each size the
// median time of one operation, as rank 0 sees it, by the launcher's transport alone, and by
// reading the other ranks' memory; in turns, since other work on the machine comes and goes. Sizes
// are those of the larger of in and out. `comm_bench BYTES` measures from that size on, `comm_bench
// BYTES SHARED` with messages of SHARED bytes and more read, not those of the default.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <vector>

#include "comm/launch/launch.h"
#include "comm/process_world.h"
#include "comm/shm/shm_transport.h"
#include "core/memory.h"

namespace tessera {
namespace {

constexpr int64_t kLargest = int64_t{64} << 20;
constexpr int64_t kSmall = 1 << 15;

struct Buffers {
  Buffers(int64_t bytes, int64_t num_ranks)
      : part(std::max<int64_t>(bytes / 4 / num_ranks, 1)),
        whole(DType::kF32, {part * num_ranks}),
        other(DType::kF32, {part * num_ranks}),
        own(DType::kF32, {part}) {}

  int64_t part;
  OwnedTensor whole;
  OwnedTensor other;
  OwnedTensor own;
};

/// A way to exchange.
struct Way {
  const char* name;
  std::unique_ptr<World> world;
  CommunicatorPtr group;
};
using Ways = std::array<Way, 2>;
using Operation = std::function<void(Communicator& group, const Buffers& buffers)>;

double seconds_of(const Way& way, const Buffers& buffers, const Operation& operation) {
  way.group->barrier();
  const auto begin = std::chrono::steady_clock::now();
  operation(*way.group, buffers);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  return taken.count();
}

double median(std::vector<double>& values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void measure(const Ways& ways, int64_t bytes, const char* name, const Operation& operation) {
  const int64_t num_ranks = ways[0].group->size();
  const int64_t rounds = bytes <= kSmall ? 301 : 25;
  std::array<std::vector<double>, std::tuple_size_v<Ways>> seconds;
  const Buffers buffers(bytes, num_ranks);
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      const double taken = seconds_of(ways[i], buffers, operation);
      if (round > 0) seconds[i].push_back(taken);  // the first touches the memory
    }
  }
  if (ways[0].group->rank() != 0) return;
  std::printf("%9lld bytes %-14s", static_cast<long long>(buffers.part * 4 * num_ranks), name);
  const double base = median(seconds[0]);
  for (size_t i = 0; i < ways.size(); ++i) {
    const double middle = median(seconds[i]);
    std::printf("  %s %9.1f us (least %9.1f), %4.2f x", ways[i].name, middle * 1e6,
                seconds[i].front() * 1e6, base / middle);
  }
  std::printf("\n");
}

void measure_all(const Ways& ways, int64_t bytes) {
  measure(ways, bytes, "all_to_all",
          [](Communicator& group, const Buffers& b) { group.all_to_all(b.whole, b.other).wait(); });
  measure(ways, bytes, "all_gather",
          [](Communicator& group, const Buffers& b) { group.all_gather(b.own, b.whole).wait(); });
  measure(ways, bytes, "reduce_scatter", [](Communicator& group, const Buffers& b) {
    group.reduce_scatter(b.whole, b.own).wait();
  });
  measure(ways, bytes, "all_reduce",
          [](Communicator& group, const Buffers& b) { group.all_reduce(b.whole, b.other).wait(); });
}

Way make_way(const char* name, std::unique_ptr<World> world) {
  CommunicatorPtr group = world->make_world_group();
  return {name, std::move(world), std::move(group)};
}

int run(int64_t smallest, const CommOptions& options) {
  const LaunchInfo info = detect_launch(process_environment());
  if (info.num_ranks == 1) {
    std::cerr << "comm_bench: start it as several ranks: mpirun -n 2 comm_bench\n";
    return 2;
  }
  const auto transport = connect_transport(info, {});
  const Ways ways = {make_way("alone", make_process_world(transport, {}, false)),
                     make_way("read", make_shared_world(transport, options, false))};
  return run_rank(*ways[0].world, [&] {
    for (int64_t bytes = smallest; bytes <= kLargest; bytes *= 4) measure_all(ways, bytes);
    return 0;
  });
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    tessera::CommOptions options;
    if (argc > 2) options.shared_bytes = std::atoll(argv[2]);
    return tessera::run(argc > 1 ? std::atoll(argv[1]) : 64, options);
  } catch (const std::exception& error) {
    std::cerr << "comm_bench: " << error.what() << "\n";
    return 2;
  }
}

// Collectives between processes, started by a launcher (`mpirun -n 4 comm_bench`): of each size the
// shortest time of one operation, as rank 0 sees it, and the bytes that a rank sends in a second.
// Sizes are those of the larger of in and out.

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <limits>

#include "comm/launch/launch.h"
#include "core/memory.h"

namespace tessera {
namespace {

constexpr int64_t kLargest = int64_t{64} << 20;

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

double best_seconds(Communicator& group, int64_t rounds, const std::function<void()>& operation) {
  double best = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < rounds; ++i) {
    group.barrier();
    const auto begin = std::chrono::steady_clock::now();
    operation();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best, taken.count());
  }
  return best;
}

void print(const char* name, double seconds, double sent) {
  std::printf("  %s %9.1f us %6.2f GB/s", name, seconds * 1e6, sent / seconds / 1e9);
}

void measure(World& world, Communicator& group, int64_t bytes) {
  const Buffers b(bytes, world.size());
  const int64_t rounds = bytes <= (1 << 16) ? 300 : 15;
  const auto best = [&](const std::function<void()>& work) {
    return best_seconds(group, rounds, work);
  };
  const double reduce = best([&] { group.all_reduce(b.whole, b.whole).wait(); });
  const double gather = best([&] { group.all_gather(b.own, b.whole).wait(); });
  const double scatter = best([&] { group.reduce_scatter(b.whole, b.own).wait(); });
  const double exchange = best([&] { group.all_to_all(b.whole, b.other).wait(); });
  if (world.rank() != 0) return;
  const auto sent = static_cast<double>(b.part * 4 * (world.size() - 1));
  std::printf("%9lld bytes:", static_cast<long long>(b.part * 4 * world.size()));
  print("all_reduce", reduce, 2 * sent);
  print("all_gather", gather, sent);
  print("reduce_scatter", scatter, sent);
  print("all_to_all", exchange, sent);
  std::printf("\n");
}

int run() {
  const auto world = connect_world();
  return run_rank(*world, [&] {
    const CommunicatorPtr group = world->make_world_group();
    for (int64_t bytes = 64; bytes <= kLargest; bytes *= 8) measure(*world, *group, bytes);
    return 0;
  });
}

}  // namespace
}  // namespace tessera

int main() {
  try {
    return tessera::run();
  } catch (const std::exception& error) {
    std::cerr << "comm_bench: " << error.what() << "\n";
    return 2;
  }
}

// The rate of tile registers (AMX) on each processor that this process may use: alone, and all at
// once. Operands of 32 x 32 results over a depth of 256 stay in the first cache. On rented machines
// some processors are far slower, because of whoever runs beside them.
//
//   tile_bench

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "core/process/stopwatch.h"
#include "ops/gemm/tile_permission.h"
#include "ops/gemm/tile_registers.h"
#include "ops/gemm/tile_scratch.h"

namespace tessera {
namespace {

constexpr int64_t kSteps = 8;
constexpr int64_t kPanel = 2 * tile::kTileSize * kSteps;
constexpr int kProducts = 20000;

struct Operands {
  const tile::Word* a[2];
  const tile::Word* b[2];
  int64_t a_stride = tile::kTileWords;
  int64_t b_stride = tile::kTileWords;
};

double seconds_of_products(const tile::Word* a, float* c) {
  const auto start = std::chrono::steady_clock::now();
  tile::AmxTiles tiles;
  for (int i = 0; i < kProducts; ++i) {
    tile::begin_four(tiles, c, 2 * tile::kTileWords, false);
    tile::multiply_four(tiles, kSteps, [a](int64_t step) {
      const tile::Word* own = a + step * 2 * tile::kTileSize;
      return Operands{{own, own + tile::kTileSize}, {own + kPanel, own + kPanel + tile::kTileSize}};
    });
    tile::end_four(tiles, c, 2 * tile::kTileWords);
  }
  return seconds_since(start);
}

/// The best GFLOPS of at least five rounds, and of as many as there are until `stop`.
double measure(int processor, const std::atomic<bool>& stop) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  sched_setaffinity(0, sizeof(set), &set);
  constexpr int64_t kResult = 4 * tile::kTileSize;
  TileMemory memory;
  tile::Word* words = memory.at_least(2 * kPanel + kResult);
  auto* c = reinterpret_cast<float*>(words + 2 * kPanel);
  double best = 1e9;
  for (int round = 0; round < 5 || !stop; ++round)
    best = std::min(best, seconds_of_products(words, c));
  constexpr double kFlops = 4.0 * 2 * 16 * 16 * 32 * kSteps * kProducts;
  return kFlops / best / 1e9;
}

std::vector<double> measure_together(const std::vector<int>& processors) {
  std::vector<double> rates(processors.size());
  std::atomic<bool> stop = processors.size() == 1;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < processors.size(); ++i)
    threads.emplace_back([&, i] { rates[i] = measure(processors[i], stop); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  return rates;
}

void run() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof(set), &set);
  std::vector<int> processors;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) processors.push_back(i);
  }
  const std::vector<double> together = measure_together(processors);
  fmt::print("{:>10}{:>16}{:>16}\n", "processor", "GFLOPS alone", "with all");
  for (size_t i = 0; i < processors.size(); ++i) {
    fmt::print("{:>10}{:>16.0f}{:>16.0f}\n", processors[i], measure_together({processors[i]})[0],
               together[i]);
  }
}

}  // namespace
}  // namespace tessera

int main() {
  if (!tessera::may_use_tiles()) {
    fmt::print("this processor has no tile registers (AMX), or the system does not give them\n");
    return 2;
  }
  tessera::run();
}

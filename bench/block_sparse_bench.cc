// A layer's experts by block-sparse products against the same by grouped products: forward and
// backward, with balanced routing and with one expert taking half of the rows. Ratios are of best
// times in one run. With TESSERA_BENCH_SERIAL=1 (one thread, CPU time) they hold on a busy machine
// as well.
//
//   block_sparse_bench [rows hidden inner experts block_size]

#include <fmt/format.h>
#include <omp.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "ops/block_sparse/layer_testing.h"

namespace tessera {
namespace {

using testing::LayerCase;
using testing::LayerValues;
using testing::ProgramRun;

constexpr int kRounds = 7;

struct Sizes {
  int64_t rows = 16384;
  int64_t hidden = 512;
  int64_t inner = 1024;
  int64_t experts = 8;
  int64_t block_size = 128;
};

bool serial() {
  return std::getenv("TESSERA_BENCH_SERIAL") != nullptr;
}

double now() {
  timespec time{};
  clock_gettime(serial() ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Best times of one implementation.
struct Times {
  double forward = 1e30;
  double backward = 1e30;
};

class LayerBench {
 public:
  LayerBench(const LayerCase& layer, LayerValues (*build)(const LayerCase&, Program&)) {
    Program program("experts");
    values_ = build(layer, program);
    run_ = std::make_unique<ProgramRun>(
        program, DifferentiateRequest{{values_.y_RH}, {values_.rows_RH, values_.probs_R}},
        testing::layer_kernels());
    Random random(1, 0);
    fill_inputs(layer, values_, *run_, random);
  }

  void run_once() {
    const double start = now();
    run_->run_forward();
    const double middle = now();
    run_->run_backward();
    const double end = now();
    times_.forward = std::min(times_.forward, middle - start);
    times_.backward = std::min(times_.backward, end - middle);
  }
  const Times& times() const { return times_; }

 private:
  LayerValues values_{};
  std::unique_ptr<ProgramRun> run_;
  Times times_;
};

void report(const std::string& what, double flops, double sparse, double grouped) {
  fmt::print("{:38} {:8.2f} ms {:7.0f} GFLOP/s   grouped {:8.2f} ms   time ratio {:.3f}\n", what,
             sparse * 1e3, flops / sparse * 1e-9, grouped * 1e3, sparse / grouped);
}

void compare(const LayerCase& layer, const std::string& what) {
  LayerBench sparse(layer, testing::build_block_sparse_layer);
  LayerBench grouped(layer, testing::build_grouped_layer);
  for (int round = 0; round < kRounds; ++round) {
    sparse.run_once();
    grouped.run_once();
  }
  const auto total_rows = static_cast<double>(layer.offsets().back());
  const double flops =
      2.0 * total_rows * static_cast<double>(layer.hidden * layer.sizes[0] * (layer.gates() + 1));
  report(what + " forward", flops, sparse.times().forward, grouped.times().forward);
  report(what + " backward", 2.0 * flops, sparse.times().backward, grouped.times().backward);
}

/// Rows by expert, all alike or one with half of them.
std::vector<int64_t> routing(const Sizes& sizes, bool skewed) {
  const int64_t rest = std::max<int64_t>(sizes.experts - 1, 1);
  std::vector<int64_t> rows(sizes.experts,
                            skewed ? sizes.rows / 2 / rest : sizes.rows / sizes.experts);
  if (skewed) rows[sizes.experts / 2] = sizes.rows / 2;
  return rows;
}

void run(const Sizes& sizes) {
  if (serial()) omp_set_num_threads(1);
  fmt::print("R {} H {} F {} E {} block {}, SwiGLU, {} threads, best of {}\n", sizes.rows,
             sizes.hidden, sizes.inner, sizes.experts, sizes.block_size, omp_get_max_threads(),
             kRounds);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool skewed : {false, true}) {
      const LayerCase layer{.dtype = dtype,
                            .block_size = sizes.block_size,
                            .hidden = sizes.hidden,
                            .sizes = std::vector<int64_t>(sizes.experts, sizes.inner),
                            .rows = routing(sizes, skewed),
                            .spare_rows = 0};
      compare(layer, fmt::format("{} {}", dtype_name(dtype), skewed ? "skewed" : "balanced"));
    }
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::Sizes sizes;
  const std::array fields = {&sizes.rows, &sizes.hidden, &sizes.inner, &sizes.experts,
                             &sizes.block_size};
  for (int i = 1; i < argc && i <= static_cast<int>(fields.size()); ++i) {
    *fields[i - 1] = std::atoll(argv[i]);
  }
  tessera::run(sizes);
}

#include "train/machine.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "core/memory.h"
#include "ops/gemm/gemm.h"

namespace tessera {
namespace {

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

double time_gemm(const Gemm& product) {
  const auto start = std::chrono::steady_clock::now();
  gemm(product);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double measure_matrix_peak(DType dtype) {
  constexpr int64_t kSize = 1024;
  // Bounded, since many ranks may measure on few cores before they start.
  constexpr int kMinRuns = 3;
  constexpr int kMaxRuns = 16;
  constexpr double kEnough = 0.1;  // seconds
  const OwnedTensor a(dtype, {kSize, kSize});
  const OwnedTensor b(dtype, {kSize, kSize});
  const OwnedTensor c(DType::kF32, {kSize, kSize});
  const Gemm product{.transpose_b = true,
                     .m = kSize,
                     .n = kSize,
                     .k = kSize,
                     .a = a.get().data,
                     .lda = kSize,
                     .b = b.get().data,
                     .ldb = kSize,
                     .c = c.get().data,
                     .ldc = kSize,
                     .input_type = dtype};
  double best = time_gemm(product);
  double total = 0;
  for (int run = 0; run < kMaxRuns && (run < kMinRuns || total < kEnough); ++run) {
    const double seconds = time_gemm(product);
    best = std::min(best, seconds);
    total += seconds;
  }
  return 2.0 * kSize * kSize * kSize / best;
}

std::string describe_machine() {
  const int64_t memory = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  return fmt::format("{}, {} threads, {}", processor_name(), omp_get_max_threads(),
                     format_bytes(memory));
}

}  // namespace tessera

// The rates of `gemm` in the shapes of a training step of the preset "workstation" (8192 tokens),
// and of large square products, in F32 and BF16, each alone on all threads; and of as many products
// at once as there are threads, one on each, as experts have them. The median of several rounds.
// bench/rivals/cpu_products.py times PyTorch's beside it.
//
//   gemm_bench [rounds]

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/process/stopwatch.h"
#include "core/random.h"
#include "core/tensor.h"
#include "ops/gemm/gemm.h"

namespace tessera {
namespace {

struct Case {
  const char* name;
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  bool accumulate = false;
  bool narrow = false;     ///< a BF16 result of BF16 inputs
  bool by_thread = false;  ///< one product a thread, of m / threads rows each
};

const std::vector<Case> kCases = {
    {"square 1024, A Bt", 1024, 1024, 1024, false, true},
    {"square 2048, A Bt", 2048, 2048, 2048, false, true},
    {"square 4096, A Bt", 4096, 4096, 4096, false, true},
    {"square 4096, A B", 4096, 4096, 4096, false, false},
    {"attention, forward", 8192, 512, 512, false, true, false, true},
    {"attention, to inputs", 8192, 512, 512, false, false, false, true},
    {"attention, to weights", 512, 512, 8192, true, false, true},
    {"experts FC1, forward", 16384, 2048, 512, false, true, false, true, true},
    {"experts FC2, forward", 16384, 512, 1024, false, false, false, true, true},
    {"experts FC1, to inputs", 16384, 512, 2048, false, false, false, true, true},
    {"experts FC2, to inputs", 16384, 1024, 512, false, true, false, true, true},
    {"experts FC1, to weights", 2048, 512, 16384, true, false, true, false, true},
    {"head, logits", 2048, 32768, 512, false, true},
    {"head, to inputs", 2048, 512, 32768, false, false},
    {"head, to weights", 32768, 512, 2048, true, false, true},
    {"head block, logits", 512, 4096, 512, false, true},
};

std::vector<std::byte> random_matrix(DType dtype, int64_t count) {
  std::vector<std::byte> memory(count * dtype_size(dtype));
  Random random(1, 1);
  std::vector<float> block(65537);
  for (float& value : block) value = static_cast<float>(random.next_normal());
  for (int64_t i = 0; i < count; ++i) {
    const float value = block[i % block.size()];
    if (dtype == DType::kBF16) {
      reinterpret_cast<Bf16*>(memory.data())[i] = Bf16(value);
    } else {
      reinterpret_cast<float*>(memory.data())[i] = value;
    }
  }
  return memory;
}

/// The operands of a case in one type.
class Product {
 public:
  Product(const Case& c, DType dtype)
      : case_(c),
        dtype_(dtype),
        a_(random_matrix(dtype, c.m * c.k)),
        b_(random_matrix(dtype, c.k * c.n)),
        c_(random_matrix(out_type(), c.m * c.n)) {}

  double flops() const {
    return 2.0 * static_cast<double>(case_.m) * static_cast<double>(case_.n) *
           static_cast<double>(case_.k);
  }

  void run() {
    if (!case_.by_thread) return gemm(part(0, case_.m));
#pragma omp parallel
    {
      const int64_t threads = omp_get_num_threads();
      const int64_t thread = omp_get_thread_num();
      const int64_t first = case_.m * thread / threads;
      gemm(part(first, case_.m * (thread + 1) / threads - first));
    }
  }

 private:
  DType out_type() const {
    return case_.narrow && dtype_ == DType::kBF16 ? DType::kBF16 : DType::kF32;
  }

  Gemm part(int64_t first, int64_t rows) {
    const int64_t lda = case_.transpose_a ? case_.m : case_.k;
    const int64_t a_idx = case_.transpose_a ? first : first * lda;
    return {.transpose_a = case_.transpose_a,
            .transpose_b = case_.transpose_b,
            .m = rows,
            .n = case_.n,
            .k = case_.k,
            .a = a_.data() + a_idx * dtype_size(dtype_),
            .lda = lda,
            .b = b_.data(),
            .ldb = case_.transpose_b ? case_.k : case_.n,
            .c = c_.data() + first * case_.n * dtype_size(out_type()),
            .ldc = case_.n,
            .input_type = dtype_,
            .output_type = out_type(),
            .accumulate = case_.accumulate};
  }

  Case case_;
  DType dtype_;
  std::vector<std::byte> a_, b_, c_;
};

double median_gflops(const Case& c, DType dtype, int rounds) {
  Product product(c, dtype);
  product.run();
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    product.run();
    seconds.push_back(seconds_since(start));
  }
  std::ranges::sort(seconds);
  return product.flops() / seconds[seconds.size() / 2] / 1e9;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using tessera::DType;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  fmt::print("{} threads, GFLOPS{:>26}{:>10}\n", omp_get_max_threads(), "f32", "bf16");
  for (const tessera::Case& c : tessera::kCases) {
    const double f32 = tessera::median_gflops(c, DType::kF32, rounds);
    const double bf16 = tessera::median_gflops(c, DType::kBF16, rounds);
    fmt::print("{:<34}{:>10.0f}{:>10.0f}\n", c.name, f32, bf16);
  }
}

#include "train/setup/machine.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <fstream>
#include <functional>
#include <limits>

#include "core/host_tensor.h"
#include "core/process/stopwatch.h"
#include "core/random.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear.h"
#include "runtime/executable.h"

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

/// Zeros, or rows that are alike, would draw less power than numbers do.
void fill_with_noise(const Tensor& tensor) {
  const HostTensor host(tensor, HostTensor::Access::kWrite);
  Random random(1, 1);
  std::vector<float> block(65537);  // prime: no row begins where another does
  for (float& value : block) value = static_cast<float>(random.next_normal());
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    const float value = block[i % block.size()];
    if (tensor.dtype == DType::kBF16) {
      host.get().as<Bf16>()[i] = Bf16(value);
    } else {
      host.get().as<float>()[i] = value;
    }
  }
  host.store();
}

double time_gemm(const Gemm& product) {
  const auto start = std::chrono::steady_clock::now();
  gemm(product);
  return seconds_since(start);
}

/// An error of one thread is thrown when all are done.
void for_each_thread(const std::function<void()>& action) {
  std::exception_ptr error;
#pragma omp parallel
  try {
    action();
  } catch (...) {
#pragma omp critical(tessera_warm_up)
    error = std::current_exception();
  }
  if (error) std::rethrow_exception(error);
}

/// Of products that compile kernels: their operands of F32 fit half the size in BF16.
constexpr int64_t kWarmSize = 256;

}  // namespace

/// Products of one type whose operands share memory of `size` squared values each. No one shape is
/// the fastest on every machine.
class PeakProducts {
 public:
  PeakProducts(DType dtype, int64_t size)
      : a_(dtype, {size, size}), b_(dtype, {size, size}), c_(DType::kF32, {size, size}) {
    add(size, size, size);
    add(2 * size, size / 2, size / 2);
    add(size / 2, size / 2, 2 * size);
    for (const Gemm& product : products_) gemm(product);  // the first time compiles
  }

  /// Makes each kind of product of this type, and of F32, once. REQUIRES a size of 512 or more.
  void warm_up() const;

  /// Runs each once and returns the best rate, in FLOP/s.
  double measure() const {
    double best = 0;
    for (const Gemm& product : products_) {
      const auto flops = 2.0 * static_cast<double>(product.m * product.n * product.k);
      best = std::max(best, flops / time_gemm(product));
    }
    return best;
  }

 private:
  void add(int64_t m, int64_t n, int64_t k) {
    products_.push_back({.transpose_b = true,
                         .m = m,
                         .n = n,
                         .k = k,
                         .a = a_.get().data,
                         .lda = k,
                         .b = b_.get().data,
                         .ldb = k,
                         .c = c_.get().data,
                         .ldc = n,
                         .input_type = a_.get().dtype});
  }

  OwnedTensor a_;
  OwnedTensor b_;
  OwnedTensor c_;
  std::vector<Gemm> products_;
};

/// On every thread: each has objects and scratch memory of its own.
void PeakProducts::warm_up() const {
  for_each_thread([&] {
    const OwnedTensor result(DType::kF32, {kWarmSize, kWarmSize});
    for (const DType dtype : {DType::kF32, a_.get().dtype}) {
      for (int kind = 0; kind < 8; ++kind) {
        Gemm product{.transpose_a = (kind & 1) != 0,
                     .transpose_b = (kind & 2) != 0,
                     .m = kWarmSize,
                     .n = kWarmSize,
                     .k = kWarmSize,
                     .a = a_.get().data,
                     .lda = kWarmSize,
                     .b = b_.get().data,
                     .ldb = kWarmSize,
                     .c = result.get().data,
                     .ldc = kWarmSize,
                     .input_type = dtype,
                     .accumulate = (kind & 4) != 0};
        gemm(product);
        if (dtype == DType::kF32 || product.accumulate) continue;
        product.output_type = dtype;
        gemm(product);
      }
    }
  });
}

namespace {

/// The best rate of products in some rounds. Bounded, since many ranks may measure on
/// few cores before they start.
double measure_products(const PeakProducts& products) {
  constexpr int kMinRounds = 2;
  constexpr int kMaxRounds = 16;
  constexpr double kEnough = 0.1;  // seconds
  double best = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < kMaxRounds; ++round) {
    if (round >= kMinRounds && seconds_since(start) >= kEnough) break;
    best = std::max(best, products.measure());
  }
  return best;
}

constexpr int64_t kSmallSize = 512;
constexpr int64_t kLargeSize = 1024;

}  // namespace

double measure_matrix_peak(DType dtype) {
  return std::max(measure_products(PeakProducts(dtype, kLargeSize)),
                  measure_products(PeakProducts(dtype, kSmallSize)));
}

MatrixPeakMeter::MatrixPeakMeter(DType dtype)
    : products_(std::make_shared<const PeakProducts>(dtype, kSmallSize)) {
  products_->warm_up();
}

double MatrixPeakMeter::measure() const {
  return measure_products(*products_);
}

std::optional<MatrixPeakMeter> make_peak_meter(const Backend& backend, DType dtype) {
  if (!backend.is_host()) return std::nullopt;
  return MatrixPeakMeter(dtype);
}

double measure_matrix_peak(const Backend& backend, DType dtype) {
  if (backend.is_host()) return measure_matrix_peak(dtype);
  constexpr int kRuns = 10;
  const int64_t size = dtype == DType::kBF16 ? 8192 : 4096;
  const ValueType type{dtype, {size, size}};
  Program program("matrix_peak");
  const ValueId x = program.add_input("x", type);
  const ValueId weight = program.add_weight("weight", type);
  const ValueId y = program.add1(make_linear(), {x, weight}, "y");
  program.set_outputs({y});
  const Executable executable(std::move(program), backend);
  Device& device = backend.device();
  Bindings bindings = executable.make_bindings();
  std::vector<OwnedTensor> memory;
  for (const ValueId id : {x, weight, y}) {
    memory.emplace_back(type.dtype, type.shape, "measuring matrix products", device);
    bindings.tensors[id] = memory.back();
  }
  fill_with_noise(memory[0]);
  fill_with_noise(memory[1]);
  const Buffer transient(std::max<int64_t>(executable.plan().transient_bytes, 1),
                         "measuring matrix products", device);
  bindings.transient = transient.data();
  double best = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kRuns; ++run) {
    executable.run(bindings,
                   [&](const NodeEvent& event) { best = std::min(best, event.seconds()); });
    device.synchronize();
  }
  const auto n = static_cast<double>(size);
  return 2 * n * n * n / best;
}

int64_t available_memory() {
  constexpr int64_t kKibibyte = 1024;
  std::ifstream file("/proc/meminfo");
  std::string key;
  int64_t kibibytes = 0;
  while (file >> key >> kibibytes) {
    if (key == "MemAvailable:") return kibibytes * kKibibyte;
    std::getline(file, key);
  }
  return 0;
}

std::string machine_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

int64_t machine_memory() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
}

std::string describe_machine() {
  return fmt::format("{}, {} threads, {}", processor_name(), omp_get_max_threads(),
                     format_bytes(machine_memory()));
}

}  // namespace tessera

// The fused head and cross-entropy against the plain product of the same sizes, for several chunk
// and block sizes, and AdamW and the gradient norm against a copy of memory. Ratios are of best
// times in one run. TESSERA_BENCH_SERIAL=1 measures CPU time on one thread, which holds on a busy
// machine too.
//
//   loss_bench [tokens hidden vocabulary]

#include <fmt/format.h>
#include <omp.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "core/memory.h"
#include "core/random.h"
#include "ops/adamw/adamw.h"
#include "ops/gemm/gemm.h"
#include "ops/grad_norm/grad_norm.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tessera {
namespace {

struct Sizes {
  int64_t T = 4096;
  int64_t H = 512;
  int64_t V = 32768;
};

bool serial() {
  return std::getenv("TESSERA_BENCH_SERIAL") != nullptr;
}

double now() {
  timespec time{};
  clock_gettime(serial() ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double seconds(const std::function<void()>& work) {
  const double start = now();
  work();
  return now() - start;
}

/// The best time of each of several works, run in turn so that they see the same machine.
std::vector<double> best_seconds(const std::vector<std::function<void()>>& works, int rounds) {
  std::vector<double> best(works.size(), 1e30);
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < works.size(); ++i) best[i] = std::min(best[i], seconds(works[i]));
  }
  return best;
}

OwnedTensor random_tensor(DType dtype, const Shape& shape, float deviation) {
  OwnedTensor tensor(dtype, shape);
  Random random(1, static_cast<uint64_t>(shape[0]));
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    const auto value = static_cast<float>(random.next_uniform() - 0.5) * deviation;
    if (dtype == DType::kBF16) {
      tensor.get().as<Bf16>()[i] = Bf16(value);
    } else {
      tensor.get().as<float>()[i] = value;
    }
  }
  return tensor;
}

/// An operator with memory for its outputs and scratch, ready to run on given inputs.
class Call {
 public:
  Call(OperatorPtr op, const KernelTable& kernels, std::vector<Tensor> inputs)
      : op_(std::move(op)), kernel_(kernels.find(op_->name())->second), inputs_(std::move(inputs)) {
    std::vector<ValueType> types;
    for (const Tensor& tensor : inputs_)
      types.push_back({.dtype = tensor.dtype, .shape = tensor.shape});
    for (const ValueType& type : op_->infer(types)) {
      owned_.emplace_back(type.dtype, type.shape);
      outputs_.push_back(owned_.back());
    }
    workspace_ = Buffer(kernel_.workspace_bytes(*op_, types), "a benchmark");
  }
  void operator()() const { kernel_(*op_, {inputs_, outputs_, workspace_.bytes()}); }

 private:
  OperatorPtr op_;
  Kernel kernel_;
  std::vector<Tensor> inputs_;
  std::vector<OwnedTensor> owned_;
  std::vector<Tensor> outputs_;
  Buffer workspace_;
};

KernelTable all_kernels() {
  KernelTable kernels;
  add_linear_cross_entropy_cpu(kernels);
  add_adamw_cpu(kernels);
  add_grad_norm_cpu(kernels);
  return kernels;
}

OwnedTensor random_labels(int64_t T, int64_t V) {
  OwnedTensor labels(DType::kI32, {T});
  Random random(2, 2);
  for (int32_t& label : labels.get().span<int32_t>()) {
    label = static_cast<int32_t>(random.next_below(static_cast<uint64_t>(V)));
  }
  return labels;
}

/// logits = x · weightᵀ, all of them at once.
Gemm plain_product(const Sizes& s, const Tensor& x, const Tensor& weight, const Tensor& logits) {
  return {.transpose_b = true,
          .m = s.T,
          .n = s.V,
          .k = s.H,
          .a = x.data,
          .lda = s.H,
          .b = weight.data,
          .ldb = s.H,
          .c = logits.data,
          .ldc = s.V,
          .input_type = x.dtype};
}

std::vector<CrossEntropySpec> specs_to_try() {
  std::vector<CrossEntropySpec> specs;
  for (const int64_t chunk : {256, 512, 1024}) {
    for (const int64_t block : {512, 1024, 2048}) {
      specs.push_back({.chunk_tokens = chunk, .block_vocab = block, .parts = std::nullopt});
    }
  }
  for (const CrossEntropyParts& parts : {CrossEntropyParts{512, 512, 32},
                                         {512, 512, 64},
                                         {512, 256, 64},
                                         {1024, 256, 32},
                                         {1024, 512, 32},
                                         {1024, 512, 64},
                                         {2048, 512, 64}}) {
    specs.push_back({.parts = parts});
  }
  return specs;
}

std::string describe(const CrossEntropySpec& spec) {
  if (!spec.parts) return fmt::format("chunk {:4} block {:4}", spec.chunk_tokens, spec.block_vocab);
  return fmt::format("chunk {:4} block {:4} parts {:2}", spec.parts->chunk_tokens,
                     spec.parts->block_vocab, spec.parts->num_parts);
}

void bench_head(const Sizes& s, DType dtype) {
  const OwnedTensor x = random_tensor(dtype, {s.T, s.H}, 1.0F);
  const OwnedTensor weight = random_tensor(dtype, {s.V, s.H}, 0.2F);
  const OwnedTensor labels = random_labels(s.T, s.V);
  const OwnedTensor scale = random_tensor(DType::kF32, {1}, 1.0F);
  const OwnedTensor logits(DType::kF32, {s.T, s.V});
  std::vector<std::function<void()>> works = {
      [product = plain_product(s, x, weight, logits)] { gemm(product); }};
  const std::vector<CrossEntropySpec> specs = specs_to_try();
  for (const CrossEntropySpec& spec : specs) {
    const auto call = std::make_shared<Call>(make_linear_cross_entropy_fused(spec), all_kernels(),
                                             std::vector<Tensor>{x, weight, labels, scale});
    works.emplace_back([call] { (*call)(); });
  }
  const std::vector<double> times = best_seconds(works, 3);
  const double flops =
      2.0 * static_cast<double>(s.T) * static_cast<double>(s.H) * static_cast<double>(s.V);
  fmt::print("{}: plain product {:.0f} GFLOP/s\n", dtype_name(dtype), flops / times[0] / 1e9);
  for (size_t i = 0; i < specs.size(); ++i) {
    fmt::print("  fused, {}: {:.0f} GFLOP/s, {:.1f} % of the plain product\n", describe(specs[i]),
               3 * flops / times[i + 1] / 1e9, 300 * times[0] / times[i + 1]);
  }
}

void bench_flat(int64_t n) {
  const OwnedTensor grad = random_tensor(DType::kF32, {n}, 1.0F);
  const OwnedTensor copy(DType::kF32, {n});
  const KernelTable kernels = all_kernels();
  AdamWFactors own_factors = make_adamw_factors({}, 1e-3, 1);
  AdamWGradScale own_scale{1, 0};
  const Tensor factors = view_of(own_factors);
  const Tensor scale = view_of(own_scale);
  const Call plain(make_adamw({}), kernels, {grad, factors, scale});
  const Call narrow(make_adamw({.bf16_weight = true}), kernels, {grad, factors, scale});
  const Call norm(make_sum_of_squares(), kernels, {grad});
  const auto copy_all = [&] {
    const float* from = grad.get().as<float>();
    float* to = copy.get().as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; ++i) to[i] = from[i];
  };
  const std::vector<double> times =
      best_seconds({copy_all, std::ref(plain), std::ref(narrow), std::ref(norm)}, 7);
  const std::array<const char*, 4> names = {"copy", "adamw", "adamw, bf16 weight",
                                            "sum of squares"};
  const std::array<int, 4> bytes = {8, 28, 30, 4};
  for (size_t i = 0; i < names.size(); ++i) {
    fmt::print("{:20} {:6.2f} GB/s, {:.0f} M elements/s\n", names[i],
               static_cast<double>(n) * bytes[i] / times[i] / 1e9,
               static_cast<double>(n) / times[i] / 1e6);
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::Sizes sizes;
  if (argc == 4) sizes = {std::atoll(argv[1]), std::atoll(argv[2]), std::atoll(argv[3])};
  if (tessera::serial()) omp_set_num_threads(1);
  fmt::print("{} threads, T {} H {} V {}\n", omp_get_max_threads(), sizes.T, sizes.H, sizes.V);
  tessera::bench_head(sizes, tessera::DType::kF32);
  tessera::bench_head(sizes, tessera::DType::kBF16);
  tessera::bench_flat(int64_t{1} << 25);
}

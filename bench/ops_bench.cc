// The dense operators' memory-bound kernels against a copy that moves as many bytes, and matrix
// products in the shapes of a small model. Copy and kernel run in turn; each figure is the best of
// several rounds (with OMP_NUM_THREADS=1 in CPU time), and bytes are the fewest that must move
// (Operator::cost).
//
//   ops_bench [tokens hidden]

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/memory.h"
#include "core/random.h"
#include "cpu_time.h"
#include "ops/activation/activation.h"
#include "ops/add/add.h"
#include "ops/embedding/embedding.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"

namespace tessera {
namespace {

constexpr int kRounds = 15;
constexpr int64_t kVocab = 32768;

OwnedTensor random_tensor(const ValueType& type) {
  OwnedTensor tensor(type.dtype, type.shape);
  Random random(1, static_cast<uint64_t>(type.shape.num_elements()));
  const Tensor& view = tensor.get();
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    const auto value = static_cast<float>(2.0 * random.next_uniform() - 1.0);
    if (type.dtype == DType::kF32) {
      view.as<float>()[i] = value;
    } else if (type.dtype == DType::kBF16) {
      view.as<Bf16>()[i] = Bf16(value);
    } else {
      view.as<int32_t>()[i] = static_cast<int32_t>(random.next_below(kVocab));
    }
  }
  return tensor;
}

/// Copies `num_bytes` / 2 with all threads, so that `num_bytes` move.
class Copy {
 public:
  explicit Copy(double num_bytes)
      : half_(static_cast<int64_t>(num_bytes / 2)), from_(half_, "a copy"), to_(half_, "a copy") {}
  void run() const {
    constexpr int64_t kChunk = 65536;
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < half_; at += kChunk) {
      std::memcpy(to_.data() + at, from_.data() + at, std::min(kChunk, half_ - at));
    }
  }

 private:
  int64_t half_;
  Buffer from_;
  Buffer to_;
};

/// One operator with tensors for its inputs, outputs and scratch.
class Call {
 public:
  Call(const KernelTable& kernels, OperatorPtr op, const std::vector<ValueType>& inputs)
      : op_(std::move(op)),
        kernel_(kernels.find(op_->name())->second),
        workspace_(kernel_.workspace_bytes(*op_, inputs), "a benchmark") {
    const std::vector<ValueType> outputs = op_->infer(inputs);
    cost_ = op_->cost(inputs, outputs);
    for (const ValueType& type : inputs) add(random_tensor(type), inputs_);
    for (const ValueType& type : outputs) add(OwnedTensor(type.dtype, type.shape), outputs_);
  }
  const Cost& cost() const { return cost_; }
  void run() const { kernel_(*op_, {inputs_, outputs_, workspace_.bytes()}); }

 private:
  void add(OwnedTensor tensor, std::vector<Tensor>& views) {
    memory_.push_back(std::move(tensor));
    views.push_back(memory_.back().get());
  }

  OperatorPtr op_;
  Kernel kernel_;
  Buffer workspace_;
  Cost cost_;
  std::vector<OwnedTensor> memory_;
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
};

void report(const KernelTable& kernels, DType dtype, OperatorPtr op,
            const std::vector<ValueType>& inputs) {
  const std::string name = fmt::format("{} {}", op->name(), op->attributes()).substr(0, 34);
  const Call call(kernels, std::move(op), inputs);
  const Copy copy(call.cost().bytes);
  double kernel_best = 1e30;
  double copy_best = 1e30;
  for (int round = 0; round < kRounds; ++round) {
    copy_best = std::min(copy_best, cpu_seconds([&] { copy.run(); }));
    kernel_best = std::min(kernel_best, cpu_seconds([&] { call.run(); }));
  }
  fmt::print("{:4} {:34} {:7.1f} GB/s {:6.0f} % of a copy\n", dtype_name(dtype), name,
             call.cost().bytes / kernel_best * 1e-9, 100.0 * copy_best / kernel_best);
}

KernelTable make_kernels() {
  KernelTable kernels;
  add_activation_cpu(kernels);
  add_add_cpu(kernels);
  add_embedding_cpu(kernels);
  add_linear_cpu(kernels);
  add_rmsnorm_cpu(kernels);
  add_rope_cpu(kernels);
  return kernels;
}

void report_memory_bound(DType dtype, int64_t tokens, int64_t hidden) {
  const KernelTable kernels = make_kernels();
  const ValueType x{dtype, {tokens, hidden}};
  const ValueType pair{dtype, {tokens, 2 * hidden}};
  const ValueType vector{DType::kF32, {hidden}};
  const ValueType rows{DType::kF32, {tokens}};
  const ValueType ids{DType::kI32, {tokens}};
  const RotarySpec rotary{.num_heads = hidden / 64,
                          .head_size = 64,
                          .inverse_frequencies = default_inverse_frequencies(64, 10000.0)};
  report(kernels, dtype, make_add(), {x, x});
  report(kernels, dtype, make_rmsnorm(1e-5), {x, vector});
  report(kernels, dtype, std::make_shared<RmsNormBackward>(), {x, vector, rows, x});
  report(kernels, dtype, make_rope(rotary), {x, ids});
  for (const Activation kind : {Activation::kSwiGLU, Activation::kGeGLU, Activation::kGeGLUTanh}) {
    report(kernels, dtype, make_activation(kind), {pair});
    report(kernels, dtype, std::make_shared<ActivationBackward>(kind), {pair, x});
  }
  report(kernels, dtype, make_embedding(), {ids, {dtype, {kVocab, hidden}}});
  report(kernels, dtype, std::make_shared<EmbeddingBackward>(kVocab, EmbeddingSpec{}), {ids, x});
  report(kernels, dtype, std::make_shared<LinearBiasGrad>(), {x});
}

void report_product(const KernelTable& kernels, DType dtype, OperatorPtr op,
                    const std::vector<ValueType>& inputs) {
  const std::string name(op->name());
  const Call call(kernels, std::move(op), inputs);
  double best = 1e30;
  for (int round = 0; round < kRounds; ++round) {
    best = std::min(best, cpu_seconds([&] { call.run(); }));
  }
  fmt::print("{:4} {:14} {} x {} {:7.0f} GFLOP/s\n", dtype_name(dtype), name,
             inputs[0].shape.to_string(), inputs[1].shape.to_string(),
             call.cost().flops / best * 1e-9);
}

void report_products(DType dtype, int64_t tokens, int64_t hidden) {
  const KernelTable kernels = make_kernels();
  for (const int64_t rows : {int64_t{64}, int64_t{300}, tokens}) {
    const ValueType x{dtype, {rows, hidden}};
    const ValueType y{dtype, {rows, 2 * hidden}};
    const ValueType weight{dtype, {2 * hidden, hidden}};
    report_product(kernels, dtype, make_linear(), {x, weight});
    report_product(kernels, dtype, std::make_shared<LinearDgrad>(), {y, weight});
    report_product(kernels, dtype, std::make_shared<LinearWgrad>(), {x, y});
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  const int64_t tokens = argc > 2 ? std::atoll(argv[1]) : 8192;
  const int64_t hidden = argc > 2 ? std::atoll(argv[2]) : 512;
  if (tokens < 1 || hidden < 64 || hidden % 64 != 0) {
    fmt::print(stderr, "ops_bench [tokens hidden]: tokens >= 1 and hidden a multiple of 64\n");
    return 2;
  }
  for (const tessera::DType dtype : {tessera::DType::kF32, tessera::DType::kBF16}) {
    tessera::report_memory_bound(dtype, tokens, hidden);
    tessera::report_products(dtype, tokens, hidden);
  }
  return 0;
}

// The dense products of a layer and the head with its loss on one GPU, against a large BF16 product
// of the same run. Times are medians, each with a cold L2 cache; FLOPs are the operators' own model
// FLOPs.
//
//   products_cuda_bench [tokens hidden vocabulary]

#include <fmt/format.h>

#include "gpu_calls.h"
#include "ops/cuda/matrix_product.h"
#include "ops/linear_cross_entropy/head_cuda.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tessera {
namespace {

struct Sizes {
  int64_t T = 16384;
  int64_t H = 2048;
  int64_t V = 32768;
};

class Report {
 public:
  explicit Report(const Gpu& gpu) : gpu_(gpu), peak_(dense_rate(gpu)) {
    fmt::print("dense bf16 8192 x 8192 x 8192: {:.0f} TFLOPS\n", peak_ * 1e-12);
  }

  double print(const std::string& name, double flops, const std::function<void()>& work) const {
    const double seconds = gpu_.median_seconds(work);
    fmt::print("{:<44} {:8.3f} ms  {:6.1f} TFLOPS  {:5.1f} %\n", name, seconds * 1e3,
               flops / seconds * 1e-12, 100 * flops / seconds / peak_);
    return seconds;
  }
  double print(const std::string& name, const Call& call) const {
    return print(name, call.flops(), [&] { call.run(); });
  }
  /// Memory-bound work by the bytes it moves.
  double print_bytes(const std::string& name, double bytes,
                     const std::function<void()>& work) const {
    const double seconds = gpu_.median_seconds(work);
    fmt::print("{:<44} {:8.3f} ms  {:6.0f} GB/s\n", name, seconds * 1e3, bytes / seconds * 1e-9);
    return seconds;
  }

 private:
  const Gpu& gpu_;
  double peak_;
};

/// What memory-bound work is measured against.
void time_copy(const Gpu& gpu, const Report& report) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  const OwnedTensor from = gpu.tensor({DType::kU8, {kBytes}});
  const OwnedTensor to = gpu.tensor({DType::kU8, {kBytes}});
  report.print_bytes("copy of memory, read and written", 2.0 * kBytes,
                     [&] { gpu.device().copy(to.get().data, from.get().data, kBytes); });
}

void time_linear(const Gpu& gpu, const Report& report, const Sizes& sizes, int64_t out,
                 DType dtype) {
  const OwnedTensor x = gpu.random({dtype, {sizes.T, sizes.H}});
  const OwnedTensor weight = gpu.random({dtype, {out, sizes.H}});
  const OwnedTensor grad = gpu.random({dtype, {sizes.T, out}});
  const std::string shape =
      fmt::format("{} {} x {} -> {}", dtype_name(dtype), sizes.T, sizes.H, out);
  const OwnedTensor rows = gpu.tensor({DType::kI64, {1}});
  gpu.device().copy(rows.get().data, &sizes.T, sizeof(sizes.T));
  const auto time = [&](const std::string& name, const OperatorPtr& op,
                        const std::vector<Tensor>& inputs) {
    Call call(gpu, op, inputs);
    report.print(name + " " + shape, call);
    call.make_ragged(rows.get().as<int64_t>());
    report.print("  by the experts' kernels", call);
  };
  time("linear", make_linear(), {x, weight});
  time("linear_dgrad", std::make_shared<LinearDgrad>(), {grad, weight});
  time("linear_wgrad", std::make_shared<LinearWgrad>(), {x, grad});
}

void time_bias(const Gpu& gpu, const Report& report, const Sizes& sizes) {
  const int64_t out = 2 * sizes.H;
  const OwnedTensor x = gpu.random({DType::kBF16, {sizes.T, sizes.H}});
  const OwnedTensor weight = gpu.random({DType::kBF16, {out, sizes.H}});
  const OwnedTensor grad = gpu.random({DType::kBF16, {sizes.T, out}});
  const OwnedTensor bias = gpu.random({DType::kF32, {out}});
  report.print(fmt::format("linear with bias bf16 {} x {} -> {}", sizes.T, sizes.H, out),
               Call(gpu, make_linear(true), {x, weight, bias}));
  const Call bias_grad(gpu, std::make_shared<LinearBiasGrad>(), {grad});
  report.print_bytes("linear_bias_grad", static_cast<double>(grad.get().num_bytes()),
                     [&] { bias_grad.run(); });
}

/// The fused head for a size of chunks (0: its own choice), and its softmax alone, which reads the
/// logits and writes their gradients.
void time_fused(const Gpu& gpu, const Report& report, const std::vector<Tensor>& inputs,
                int64_t chunk_tokens) {
  const CrossEntropySpec spec{.chunk_tokens = std::max<int64_t>(chunk_tokens, 1)};
  const Call fused(gpu, make_linear_cross_entropy_fused(spec), inputs);
  const KernelArgs args = fused.args();
  const cuda::Head head(args, spec, {.vocab_size = inputs[1].shape[0]}, true);
  const double whole =
      report.print(fmt::format("fused, chunks of {} tokens", head.cut().chunk), fused);
  const cuda::HeadRows rows = head.multiply_logits(0);
  const auto chunks = static_cast<double>(head.cut().T) / static_cast<double>(rows.num_rows);
  const double bytes = static_cast<double>(rows.num_rows * rows.num_columns) *
                       (is_low_precision(rows.dtype) ? 6 : 8);
  const double softmax = report.print_bytes("  softmax of a chunk", bytes, [&] {
    cuda::launch_head_fused(rows, {.token_loss = args.out(1).as<float>()},
                            {.scale = args.in(3).as<float>()}, gpu.context().stream());
  });
  fmt::print("  {:.1f} % of the time is not the softmax's\n", 100 - 100 * chunks * softmax / whole);
}

void time_head(const Gpu& gpu, const Report& report, const Sizes& sizes, DType dtype) {
  const OwnedTensor x = gpu.random({dtype, {sizes.T, sizes.H}});
  const OwnedTensor weight = gpu.random({dtype, {sizes.V, sizes.H}});
  const OwnedTensor labels = gpu.tensor({DType::kI32, {sizes.T}});
  const OwnedTensor one = gpu.tensor({DType::kF32, {1}});
  const float value = 1;
  gpu.device().copy(one.get().data, &value, sizeof(value));
  const std::string shape =
      fmt::format(" {} {} x {} -> {}", dtype_name(dtype), sizes.T, sizes.H, sizes.V);
  {
    const Call forward(gpu, make_linear_cross_entropy(), {x, weight, labels, one});
    report.print("linear_cross_entropy" + shape, forward);
    const auto backward = std::make_shared<LinearCrossEntropyBackward>(CrossEntropySpec{});
    report.print("  backward",
                 Call(gpu, backward, {x, weight, labels, one, forward.output(2), one}));
  }
  for (const int64_t chunk_tokens : {0, 4096, 8192})
    time_fused(gpu, report, {x, weight, labels, one}, chunk_tokens);
}

void run_all(const Sizes& sizes) {
  const Gpu gpu;
  const Report report(gpu);
  time_copy(gpu, report);
  for (const int64_t out : {sizes.V, int64_t{4096}, int64_t{2048}, int64_t{512}})
    time_linear(gpu, report, sizes, out, DType::kBF16);
  time_linear(gpu, report, sizes, 128, DType::kF32);
  time_bias(gpu, report, sizes);
  time_head(gpu, report, sizes, DType::kBF16);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::Sizes sizes;
  if (argc == 4) sizes = {std::stoll(argv[1]), std::stoll(argv[2]), std::stoll(argv[3])};
  tessera::run_all(sizes);
  return 0;
}

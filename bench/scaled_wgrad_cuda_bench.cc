// Gradients of the experts' weights in FP8 beside BF16 on one GPU, written and added to, and the
// casts of their operands along tokens beside a copy that moves as many bytes. Medians by turns,
// each with a cold L2 cache.
//
//   scaled_wgrad_cuda_bench [part of a name]

#include <fmt/format.h>

#include "gpu_calls.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad.h"

namespace tessera {
namespace {

struct Shape4 {
  const char* name;
  int64_t experts;
  int64_t rows;
  int64_t inner;
  int64_t hidden;
};

constexpr Shape4 kShapes[] = {{"mixtral fc1", 8, 32768, 28672, 4096},
                              {"mixtral fc2", 8, 32768, 4096, 14336},
                              {"qwen fc1", 128, 131072, 1536, 2048},
                              {"qwen fc2", 128, 131072, 2048, 768},
                              {"dense", 1, 16384, 4096, 4096}};

/// Every row goes to a random expert.
OwnedTensor random_offsets(const Gpu& gpu, const Shape4& shape) {
  Random random(1, 1);
  std::vector<int64_t> offsets(shape.experts + 1, 0);
  for (int64_t i = 0; i < shape.rows; ++i)
    ++offsets[1 + static_cast<int64_t>(random.next_below(shape.experts))];
  for (int64_t e = 0; e < shape.experts; ++e) offsets[e + 1] += offsets[e];
  OwnedTensor result = gpu.tensor({DType::kI64, {shape.experts + 1}});
  gpu.device().copy(result.get().data, offsets.data(), result.get().num_bytes());
  return result;
}

void time_casts(const Gpu& gpu, const Tensor& x, const Call& by_group, const Call& by_block) {
  // Two bytes are read and one is written.
  const int64_t bytes = x.num_bytes() / 4 * 3;
  const OwnedTensor to = gpu.tensor({DType::kU8, {bytes}});
  const std::vector<double> times =
      gpu.median_seconds({[&] { gpu.device().copy(to.get().data, x.data, bytes); },
                          [&] { by_group.run(); }, [&] { by_block.run(); }});
  fmt::print(
      "  cast of {:>16}: copy {:6.0f} us, by group {:6.0f} us {:4.2f}, by block {:6.0f} us "
      "{:4.2f}\n",
      x.shape.to_string(), times[0] * 1e6, times[1] * 1e6, times[0] / times[1], times[2] * 1e6,
      times[0] / times[2]);
}

void bench(const Gpu& gpu, const Shape4& shape) {
  const OwnedTensor offsets = random_offsets(gpu, shape);
  const OwnedTensor narrow = gpu.random({DType::kBF16, {shape.rows, shape.inner}});
  const OwnedTensor wide = gpu.random({DType::kBF16, {shape.rows, shape.hidden}});
  const ExpertSizes sizes(std::vector<int64_t>(shape.experts, shape.inner), "bench");
  const Call bf16(gpu, std::make_shared<GroupedMatmulWgrad>(sizes), {narrow, wide, offsets});
  fmt::print("{}: {} experts, {} rows, {} x {}\n", shape.name, shape.experts, shape.rows,
             shape.inner, shape.hidden);
  std::vector<std::unique_ptr<Call>> casts;
  std::vector<std::unique_ptr<Call>> products;
  for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock}) {
    for (const OwnedTensor* x : {&narrow, &wide}) {
      casts.push_back(std::make_unique<Call>(gpu, make_quantize_tokens(scales),
                                             std::vector<Tensor>{*x, offsets}));
      casts.back()->run();
    }
    const Call& left = *casts[casts.size() - 2];
    const Call& right = *casts.back();
    products.push_back(std::make_unique<Call>(
        gpu, std::make_shared<ScaledGroupedWgrad>(sizes, scales == TokenScales::kBlock, shape.rows),
        std::vector<Tensor>{left.output(0), right.output(0), left.output(1), right.output(1),
                            offsets}));
  }
  time_casts(gpu, narrow, *casts[0], *casts[2]);
  time_casts(gpu, wide, *casts[1], *casts[3]);
  for (const bool adds : {false, true}) {
    const auto run = [adds](const Call& call) { adds ? call.run() : call.run_unset(); };
    const std::vector<double> times = gpu.median_seconds(
        {[&] { run(bf16); }, [&] { run(*products[0]); }, [&] { run(*products[1]); }});
    fmt::print("  {}: bf16 {:7.0f} us {:5.0f} TFLOPS", adds ? "added to" : "written ",
               times[0] * 1e6, bf16.flops() / times[0] * 1e-12);
    for (const int i : {1, 2})
      fmt::print(", by {} {:7.0f} us {:5.0f} TFLOPS {:4.2f}", i == 1 ? "group" : "block",
                 times[i] * 1e6, bf16.flops() / times[i] * 1e-12, times[0] / times[i]);
    fmt::print("\n");
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  const std::string_view part = argc > 1 ? argv[1] : "";
  const tessera::Gpu gpu;
  for (const auto& shape : tessera::kShapes)
    if (std::string_view(shape.name).find(part) != std::string_view::npos)
      tessera::bench(gpu, shape);
  return 0;
}

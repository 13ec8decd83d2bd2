// The grouped products that can read their rows where the tokens lie, on a GPU, from a cold L2, by
// turns: the copy in the experts' order alone, the product of that copy, and the product that
// gathers. Medians; both products' results must be the same bits.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>

#include "core/dtype.h"
#include "core/random.h"
#include "ops/cuda/check.h"
#include "ops/cuda/device_buffer.h"
#include "ops/cuda/tensor_map.h"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_tile_model.h"
#include "ops/permute/permute_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kWarmups = 2;
constexpr int64_t kFlushBytes = int64_t{256} << 20;  // more than the L2 holds

struct Shape {
  const char* name;
  int64_t num_experts;
  int64_t top_k;
  int64_t num_tokens;
  int64_t inner;   // rows of an expert's matrix
  int64_t hidden;  // its columns

  int64_t num_rows() const { return num_tokens * top_k; }
  double flops() const {
    return 2.0 * static_cast<double>(num_rows()) * static_cast<double>(inner * hidden);
  }
};

constexpr Shape kShapes[] = {
    {"fine fc1", 128, 8, 32768, 512, 1536},    {"fine fc2", 128, 8, 32768, 256, 1536},
    {"qwen fc1", 128, 8, 32768, 1536, 2048},   {"qwen fc2", 128, 8, 32768, 768, 2048},
    {"mixtral fc1", 8, 2, 16384, 28672, 4096}, {"mixtral fc2", 8, 2, 16384, 14336, 4096},
};

template <typename T>
DeviceBuffer to_device(const std::vector<T>& values) {
  DeviceBuffer buffer(values.size() * sizeof(T));
  buffer.copy_from(values.data());
  return buffer;
}

/// Each token's K experts are random; an expert's rows are in the tokens' order.
struct Routing {
  std::vector<int64_t> offsets;
  std::vector<int> sources;  // t K + k of each row
  std::vector<int> row_of;   // of each t K + k
};

Routing route(const Shape& shape) {
  Random random(1, 1);
  std::vector<std::vector<int>> rows_of(shape.num_experts);
  std::vector<size_t> experts(rows_of.size());
  std::iota(experts.begin(), experts.end(), 0);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    for (int64_t k = 0; k < shape.top_k; ++k) {
      std::swap(experts[k], experts[k + random.next_below(experts.size() - k)]);
      rows_of[experts[k]].push_back(static_cast<int>(t * shape.top_k + k));
    }
  }
  Routing routing{{0}, {}, std::vector<int>(shape.num_rows())};
  for (const std::vector<int>& rows : rows_of) {
    routing.sources.insert(routing.sources.end(), rows.begin(), rows.end());
    routing.offsets.push_back(static_cast<int64_t>(routing.sources.size()));
  }
  for (size_t row = 0; row < routing.sources.size(); ++row)
    routing.row_of[routing.sources[row]] = static_cast<int>(row);
  return routing;
}

std::vector<int> block_begins(const Shape& shape) {
  std::vector<int> begins;
  for (int64_t e = 0; e <= shape.num_experts; ++e)
    begins.push_back(static_cast<int>(e * shape.inner));
  return begins;
}

/// BF16 values in [-1, 1], a block of them again and again.
DeviceBuffer random_values(int64_t count) {
  constexpr size_t kBlock = 1999993;
  static const DeviceBuffer block = [] {
    Random random(2, 1);
    std::vector<Bf16> values(kBlock);
    for (Bf16& value : values) value = Bf16(2 * static_cast<float>(random.next_uniform()) - 1);
    return to_device(values);
  }();
  const size_t total = count;
  DeviceBuffer buffer(total * sizeof(Bf16));
  for (size_t done = 0; done < total; done += kBlock)
    check(cudaMemcpyAsync(buffer.as<Bf16>() + done, block.as<Bf16>(),
                          std::min(kBlock, total - done) * sizeof(Bf16), cudaMemcpyDeviceToDevice,
                          nullptr));
  return buffer;
}

/// One shape's data on the GPU, and its products.
class Products {
 public:
  explicit Products(const Shape& shape)
      : shape_(shape),
        routing_(route(shape)),
        offsets_(to_device(routing_.offsets)),
        sources_(to_device(routing_.sources)),
        row_of_(to_device(routing_.row_of)),
        begins_(to_device(block_begins(shape))),
        counter_(to_device(std::vector<int>{0})),
        tokens_(random_values(shape.num_tokens * shape.hidden)),
        weight_(random_values(shape.num_experts * shape.inner * shape.hidden)),
        narrow_(random_values(shape.num_rows() * shape.inner)),
        permuted_(row_bytes() * static_cast<size_t>(shape.num_rows())) {}

  size_t row_bytes() const { return static_cast<size_t>(shape_.hidden) * sizeof(Bf16); }
  size_t y_bytes() const { return narrow_.num_bytes(); }
  size_t grad_bytes() const { return weight_.num_bytes() / sizeof(Bf16) * sizeof(float); }

  void permute() const {
    launch_permute({.maps = {.row_of_TK = row_of_.as<int32_t>(),
                             .source_R = sources_.as<int32_t>(),
                             .num_tokens = shape_.num_tokens,
                             .num_rows = shape_.num_rows(),
                             .top_k = static_cast<int>(shape_.top_k)},
                    .row_bytes = static_cast<int64_t>(row_bytes()),
                    .x_TH = tokens_.as<void>(),
                    .rows_RH = permuted_.as<void>()},
                   nullptr);
  }

  void rows(bool gathers, void* y) const {
    const int64_t all = shape_.num_experts * shape_.inner;
    GroupedRowsParams params = {
        .weight = make_tensor_map({weight_.as<void>(), all, shape_.hidden}, kGroupedFeatures),
        .a = make_tensor_map({permuted_.as<void>(), shape_.num_rows(), shape_.hidden},
                             kGroupedBoxRows),
        .y_map = make_tensor_map({y, shape_.num_rows(), shape_.inner}, kGroupedStoreRows),
        .y = y,
        .block_begin = begins_.as<int>(),
        .offsets = offsets_.as<int64_t>(),
        .num_experts = static_cast<int>(shape_.num_experts),
        .wide = static_cast<int>(shape_.hidden),
        .y_columns = static_cast<int>(shape_.inner),
        .counter = counter_.as<int>()};
    if (gathers) set_source(params);
    launch_grouped_rows(params, true, nullptr);
  }

  void wgrad(bool gathers, bool accumulate, void* grad) const {
    GroupedWgradParams params = {
        .narrow = make_tensor_map({narrow_.as<void>(), shape_.num_rows(), shape_.inner},
                                  kGroupedReduction),
        .wide = make_tensor_map({permuted_.as<void>(), shape_.num_rows(), shape_.hidden},
                                kGroupedReduction),
        .grad = static_cast<float*>(grad),
        .block_begin = begins_.as<int>(),
        .offsets = offsets_.as<int64_t>(),
        .num_experts = static_cast<int>(shape_.num_experts),
        .num_columns = static_cast<int>(shape_.hidden),
        .num_rows = shape_.num_rows(),
        .weight_rows = shape_.num_experts * shape_.inner,
        .accumulate = accumulate,
        .counter = counter_.as<int>()};
    if (gathers) set_source(params);
    launch_grouped_wgrad(params, nullptr);
  }

 private:
  template <typename Params>
  void set_source(Params& params) const {
    params.source = sources_.as<int>();
    params.top_k = Divider(static_cast<uint32_t>(shape_.top_k));
    params.tokens = tokens_.as<void>();
    params.num_source = shape_.num_rows();
  }

  Shape shape_;
  Routing routing_;
  DeviceBuffer offsets_;
  DeviceBuffer sources_;
  DeviceBuffer row_of_;
  DeviceBuffer begins_;
  DeviceBuffer counter_;
  DeviceBuffer tokens_;
  DeviceBuffer weight_;
  DeviceBuffer narrow_;
  DeviceBuffer permuted_;
};

/// Whether the first and last 32 MiB of two buffers are the same bits.
bool same_ends(const DeviceBuffer& a, const DeviceBuffer& b) {
  const size_t part = std::min<size_t>(a.num_bytes(), size_t{32} << 20);
  std::vector<char> bytes[2] = {std::vector<char>(part), std::vector<char>(part)};
  for (const size_t begin : {size_t{0}, a.num_bytes() - part}) {
    check(cudaMemcpy(bytes[0].data(), a.as<char>() + begin, part, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(bytes[1].data(), b.as<char>() + begin, part, cudaMemcpyDeviceToHost));
    if (std::memcmp(bytes[0].data(), bytes[1].data(), part) != 0) return false;
  }
  return true;
}

struct Run {
  std::string name;
  std::function<void()> run;
  std::vector<double> microseconds = {};

  double median() {
    std::ranges::nth_element(microseconds, microseconds.begin() + std::ssize(microseconds) / 2);
    return microseconds[microseconds.size() / 2];
  }
};

class Timer {
 public:
  Timer() : flush_(kFlushBytes) {
    for (cudaEvent_t* event : {&begin_, &end_}) check(cudaEventCreate(event));
  }
  ~Timer() {
    for (const cudaEvent_t event : {begin_, end_}) cudaEventDestroy(event);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  void by_turns(std::vector<Run>& runs, int repeat) const {
    for (int i = 0; i < kWarmups + repeat; ++i) {
      for (Run& run : runs) {
        const double time = once(run);
        if (i >= kWarmups) run.microseconds.push_back(time);
      }
    }
  }

 private:
  double once(const Run& run) const {
    check(cudaMemsetAsync(flush_.as<void>(), 1, kFlushBytes, nullptr));
    check(cudaEventRecord(begin_, nullptr));
    run.run();
    check(cudaEventRecord(end_, nullptr));
    check(cudaEventSynchronize(end_));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return 1e3 * milliseconds;
  }

  DeviceBuffer flush_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

const char* compare(const DeviceBuffer& a, const DeviceBuffer& b) {
  return same_ends(a, b) ? "the same bits" : "DIFFERENT";
}

void bench(const Shape& shape, const Timer& timer, int repeat) {
  const Products products(shape);
  const DeviceBuffer y[2] = {DeviceBuffer(products.y_bytes()), DeviceBuffer(products.y_bytes())};
  const DeviceBuffer grad[2] = {DeviceBuffer(products.grad_bytes()),
                                DeviceBuffer(products.grad_bytes())};
  products.permute();
  std::vector<Run> runs;
  runs.push_back({"permute", [&] { products.permute(); }});
  for (const bool gathers : {false, true}) {
    products.wgrad(gathers, false, grad[gathers].as<void>());
    runs.push_back({"rows", [&, gathers] { products.rows(gathers, y[gathers].as<void>()); }});
    runs.push_back(
        {"gradient", [&, gathers] { products.wgrad(gathers, true, grad[gathers].as<void>()); }});
  }
  timer.by_turns(runs, repeat);
  const double permute = runs[0].median();
  fmt::print("{}: permute {:.0f} us\n", shape.name, permute);
  for (const size_t product : {1, 2}) {
    const double plain = runs[product].median();
    const double gathered = runs[product + 2].median();
    fmt::print(
        "  {:8} {:7.0f} us {:5.0f} TFLOPS, gathered {:7.0f} us {:5.0f} TFLOPS: {:5.3f} of permute "
        "and "
        "product\n",
        runs[product].name, plain, shape.flops() / plain / 1e6, gathered,
        shape.flops() / gathered / 1e6, gathered / (permute + plain));
  }
  fmt::print("  rows {}, gradient {}\n", compare(y[0], y[1]), compare(grad[0], grad[1]));
  std::fflush(stdout);
}

void print_tiles(const Shape& shape, bool by_out) {
  const Routing routing = route(shape);
  std::vector<TiledExpert> experts;
  for (size_t e = 0; e + 1 < routing.offsets.size(); ++e)
    experts.push_back({.rows = routing.offsets[e + 1] - routing.offsets[e],
                       .features = by_out ? shape.inner : shape.hidden,
                       .reduction = by_out ? shape.hidden : shape.inner});
  fmt::print("{}, {} features, reduction {}:\n", shape.name, experts[0].features,
             experts[0].reduction);
  for (const int max_rows : kTileHeights) {
    const TilePrediction tiles = predict_tiles(experts, max_rows, kModelClusters);
    const double microseconds = tiles.cycles / kModelClockHz * 1e6;
    fmt::print(
        "  at most {:3} rows: {:6} tiles, {:4.1f} % padding, {:4.1f} % idle, {:7.0f} us, "
        "{:4.0f} TFLOPS{}\n",
        max_rows, tiles.num_tiles, 100 * tiles.padding, 100 * tiles.idle, microseconds,
        shape.flops() / microseconds / 1e6, max_rows == kTileHeights[0] ? " (taken)" : "");
  }
}

void print_tiles() {
  for (const Shape& shape : kShapes) {
    for (const bool by_out : {true, false}) print_tiles(shape, by_out);
  }
}

}  // namespace
}  // namespace tessera::cuda

int main(int argc, char** argv) {
  const std::string option = argc > 1 ? argv[1] : "";
  if (option == "--tiles") {
    tessera::cuda::print_tiles();
    return 0;
  }
  if (!option.empty() && (option != "--repeat" || argc != 3)) {
    fmt::print(stderr, "usage: {} [--tiles | --repeat N]\n", argv[0]);
    return 2;
  }
  const int repeat = argc == 3 ? std::max(1, std::atoi(argv[2])) : 9;
  const tessera::cuda::Timer timer;
  for (const tessera::cuda::Shape& shape : tessera::cuda::kShapes)
    tessera::cuda::bench(shape, timer, repeat);
}

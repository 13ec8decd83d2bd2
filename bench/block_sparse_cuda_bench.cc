// The block-sparse products of a layer's experts on one GPU, the six that MegaBlocks trains with
// (Gale et al., 2022, section 5.1), beside the grouped products of the same rows and a large dense
// product in the same run. Rates count the rows that are routed, not what pads them to blocks.
// Medians of alternate runs, each with a cold L2 cache; one JSON object a line.
//
//   block_sparse_cuda_bench [shape ...]

#include <fmt/format.h>

#include <cstring>

#include "gpu_calls.h"
#include "ops/block_sparse/block_sparse.h"
#include "ops/grouped_matmul/grouped_matmul.h"

namespace tessera {
namespace {

struct ExpertShape {
  const char* name;
  int64_t num_experts;
  int64_t num_rows;
  int64_t hidden;
  int64_t inner;

  double flops() const {
    return 2.0 * static_cast<double>(num_rows) * static_cast<double>(hidden * inner);
  }
  std::vector<int64_t> sizes() const { return std::vector<int64_t>(num_experts, inner); }
};

constexpr ExpertShape kShapes[] = {{"mixtral", 8, 65536, 4096, 14336},
                                   {"qwen3", 128, 262144, 2048, 768},
                                   {"dmoe_small", 64, 32768, 768, 3072}};

/// Where each expert's rows start, every row being of any expert, padded to multiples of
/// `alignment`.
std::vector<int64_t> route(const ExpertShape& shape, int64_t alignment) {
  Random random(5, 1);
  std::vector<int64_t> counts(shape.num_experts);
  for (int64_t row = 0; row < shape.num_rows; ++row) ++counts[random.next_below(counts.size())];
  std::vector<int64_t> offsets = {0};
  for (const int64_t count : counts)
    offsets.push_back(offsets.back() + (count + alignment - 1) / alignment * alignment);
  return offsets;
}

OwnedTensor to_gpu(const Gpu& gpu, const std::vector<int64_t>& values) {
  OwnedTensor tensor = gpu.tensor({DType::kI64, {std::ssize(values)}});
  gpu.device().copy(tensor.get().data, values.data(), tensor.get().num_bytes());
  return tensor;
}

/// What the products of a shape read: an expert's rows `dense` [R, H] and their values [R, F], the
/// weight by rows [E F, H] and by columns.
struct Operands {
  Operands(const Gpu& gpu, const ExpertShape& shape, int64_t alignment)
      : routed(route(shape, alignment)),
        offsets(to_gpu(gpu, routed)),
        dense(gpu.random({DType::kBF16, {routed.back(), shape.hidden}})),
        weight(gpu.random({DType::kBF16, {shape.num_experts * shape.inner, shape.hidden}})),
        weight_by_columns(
            gpu.random({DType::kBF16, {shape.hidden, shape.num_experts * shape.inner}})) {}

  std::vector<int64_t> routed;
  OwnedTensor offsets, dense, weight, weight_by_columns;
};

/// The grouped products of the same experts, whose rows are not padded.
struct GroupedProducts {
  GroupedProducts(const Gpu& gpu, const ExpertShape& shape)
      : with(gpu, shape, 1),
        narrow(gpu.random({DType::kBF16, {with.routed.back(), shape.inner}})),
        out(gpu, make_grouped_matmul({.group_sizes = shape.sizes(), .side = GroupedSide::kOut}),
            {with.dense, with.weight, with.offsets}),
        in(gpu, make_grouped_matmul({.group_sizes = shape.sizes(), .side = GroupedSide::kIn}),
           {narrow, with.weight, with.offsets}),
        wgrad(gpu, std::make_shared<GroupedMatmulWgrad>(ExpertSizes(shape.sizes(), "the experts")),
              {narrow, with.dense, with.offsets}) {}

  Operands with;
  OwnedTensor narrow;
  Call out, in, wgrad;
};

void time_blocks(const Gpu& gpu, const ExpertShape& shape, int64_t block,
                 const GroupedProducts& grouped, double large) {
  const Operands with(gpu, shape, block);
  const int64_t num_rows = with.routed.back();
  const auto sizes = shape.sizes();
  const Call topology(gpu, make_block_topology({block, sizes, num_rows}), {with.offsets});
  topology.run();
  const OwnedTensor values =
      gpu.random({DType::kBF16, {num_rows / block * (shape.inner / block), block, block}});
  const OwnedTensor extent = to_gpu(gpu, {num_rows});
  const auto time = [&](const char* name, BlockSparseProductSpec spec, std::vector<Tensor> inputs,
                        const Call& beside) {
    spec.block_size = block;
    spec.expert_sizes = sizes;
    const auto op = std::make_shared<BlockSparseProduct>(spec);
    for (size_t i = 0; i < BlockTopologyOp::kNumBlocks; ++i) inputs.push_back(topology.output(i));
    if (op->needs_rows()) inputs.push_back(with.dense);
    Call call(gpu, op, inputs);
    if (op->needs_rows()) call.make_result_ragged(extent.get().as<int64_t>());
    const auto seconds = gpu.median_seconds({[&] { call.run(); }, [&] { beside.run(); }});
    const auto tflops = [&](double time) { return shape.flops() / time * 1e-12; };
    fmt::print(
        "{{\"shape\": \"{}\", \"block\": {}, \"product\": \"{}\", \"tflops\": {:.1f}, "
        "\"grouped\": {:.1f}, \"large\": {:.1f}}}\n",
        shape.name, block, name, tflops(seconds[0]), tflops(seconds[1]), large);
    std::fflush(stdout);
  };
  const auto sdd = ProductKind::kSdd;
  const auto dsd = ProductKind::kDsd;
  time("SDD^T", {.kind = sdd, .transpose_right = true}, {with.dense, with.weight}, grouped.out);
  time("SDD", {.kind = sdd}, {with.dense, with.weight_by_columns}, grouped.out);
  time("DSD", {.kind = dsd}, {values, with.weight}, grouped.in);
  time("DSD^T", {.kind = dsd, .transpose_right = true}, {values, with.weight_by_columns},
       grouped.in);
  time("DS^TD", {.kind = dsd, .transpose_left = true, .accumulate = true}, {values, with.dense},
       grouped.wgrad);
  time("DD^TS", {.kind = ProductKind::kDds, .transpose_left = true, .accumulate = true},
       {with.dense, values}, grouped.wgrad);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  const Gpu gpu;
  const double large = dense_rate(gpu) * 1e-12;
  for (const ExpertShape& shape : kShapes) {
    const auto is_shape = [&](const char* name) { return std::strcmp(name, shape.name) == 0; };
    if (argc > 1 && std::none_of(argv + 1, argv + argc, is_shape)) continue;
    const GroupedProducts grouped(gpu, shape);
    for (const int64_t block : {128, 64}) time_blocks(gpu, shape, block, grouped, large);
  }
}

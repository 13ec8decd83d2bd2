#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/permute/permute.h"
#include "ops/permute/permute_kernels.h"
#include "ops/permute/row_maps.h"

namespace tessera {
namespace {

using namespace cuda;

RowType type_of(const Tensor& rows) {
  return rows.dtype == DType::kF32 ? RowType::kF32 : RowType::kBf16;
}

RowMaps maps_of(const KernelArgs& args, size_t row_of, size_t source) {
  return {.row_of_TK = args.in(row_of).as<int32_t>(),
          .source_R = args.in(source).as<int32_t>(),
          .num_tokens = args.in(row_of).shape[0],
          .num_rows = args.in(source).shape[0],
          .token_extent = args.in_extent(row_of),
          .row_extent = args.in_extent(source),
          .top_k = static_cast<int>(top_k_of(args.in(row_of).shape))};
}

void permute(const Operator& /*op*/, const KernelArgs& args) {
  launch_permute({.maps = maps_of(args, 2, 1),
                  .row_bytes = args.in(0).shape[1] * dtype_size(args.in(0).dtype),
                  .x_TH = args.in(0).data,
                  .rows_RH = args.out(0).data},
                 stream_of(args));
  check(cudaGetLastError());
}

void combine(const KernelArgs& args, const RowMaps& maps, const float* probs, const void* addend) {
  launch_combine({.maps = maps,
                  .type = type_of(args.in(0)),
                  .width = args.in(0).shape[1],
                  .y_RH = args.in(0).data,
                  .probs_TK = probs,
                  .addend_TH = addend,
                  .out_TH = args.out(0).data},
                 stream_of(args));
  check(cudaGetLastError());
}

void unpermute(const Operator& op, const KernelArgs& args) {
  const bool addend = static_cast<const Unpermute&>(op).addend();
  combine(args, maps_of(args, 1, 2), nullptr, addend ? args.in(3).data : nullptr);
}

void unpermute_weighted(const Operator& op, const KernelArgs& args) {
  const bool addend = static_cast<const UnpermuteWeighted&>(op).addend();
  combine(args, maps_of(args, 2, 3), args.in(1).as<float>(), addend ? args.in(4).data : nullptr);
}

void unpermute_weighted_backward(const Operator& /*op*/, const KernelArgs& args) {
  const Tensor& probs = args.in(2);
  launch_combine_backward({.maps = {.row_of_TK = nullptr,
                                    .source_R = args.in(3).as<int32_t>(),
                                    .num_tokens = probs.shape[0],
                                    .num_rows = args.in(3).shape[0],
                                    .token_extent = args.in_extent(2),
                                    .row_extent = args.in_extent(3),
                                    .top_k = static_cast<int>(top_k_of(probs.shape))},
                           .type = type_of(args.in(1)),
                           .width = args.in(1).shape[1],
                           .grad_TH = args.in(0).data,
                           .y_RH = args.in(1).data,
                           .probs_TK = probs.as<float>(),
                           .row_of_TK = reinterpret_cast<int32_t*>(args.workspace.data()),
                           .grad_y_RH = args.out(0).data,
                           .grad_probs_TK = args.out(1).as<float>()},
                          stream_of(args));
  check(cudaGetLastError());
}

int64_t backward_workspace(const Operator& /*op*/, std::span<const ValueType> inputs) {
  return inputs[2].shape.num_elements() * int64_t{sizeof(int32_t)};
}

/// For both directions: the second input says where each element comes from.
void permute_probs(const Operator& /*op*/, const KernelArgs& args) {
  launch_gather_values({.count = args.in(1).shape[0],
                        .extent = args.in_extent(1),
                        .per_row = static_cast<int>(top_k_of(args.in(1).shape)),
                        .from = args.in(0).as<float>(),
                        .idx = args.in(1).as<int32_t>(),
                        .to = args.out(0).as<float>()},
                       stream_of(args));
  check(cudaGetLastError());
}

}  // namespace

void add_permute_cuda(KernelTable& table) {
  table["permute"] = permute;
  table["unpermute"] = unpermute;
  table["permute_probs"] = permute_probs;
  table["unpermute_probs"] = permute_probs;
  table["unpermute_weighted"] = unpermute_weighted;
  table["unpermute_weighted_backward"] = Kernel(unpermute_weighted_backward, backward_workspace);
}

}  // namespace tessera

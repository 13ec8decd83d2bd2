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

/// What the kernel does not take is refused before anything runs.
int64_t check_row_bytes(const Permute& op, std::span<const ValueType> inputs) {
  const ValueType& x = inputs[Permute::kX];
  check_shape(op, x.shape[1] * dtype_size(x.dtype) % 2 == 0,
              "on a GPU rows must have an even number of bytes, got {}", x.to_string());
  return 0;
}

void permute(const Permute& /*op*/, const Args<Permute>& args) {
  const Tensor& x = args.in(Permute::kX);
  const Tensor& rows = args.out(Permute::kRows);
  const RowMaps maps = maps_of(args, Permute::kRowOf, Permute::kSource);
  launch_permute({.maps = maps,
                  .row_bytes = x.shape[1] * dtype_size(x.dtype),
                  .x_TH = x.data,
                  .rows_RH = rows.data},
                 stream_of(args));
  if (!x.scale.is_scaled() || rows.shape[0] == 0) return;
  launch_permute({.maps = maps,
                  .row_bytes = scale_bytes_of_row(rows),
                  .x_TH = scales_of(x).data,
                  .rows_RH = scales_of(rows).data},
                 stream_of(args));
}

/// What Unpermute and UnpermuteWeighted have in common.
template <typename Op>
void combine(const Op& op, const Args<Op>& args, const float* probs) {
  const Tensor& rows = args.in(Op::kRows);
  launch_combine({.maps = maps_of(args, Op::kRowOf, Op::kSource),
                  .type = type_of(rows),
                  .width = rows.shape[1],
                  .y_RH = rows.data,
                  .probs_TK = probs,
                  .addend_TH = op.addend() ? args.in(Op::kAddend).data : nullptr,
                  .out_TH = args.out(Op::kY).data},
                 stream_of(args));
}

void unpermute(const Unpermute& op, const Args<Unpermute>& args) {
  combine(op, args, nullptr);
}

void unpermute_weighted(const UnpermuteWeighted& op, const Args<UnpermuteWeighted>& args) {
  combine(op, args, args.in(UnpermuteWeighted::kProbs).as<float>());
}

void unpermute_weighted_backward(const UnpermuteWeightedBackward& /*op*/,
                                 const Args<UnpermuteWeightedBackward>& args) {
  using Op = UnpermuteWeightedBackward;
  const Tensor& probs = args.in(Op::kProbs);
  launch_combine_backward({.maps = {.row_of_TK = nullptr,
                                    .source_R = args.in(Op::kSource).as<int32_t>(),
                                    .num_tokens = probs.shape[0],
                                    .num_rows = args.in(Op::kSource).shape[0],
                                    .token_extent = args.in_extent(Op::kProbs),
                                    .row_extent = args.in_extent(Op::kSource),
                                    .top_k = static_cast<int>(top_k_of(probs.shape))},
                           .type = type_of(args.in(Op::kRows)),
                           .width = args.in(Op::kRows).shape[1],
                           .grad_TH = args.in(Op::kGrad).data,
                           .y_RH = args.in(Op::kRows).data,
                           .probs_TK = probs.as<float>(),
                           .row_of_TK = reinterpret_cast<int32_t*>(args.workspace.data()),
                           .grad_y_RH = args.out(Op::kGradRows).data,
                           .grad_probs_TK = args.out(Op::kGradProbs).as<float>()},
                          stream_of(args));
}

int64_t backward_workspace(const UnpermuteWeightedBackward& /*op*/,
                           std::span<const ValueType> inputs) {
  return inputs[UnpermuteWeightedBackward::kProbs].shape.num_elements() * int64_t{sizeof(int32_t)};
}

/// to[i] = from[index[i]]; `extent`, if any, counts the rows of index.
void gather(const Tensor& from, const Tensor& index, const int64_t* extent, const Tensor& to,
            cudaStream_t stream) {
  launch_gather_values({.count = index.shape[0],
                        .extent = extent,
                        .per_row = static_cast<int>(top_k_of(index.shape)),
                        .from = from.as<float>(),
                        .idx = index.as<int32_t>(),
                        .to = to.as<float>()},
                       stream);
}

void permute_probs(const PermuteProbs& /*op*/, const Args<PermuteProbs>& args) {
  using Op = PermuteProbs;
  gather(args.in(Op::kProbs), args.in(Op::kSource), args.in_extent(Op::kSource),
         args.out(Op::kRowProbs), stream_of(args));
}

void unpermute_probs(const UnpermuteProbs& /*op*/, const Args<UnpermuteProbs>& args) {
  using Op = UnpermuteProbs;
  gather(args.in(Op::kRowProbs), args.in(Op::kRowOf), args.in_extent(Op::kRowOf),
         args.out(Op::kProbs), stream_of(args));
}

}  // namespace

void add_permute_cuda(KernelTable& table) {
  add_kernel<Permute>(table, permute, {.workspace = check_row_bytes, .takes = takes_scaled_rows});
  add_kernel<Unpermute>(table, unpermute);
  add_kernel<PermuteProbs>(table, permute_probs);
  add_kernel<UnpermuteProbs>(table, unpermute_probs);
  add_kernel<UnpermuteWeighted>(table, unpermute_weighted);
  add_kernel<UnpermuteWeightedBackward>(table, unpermute_weighted_backward,
                                        {.workspace = backward_workspace});
}

}  // namespace tessera

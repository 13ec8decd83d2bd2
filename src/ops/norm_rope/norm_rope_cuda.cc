#include "ops/norm_rope/norm_rope.h"

#include "ops/cuda/column_sums.h"
#include "ops/norm_rope/norm_rope_kernels.h"
#include "ops/rmsnorm/rmsnorm_kernels.h"
#include "ops/rope/rope_args.h"

namespace tessera {
namespace {

using cuda::context_of;
using cuda::stream_of;

bool is_fused(const RotarySpec& spec) {
  return cuda::norm_rope_lanes(spec.head_size, spec.offset, spec.rotary_dim() / 2,
                               spec.interleaved) > 0;
}

/// Heads that the fused kernel does not take are normed into scratch memory and turned from there.
void norm_rope(const NormRope& op, const Args<NormRope>& args) {
  const Tensor& x = args.in(NormRope::kX);
  const auto* weight = args.in(NormRope::kWeight).as<float>();
  auto* rstd = args.out(NormRope::kRstd).as<float>();
  if (is_fused(op.spec())) {
    cuda::launch_norm_rope(
        {.rope = cuda::rope_rows(op.spec(), args, false, x.data, args.out(NormRope::kY).data),
         .weight = weight,
         .rstd = rstd,
         .eps = op.eps()},
        stream_of(args));
    return;
  }
  cuda::launch_rmsnorm({.dtype = x.dtype,
                        .rows = cuda::rows_of(args, NormRope::kX, op.spec().head_size),
                        .hidden = op.spec().head_size,
                        .eps = op.eps(),
                        .x = x.data,
                        .weight = weight,
                        .y = args.workspace.data(),
                        .rstd = rstd,
                        .num_sms = context_of(args).num_sms()},
                       stream_of(args));
  cuda::launch_rope(
      cuda::rope_rows(op.spec(), args, false, args.workspace.data(), args.out(NormRope::kY).data),
      {}, stream_of(args));
}

void norm_rope_backward(const NormRopeBackward& op, const Args<NormRopeBackward>& args) {
  using Op = NormRopeBackward;
  const RotarySpec& spec = op.spec();
  const Tensor& x = args.in(Op::kX);
  const auto* weight = args.in(Op::kWeight).as<float>();
  const auto* rstd = args.in(Op::kRstd).as<float>();
  const void* grad = args.in(Op::kGrad).data;
  void* grad_x = args.out(Op::kGradX).data;
  const cuda::Accumulator grad_weight = cuda::accumulator_of(args, args.out(Op::kGradWeight));
  auto* partials = reinterpret_cast<float*>(args.workspace.data());
  const int num_sms = context_of(args).num_sms();
  if (is_fused(spec)) {
    cuda::launch_norm_rope_backward({.rope = cuda::rope_rows(spec, args, true, grad, grad_x),
                                     .x = x.data,
                                     .weight = weight,
                                     .rstd = rstd,
                                     .grad_weight = grad_weight,
                                     .partials = partials,
                                     .num_sms = num_sms},
                                    stream_of(args));
    return;
  }
  void* turned_back = args.workspace.data() + cuda::column_partials_bytes(spec.head_size);
  cuda::launch_rope(cuda::rope_rows(spec, args, true, grad, turned_back), {}, stream_of(args));
  cuda::launch_rmsnorm_backward({.dtype = x.dtype,
                                 .rows = cuda::rows_of(args, Op::kX, spec.head_size),
                                 .hidden = spec.head_size,
                                 .x = x.data,
                                 .weight = weight,
                                 .rstd = rstd,
                                 .grad = turned_back,
                                 .addend = nullptr,
                                 .grad_x = grad_x,
                                 .grad_weight = grad_weight,
                                 .partials = partials,
                                 .num_sms = num_sms},
                                stream_of(args));
}

/// Heads between the norm and the rotation.
int64_t heads_bytes(const RotarySpec& spec, const ValueType& x) {
  return is_fused(spec) ? 0 : x.num_bytes();
}

int64_t forward_workspace(const NormRope& op, std::span<const ValueType> inputs) {
  return heads_bytes(op.spec(), inputs[NormRope::kX]);
}

int64_t backward_workspace(const NormRopeBackward& op, std::span<const ValueType> inputs) {
  const RotarySpec& spec = op.spec();
  return cuda::column_partials_bytes(spec.head_size) +
         heads_bytes(spec, inputs[NormRopeBackward::kX]);
}

}  // namespace

void add_norm_rope_cuda(KernelTable& table) {
  add_kernel<NormRope>(table, norm_rope, {.workspace = forward_workspace});
  add_kernel<NormRopeBackward>(table, norm_rope_backward,
                               {.workspace = backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera

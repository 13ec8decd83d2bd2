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

cuda::RopeRows rotation(const RotarySpec& spec, const KernelArgs& args, bool inverse,
                        const void* from, void* to) {
  return cuda::rope_rows(spec, args, args.in(2), inverse, from, to);
}

/// Heads that the fused kernel does not take are normed into scratch memory and turned from there.
void norm_rope(const Operator& base, const KernelArgs& args) {
  const auto& op = static_cast<const NormRope&>(base);
  const Tensor& x = args.in(0);
  const auto* weight = args.in(1).as<float>();
  auto* rstd = args.out(1).as<float>();
  if (is_fused(op.spec())) {
    cuda::launch_norm_rope({.rope = rotation(op.spec(), args, false, x.data, args.out(0).data),
                            .weight = weight,
                            .rstd = rstd,
                            .eps = op.eps()},
                           stream_of(args));
    return;
  }
  cuda::launch_rmsnorm({.dtype = x.dtype,
                        .rows = cuda::rows_of(args, 0, op.spec().head_size),
                        .hidden = op.spec().head_size,
                        .eps = op.eps(),
                        .x = x.data,
                        .weight = weight,
                        .y = args.workspace.data(),
                        .rstd = rstd,
                        .num_sms = context_of(args).num_sms()},
                       stream_of(args));
  cuda::launch_rope(rotation(op.spec(), args, false, args.workspace.data(), args.out(0).data),
                    stream_of(args));
}

void norm_rope_backward(const Operator& base, const KernelArgs& args) {
  const RotarySpec& spec = static_cast<const NormRopeBackward&>(base).spec();
  const Tensor& x = args.in(0);
  const auto* weight = args.in(1).as<float>();
  const auto* rstd = args.in(3).as<float>();
  const void* grad = args.in(4).data;
  void* grad_x = args.out(0).data;
  float* grad_weight = args.out(1) ? args.out(1).as<float>() : nullptr;
  auto* partials = reinterpret_cast<float*>(args.workspace.data());
  const int num_sms = context_of(args).num_sms();
  if (is_fused(spec)) {
    cuda::launch_norm_rope_backward({.rope = rotation(spec, args, true, grad, grad_x),
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
  cuda::launch_rope(rotation(spec, args, true, grad, turned_back), stream_of(args));
  cuda::launch_rmsnorm_backward({.dtype = x.dtype,
                                 .rows = cuda::rows_of(args, 0, spec.head_size),
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

int64_t forward_workspace(const Operator& op, std::span<const ValueType> inputs) {
  return heads_bytes(static_cast<const NormRope&>(op).spec(), inputs[0]);
}

int64_t backward_workspace(const Operator& op, std::span<const ValueType> inputs) {
  const RotarySpec& spec = static_cast<const NormRopeBackward&>(op).spec();
  return cuda::column_partials_bytes(spec.head_size) + heads_bytes(spec, inputs[0]);
}

}  // namespace

void add_norm_rope_cuda(KernelTable& table) {
  table["norm_rope"] = Kernel(norm_rope, forward_workspace);
  table["norm_rope_backward"] = Kernel(norm_rope_backward, backward_workspace);
}

}  // namespace tessera

#include "ops/compress_windows/compress_windows.h"
#include "ops/compress_windows/compress_windows_kernels.h"
#include "ops/cuda/row_args.h"

namespace tessera {
namespace {

template <typename Op>
cuda::CompressRows describe(const CompressSpec& spec, const Args<Op>& args) {
  const Tensor& kv = args.in(Op::kKv);
  return {.dtype = kv.dtype,
          .num_tokens = kv.shape[0],
          .width = kv.shape[1],
          .size = kv.shape[1] / spec.parts(),
          .num_rows = num_entry_rows(kv.shape[0], spec.rate),
          .rate = static_cast<int>(spec.rate),
          .overlaps = spec.overlaps,
          .kv = kv.data,
          .gate = args.in(Op::kGate).data,
          .bias = args.in(Op::kBias).template as<float>(),
          .positions = args.in(Op::kPositions).template as<int32_t>()};
}

void compress_windows(const CompressWindows& op, const Args<CompressWindows>& args) {
  using Op = CompressWindows;
  cuda::launch_compress_windows(describe(op.spec(), args), args.out(Op::kEntries).data,
                                args.out(Op::kEntryPositions).as<int32_t>(), cuda::stream_of(args));
}

void compress_windows_backward(const CompressWindowsBackward& op,
                               const Args<CompressWindowsBackward>& args) {
  using Op = CompressWindowsBackward;
  cuda::launch_compress_windows_backward(
      describe(op.spec(), args),
      {.entries = args.in(Op::kGrad).data,
       .kv = args.out(Op::kGradKv).data,
       .gate = args.out(Op::kGradGate).data,
       .bias = cuda::accumulator_of(args, args.out(Op::kGradBias)),
       .partials = reinterpret_cast<float*>(args.workspace.data())},
      cuda::stream_of(args));
}

int64_t backward_workspace(const CompressWindowsBackward& /*op*/,
                           std::span<const ValueType> inputs) {
  using Op = CompressWindowsBackward;
  const int64_t elements = inputs[Op::kBias].shape.num_elements();
  return cuda::compress_parts(inputs[Op::kKv].shape[0], elements) * elements *
         static_cast<int64_t>(sizeof(float));
}

}  // namespace

void add_compress_windows_cuda(KernelTable& table) {
  add_kernel<CompressWindows>(table, compress_windows);
  add_kernel<CompressWindowsBackward>(table, compress_windows_backward,
                                      {.workspace = backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera

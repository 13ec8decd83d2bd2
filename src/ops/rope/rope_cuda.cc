#include "ops/cuda/row_args.h"
#include "ops/rope/rope.h"
#include "ops/rope/rope_kernels.h"

namespace tessera {
namespace {

static_assert(Rope::kMaxRotaryDim == 2 * cuda::kMaxRopePairs);

void rope(const Operator& op, const KernelArgs& args) {
  const auto& rotation = static_cast<const Rope&>(op);
  const RotarySpec& spec = rotation.spec();
  const Tensor& x = args.in(0);
  cuda::RopeRows call = {.dtype = x.dtype,
                         .rows = cuda::rows_of(args, 0, x.shape[1]),
                         .num_heads = static_cast<int>(spec.num_heads),
                         .head_size = static_cast<int>(spec.head_size),
                         .offset = static_cast<int>(spec.offset),
                         .num_pairs = static_cast<int>(spec.inverse_frequencies.size()),
                         .interleaved = spec.interleaved,
                         .cosine_amplitude = spec.amplitude,
                         .sine_amplitude = rotation.inverse() ? -spec.amplitude : spec.amplitude,
                         .x = x.data,
                         .positions = args.in(1).as<int32_t>(),
                         .y = args.out(0).data};
  std::ranges::copy(spec.inverse_frequencies, call.frequencies);
  cuda::launch_rope(call, cuda::stream_of(args));
}

}  // namespace

void add_rope_cuda(KernelTable& table) {
  table["rope"] = rope;
  table["rope_backward"] = rope;
}

}  // namespace tessera

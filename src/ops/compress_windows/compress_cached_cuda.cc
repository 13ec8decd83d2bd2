#include "ops/compress_windows/compress_cached.h"
#include "ops/compress_windows/compress_cached_kernels.h"
#include "ops/cuda/context.h"
#include "ops/paged_attention/kept_rows_cuda.h"

namespace tessera {
namespace {

void compress_windows_cached(const CompressWindowsCached& op, const KernelArgs& args) {
  using Op = CompressWindowsCached;
  const CompressCacheSpec& spec = op.spec();
  const bool paged = spec.kept == KeptRows::kPaged;
  const Tensor& kv = args.in(Op::kKv);
  cuda::launch_compress_windows_cached(
      {.dtype = kv.dtype,
       .num_tokens = kv.shape[0],
       .width = kv.shape[1],
       .size = args.out(Op::kEntries).shape[1],
       .rate = static_cast<int>(spec.windows.rate),
       .overlaps = spec.windows.overlaps,
       .num_slots = static_cast<int>(spec.num_slots),
       .first_entry = spec.first_entry,
       .tokens = cuda::kept_tokens(spec.kept, args, Op::kPositions, Op::kFirstKept),
       .slots = paged ? args.in(Op::kSlots).as<int32_t>() : nullptr,
       .kv = kv.data,
       .gate = args.in(Op::kGate).data,
       .bias = args.in(Op::kBias).as<float>(),
       .state = args.out(Op::kState).data},
      {.entries = args.out(Op::kEntries).data,
       .positions = args.out(Op::kEntryPositions).as<int32_t>(),
       .rows = args.out(Op::kEntryRows).as<int32_t>()},
      cuda::stream_of(args));
}

}  // namespace

void add_compress_windows_cached_cuda(KernelTable& table) {
  for (const KeptRows kept : {KeptRows::kCached, KeptRows::kPaged}) {
    add_kernel<CompressWindowsCached>(table, CompressWindowsCached::name_of(kept),
                                      compress_windows_cached);
  }
}

}  // namespace tessera

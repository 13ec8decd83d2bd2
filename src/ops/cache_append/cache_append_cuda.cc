#include "ops/cache_append/cache_append.h"
#include "ops/cache_append/cache_append_kernels.h"
#include "ops/cuda/context.h"

namespace tessera {
namespace {

void cache_append(const CacheAppend& /*op*/, const Args<CacheAppend>& args) {
  using Op = CacheAppend;
  const Tensor& rows = args.in(Op::kRows);
  const Tensor& cache = args.out(Op::kCache);
  if (!cache) return;
  cuda::launch_cache_append({.dtype = rows.dtype,
                             .num_rows = rows.shape[0],
                             .width = rows.shape[1],
                             .capacity = cache.shape[0],
                             .rows = rows.data,
                             .start = args.in(Op::kStart).as<int32_t>(),
                             .cache = cache.data},
                            cuda::stream_of(args));
}

}  // namespace

void add_cache_append_cuda(KernelTable& table) {
  add_kernel<CacheAppend>(table, cache_append);
}

}  // namespace tessera

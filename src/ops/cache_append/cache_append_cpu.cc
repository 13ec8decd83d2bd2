#include <cstring>

#include "ops/cache_append/cache_append.h"

namespace tessera {
namespace {

void cache_append_kernel(const CacheAppend& op, const Args<CacheAppend>& args) {
  using Op = CacheAppend;
  const Tensor& rows = args.in(Op::kRows);
  const Tensor& cache = args.out(Op::kCache);
  if (!cache) return;
  const int64_t start = *args.in(Op::kStart).as<int32_t>();
  const int64_t capacity = cache.shape[0];
  check_shape(op, start >= 0 && start <= capacity - rows.shape[0],
              "{} rows from row {} on do not fit a cache of {} rows; give it a larger capacity",
              rows.shape[0], start, capacity);
  if (rows.num_bytes() == 0) return;
  const int64_t row_bytes = rows.num_bytes() / rows.shape[0];
  std::memcpy(static_cast<std::byte*>(cache.data) + start * row_bytes, rows.data, rows.num_bytes());
}

}  // namespace

void add_cache_append_cpu(KernelTable& table) {
  add_kernel<CacheAppend>(table, cache_append_kernel);
}

}  // namespace tessera

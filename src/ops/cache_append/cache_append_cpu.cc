#include <cstring>

#include "ops/cache_append/cache_append.h"

namespace tessera {
namespace {

void cache_append_kernel(const Operator& op, const KernelArgs& args) {
  const Tensor& rows = args.in(0);
  const Tensor& cache = args.out(0);
  if (!cache) return;
  const int64_t start = *args.in(1).as<int32_t>();
  const int64_t capacity = cache.shape[0];
  check_shape(op, start >= 0 && start <= capacity - rows.shape[0],
              "{} rows from row {} on do not fit a cache of {} rows; give it a larger capacity",
              rows.shape[0], start, capacity);
  if (rows.num_bytes() == 0) return;
  const int64_t row_bytes = rows.num_bytes() / rows.shape[0];
  std::memcpy(static_cast<std::byte*>(cache.data) + start * row_bytes, rows.data,
              static_cast<size_t>(rows.num_bytes()));
}

}  // namespace

void add_cache_append_cpu(KernelTable& table) {
  table["cache_append"] = cache_append_kernel;
}

}  // namespace tessera

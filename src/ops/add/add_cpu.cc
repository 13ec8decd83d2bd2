#include <algorithm>

#include "ops/add/add.h"
#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Elements that a thread takes at a time.
constexpr int64_t kChunk = 8192;

template <typename T>
void add_elements(T* sum, const T* a, const T* b, int64_t count) {
  simd::for_each_vector(count, [=](int64_t i, auto lanes) {
    simd::store(sum + i, simd::load(a + i, lanes) + simd::load(b + i, lanes), lanes);
  });
}

void add(const Add& /*op*/, const Args<Add>& args) {
  const int64_t count = args.out(Add::kSum).num_elements();
  with_storage(args.out(Add::kSum).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* a = args.in(Add::kA).as<T>();
    const T* b = args.in(Add::kB).as<T>();
    T* sum = args.out(Add::kSum).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < count; at += kChunk) {
      add_elements(sum + at, a + at, b + at, std::min(kChunk, count - at));
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_add_cpu, table) {
  add_kernel<Add>(table, add);
}

}  // namespace tessera

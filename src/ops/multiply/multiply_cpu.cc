#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/multiply/multiply.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Elements that a thread takes at a time.
constexpr int64_t kChunk = 8192;

void multiply(const Multiply& /*op*/, const Args<Multiply>& args) {
  const int64_t count = args.out(Multiply::kY).num_elements();
  with_storage(args.out(Multiply::kY).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* a = args.in(Multiply::kA).as<T>();
    const T* b = args.in(Multiply::kB).as<T>();
    T* y = args.out(Multiply::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < count; at += kChunk) {
      simd::for_each_vector(std::min(kChunk, count - at), [=](int64_t i, auto lanes) {
        simd::store(y + at + i, simd::load(a + at + i, lanes) * simd::load(b + at + i, lanes),
                    lanes);
      });
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_multiply_cpu, table) {
  add_kernel<Multiply>(table, multiply);
}

}  // namespace tessera

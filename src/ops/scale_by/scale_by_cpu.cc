#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/scale_by/scale_by.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Elements that a thread takes at a time.
constexpr int64_t kChunk = 8192;

void scale_by(const ScaleBy& /*op*/, const Args<ScaleBy>& args) {
  const int64_t count = args.out(ScaleBy::kY).num_elements();
  const float factor = *args.in(ScaleBy::kFactor).as<float>();
  with_storage(args.out(ScaleBy::kY).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* x = args.in(ScaleBy::kX).as<T>();
    T* y = args.out(ScaleBy::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < count; at += kChunk) {
      simd::for_each_vector(std::min(kChunk, count - at), [=](int64_t i, auto lanes) {
        simd::store(y + at + i, simd::load(x + at + i, lanes) * factor, lanes);
      });
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_scale_by_cpu, table) {
  add_kernel<ScaleBy>(table, scale_by);
}

}  // namespace tessera

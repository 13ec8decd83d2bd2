#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/scale/scale.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Elements that a thread takes at a time.
constexpr int64_t kChunk = 8192;

template <typename T>
void scale_elements(T* y, const T* x, const T* addend, float factor, int64_t count) {
  simd::for_each_vector(count, [=](int64_t i, auto lanes) {
    simd::Vec value = simd::load(x + i, lanes) * factor;
    if (addend != nullptr) value += simd::load(addend + i, lanes);
    simd::store(y + i, value, lanes);
  });
}

void scale(const Scale& op, const Args<Scale>& args) {
  const int64_t count = args.out(Scale::kY).num_elements();
  with_storage(args.out(Scale::kY).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* x = args.in(Scale::kX).as<T>();
    const T* addend = op.has_addend() ? args.in(Scale::kAddend).as<T>() : nullptr;
    T* y = args.out(Scale::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < count; at += kChunk) {
      scale_elements(y + at, x + at, addend == nullptr ? nullptr : addend + at, op.factor(),
                     std::min(kChunk, count - at));
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_scale_cpu, table) {
  add_kernel<Scale>(table, scale);
}

}  // namespace tessera

#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/softcap/softcap.h"
#include "ops/softcap_math.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Elements that a thread takes at a time.
constexpr int64_t kChunk = 8192;

void softcap(const Softcap& op, const Args<Softcap>& args) {
  const int64_t count = args.out(Softcap::kY).num_elements();
  const float cap = op.cap();
  with_storage(args.out(Softcap::kY).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* x = args.in(Softcap::kX).as<T>();
    T* y = args.out(Softcap::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < count; at += kChunk) {
      simd::for_each_vector(std::min(kChunk, count - at), [=](int64_t i, auto lanes) {
        simd::store(y + at + i, capped_softly(simd::load(x + at + i, lanes), cap), lanes);
      });
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_softcap_cpu, table) {
  add_kernel<Softcap>(table, softcap);
}

}  // namespace tessera

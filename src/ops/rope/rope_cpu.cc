#include "ops/cpu_dispatch.h"
#include "ops/rope/rope.h"
#include "ops/rope/rope_heads.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void rope(const Rope& rotation, const Args<Rope>& args) {
  const RotarySpec& spec = rotation.spec();
  const Tensor& x = args.in(Rope::kX);
  const int64_t tokens = x.shape[0];
  const int32_t* positions = args.in(Rope::kPositions).as<int32_t>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(Rope::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      TokenAngles angles;
      angles.fill(spec, positions[t], rotation.inverse());
      for (int64_t head = 0; head < spec.num_heads; ++head) {
        const int64_t at = (t * spec.num_heads + head) * spec.head_size;
        rotate_head(to + at, from + at, angles, spec);
      }
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_rope_cpu, table) {
  add_kernel<Rope>(table, "rope", rope);
  add_kernel<Rope>(table, "rope_backward", rope);
}

}  // namespace tessera

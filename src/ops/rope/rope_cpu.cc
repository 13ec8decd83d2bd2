#include "ops/cpu_dispatch.h"
#include "ops/rope/rope.h"
#include "ops/rope/rope_heads.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void rope(const Operator& op, const KernelArgs& args) {
  const auto& rotation = static_cast<const Rope&>(op);
  const RotarySpec& spec = rotation.spec();
  const Tensor& x = args.in(0);
  const int64_t tokens = x.shape[0];
  const int32_t* positions = args.in(1).as<int32_t>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(0).as<T>();
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
  table["rope"] = rope;
  table["rope_backward"] = rope;
}

}  // namespace tessera

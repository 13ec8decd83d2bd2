#include "ops/cpu_dispatch.h"
#include "ops/rope/rope.h"
#include "ops/rope/rope_heads.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// All heads of a tensor [T, num_heads · head size].
template <typename T>
struct Heads {
  const T* from = nullptr;
  T* to = nullptr;
  int64_t num_heads = 0;

  void rotate(int64_t token, const TokenAngles& angles, const RotarySpec& spec) const {
    for (int64_t head = token * num_heads; head < (token + 1) * num_heads; ++head)
      rotate_head(to + head * spec.head_size, from + head * spec.head_size, angles, spec);
  }
};

void rope(const Rope& rotation, const Args<Rope>& args) {
  const RotarySpec& spec = rotation.spec();
  const Tensor& x = args.in(Rope::kX);
  const int32_t* positions = args.in(Rope::kPositions).as<int32_t>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const Heads<T> first = {x.as<T>(), args.out(Rope::kY).as<T>(), spec.num_heads};
    Heads<T> second;
    if (rotation.second_heads() > 0)
      second = {args.in(Rope::kSecondX).as<T>(), args.out(Rope::kSecondY).as<T>(),
                rotation.second_heads()};
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < x.shape[0]; ++t) {
      TokenAngles angles;
      angles.fill(spec, positions[t], rotation.inverse());
      first.rotate(t, angles, spec);
      second.rotate(t, angles, spec);
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_rope_cpu, table) {
  add_kernel<Rope>(table, "rope", rope);
  add_kernel<Rope>(table, "rope_backward", rope);
}

}  // namespace tessera

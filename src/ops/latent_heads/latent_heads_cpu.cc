#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/latent_heads/latent_heads.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void latent_heads(const LatentHeads& op, const Args<LatentHeads>& args) {
  using Op = LatentHeads;
  const LatentHeadsSpec& s = op.spec();
  const int64_t tokens = args.in(Op::kKv).shape[0];
  with_storage(args.in(Op::kKv).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* kv = args.in(Op::kKv).as<T>();
    const T* shared = args.in(Op::kShared).as<T>();
    T* keys = args.out(Op::kKeys).as<T>();
    T* values = args.out(Op::kValues).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t row = t * s.num_heads; row < (t + 1) * s.num_heads; ++row) {
        const T* from = kv + row * (s.nope_size + s.value_size);
        T* key = keys + row * s.key_size();
        std::copy_n(from, s.nope_size, key);
        std::copy_n(shared + t * s.rope_size, s.rope_size, key + s.nope_size);
        std::copy_n(from + s.nope_size, s.value_size, values + row * s.value_size);
      }
    }
  });
}

/// The sum over heads of the gradients of the shared part, `stride` elements apart.
template <typename T>
void sum_heads(T* sum, const T* first, int64_t num_heads, int64_t stride, int64_t size) {
  simd::for_each_vector(size, [=](int64_t i, auto lanes) {
    simd::Vec total{};
    for (int64_t head = 0; head < num_heads; ++head) {
      total += simd::load(first + head * stride + i, lanes);
    }
    simd::store(sum + i, total, lanes);
  });
}

void latent_heads_backward(const LatentHeadsBackward& op, const Args<LatentHeadsBackward>& args) {
  using Op = LatentHeadsBackward;
  const LatentHeadsSpec& s = op.spec();
  const int64_t tokens = args.in(Op::kGradKeys).shape[0];
  with_storage(args.in(Op::kGradKeys).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* grad_keys = args.in(Op::kGradKeys).as<T>();
    const T* grad_values = args.in(Op::kGradValues).as<T>();
    T* grad_kv = args.out(Op::kGradKv).as<T>();
    T* grad_shared = args.out(Op::kGradShared).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t row = t * s.num_heads; row < (t + 1) * s.num_heads; ++row) {
        T* to = grad_kv + row * (s.nope_size + s.value_size);
        std::copy_n(grad_keys + row * s.key_size(), s.nope_size, to);
        std::copy_n(grad_values + row * s.value_size, s.value_size, to + s.nope_size);
      }
      sum_heads(grad_shared + t * s.rope_size,
                grad_keys + t * s.num_heads * s.key_size() + s.nope_size, s.num_heads, s.key_size(),
                s.rope_size);
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_latent_heads_cpu, table) {
  add_kernel<LatentHeads>(table, latent_heads);
  add_kernel<LatentHeadsBackward>(table, latent_heads_backward);
}

}  // namespace tessera

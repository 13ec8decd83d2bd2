#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/repeat_heads/repeat_heads.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// The heads of all tokens without copies, and how they lie.
struct Heads {
  int64_t count = 0;
  int64_t times = 1;
  int64_t size = 0;

  Heads(const Operator& op, const Tensor& once)
      : times(static_cast<const HeadRepetition&>(op).times()) {
    const int64_t num_heads = static_cast<const HeadRepetition&>(op).num_heads();
    count = once.shape[0] * num_heads;
    size = once.shape[1] / num_heads;
  }
};

void repeat_heads(const Operator& op, const KernelArgs& args) {
  const Heads heads(op, args.in(0));
  with_storage(args.in(0).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = args.in(0).as<T>();
    T* to = args.out(0).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < heads.count; ++head) {
      for (int64_t copy = 0; copy < heads.times; ++copy)
        std::copy_n(from + head * heads.size, heads.size,
                    to + (head * heads.times + copy) * heads.size);
    }
  });
}

template <typename T>
void sum_copies(const T* copies, const Heads& heads, T* sum) {
  simd::for_each_vector(heads.size, [=](int64_t i, auto lanes) {
    simd::Vec total = simd::load(copies + i, lanes);
    for (int64_t copy = 1; copy < heads.times; ++copy)
      total += simd::load(copies + copy * heads.size + i, lanes);
    simd::store(sum + i, total, lanes);
  });
}

void sum_heads(const Operator& op, const KernelArgs& args) {
  const Heads heads(op, args.out(0));
  with_storage(args.in(0).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = args.in(0).as<T>();
    T* to = args.out(0).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < heads.count; ++head)
      sum_copies(from + head * heads.times * heads.size, heads, to + head * heads.size);
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_repeat_heads_cpu, table) {
  table["repeat_heads"] = repeat_heads;
  table["sum_heads"] = sum_heads;
}

}  // namespace tessera

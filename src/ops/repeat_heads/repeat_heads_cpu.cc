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

  Heads(const HeadRepetition& op, const Tensor& once)
      : count(once.shape[0] * op.num_heads()),
        times(op.times()),
        size(once.shape[1] / op.num_heads()) {}
};

void repeat_heads(const RepeatHeads& op, const Args<RepeatHeads>& args) {
  using Op = RepeatHeads;
  const Heads heads(op, args.in(Op::kX));
  with_storage(args.in(Op::kX).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = args.in(Op::kX).as<T>();
    T* to = args.out(Op::kY).as<T>();
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

void sum_heads(const SumHeads& op, const Args<SumHeads>& args) {
  const Heads heads(op, args.out(SumHeads::kY));
  with_storage(args.in(SumHeads::kX).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = args.in(SumHeads::kX).as<T>();
    T* to = args.out(SumHeads::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < heads.count; ++head)
      sum_copies(from + head * heads.times * heads.size, heads, to + head * heads.size);
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_repeat_heads_cpu, table) {
  add_kernel<RepeatHeads>(table, repeat_heads);
  add_kernel<SumHeads>(table, sum_heads);
}

}  // namespace tessera

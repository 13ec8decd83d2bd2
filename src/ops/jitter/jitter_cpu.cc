#include <algorithm>
#include <bit>

#include "ops/jitter/jitter.h"
#include "ops/jitter/jitter_factors.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void jitter(const Jitter& /*op*/, const Args<Jitter>& args) {
  using Op = Jitter;
  const Tensor& x = args.in(Op::kX);
  const int64_t width = x.shape[1];
  const int64_t* const numbers = args.in(Op::kTokenNumbers).as<int64_t>();
  const int32_t* const noise = args.in(Op::kNoise).as<int32_t>();
  const auto low = static_cast<uint32_t>(noise[kNoiseKeyLow]);
  const auto high = static_cast<uint32_t>(noise[kNoiseKeyHigh]);
  const auto eps = std::bit_cast<float>(noise[kNoiseSize]);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* const from = x.as<T>();
    T* const to = args.out(Op::kY).as<T>();
    if (eps == 0) {
      std::copy_n(from, x.num_elements(), to);
      return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.shape[0]; ++row) {
      for (int64_t first = 0; first < width; first += kJitterColumns) {
        const PhiloxWords words =
            jitter_words(low, high, numbers[row], static_cast<uint32_t>(first / kJitterColumns));
        const int64_t count = std::min<int64_t>(kJitterColumns, width - first);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = row * width + first + i;
          to[at] = T(static_cast<float>(from[at]) * jitter_factor(words.of[i], eps));
        }
      }
    }
  });
}

}  // namespace

void add_jitter_cpu(KernelTable& table) {
  add_kernel<Jitter>(table, jitter);
}

}  // namespace tessera

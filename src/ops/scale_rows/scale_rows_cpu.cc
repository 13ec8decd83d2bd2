#include <bit>

#include "ops/adamw/state_rounding.h"
#include "ops/cpu_dispatch.h"
#include "ops/scale_rows/scale_rows.h"

namespace tessera {
namespace {

uint32_t word(float value) {
  return std::bit_cast<uint32_t>(value);
}

uint32_t random_of(float factor, float old) {
  return weight_bits(rounding_bits(0, word(factor), 0, 0, word(old)));
}

/// The weight is its own master.
void scale(float factor, float* __restrict weight, Bf16* /*none*/, int64_t n) {
  for (int64_t i = 0; i < n; ++i) weight[i] *= factor;
}
void scale(float factor, Bf16* __restrict weight, Bf16* /*none*/, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float old = weight[i];
    weight[i].bits = round_stochastically(word(old * factor), random_of(factor, old));
  }
}

void scale_copy(float factor, float* __restrict master, Bf16* __restrict weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    master[i] *= factor;
    weight[i] = Bf16(master[i]);
  }
}

template <typename Remainder>
void scale(float factor, Remainder* __restrict remainder, Bf16* __restrict weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const auto old = std::bit_cast<float>(join_halves(weight[i].bits, lower_half(remainder[i])));
    const uint32_t next =
        word_with_remainder<Remainder>(word(old * factor), random_of(factor, old));
    weight[i] = Bf16(std::bit_cast<float>(next));
    remainder[i] = remainder_of<Remainder>(next);
  }
}

template <typename Scale>
void for_each_row(const Args<ScaleRows>& args, const Scale& scale_row) {
  const auto factors = args.in(ScaleRows::kFactors).template span<float>();
  const int64_t columns = args.out(ScaleRows::kMaster).shape[1];
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < std::ssize(factors); ++row) {
    if (factors[row] != 1.0F) scale_row(factors[row], row * columns, columns);
  }
}

void scale_rows(const ScaleRows& op, const Args<ScaleRows>& args) {
  const Tensor& master = args.out(ScaleRows::kMaster);
  Bf16* const weight = op.num_outputs() == 2 ? args.out(ScaleRows::kWeight).as<Bf16>() : nullptr;
  const auto run = [&]<typename T>(T* masters) {
    for_each_row(args, [&](float factor, int64_t at, int64_t n) {
      if constexpr (std::is_same_v<T, float>) {
        if (weight != nullptr) return scale_copy(factor, masters + at, weight + at, n);
      }
      scale(factor, masters + at, weight == nullptr ? nullptr : weight + at, n);
    });
  };
  switch (master.dtype) {
    case DType::kF32:
      return run(master.as<float>());
    case DType::kBF16:
      return run(master.as<Bf16>());
    case DType::kU16:
      return run(master.as<uint16_t>());
    default:
      return run(master.as<uint8_t>());
  }
}

}  // namespace

TESSERA_CPU_KERNELS(add_scale_rows_cpu, table) {
  add_kernel<ScaleRows>(table, scale_rows);
}

}  // namespace tessera

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "core/host_tensor.h"
#include "core/random.h"
#include "model/weights/hash_table.h"
#include "model/weights/parameters.h"

namespace tessera {
namespace {

/// Calls visit(first element of the whole weight, first local element, count) for each run of
/// elements that lie together in both.
template <typename Visit>
void for_each_run(const Slice& slice, const Visit& visit) {
  const int64_t width = slice.global.rank() == 2 ? slice.global[1] : 1;
  int64_t local = 0;
  for (const IndexRange& rows : slice.rows) {
    const bool whole_rows = slice.columns.count == width;
    const int64_t runs = whole_rows ? 1 : rows.count;
    const int64_t count = slice.columns.count * (whole_rows ? rows.count : 1);
    for (int64_t run = 0; run < runs; ++run) {
      visit((rows.begin + run) * width + slice.columns.begin, local, count);
      local += count;
    }
  }
}

void store(const Tensor& weight, int64_t at, std::span<const float> values) {
  if (weight.dtype == DType::kF32) {
    std::ranges::copy(values, weight.as<float>() + at);
  } else {
    std::ranges::transform(values, weight.as<Bf16>() + at, [](float x) { return Bf16(x); });
  }
}

void fill_constant(const Tensor& weight, float value) {
  if (weight.dtype == DType::kF32) {
    std::ranges::fill(weight.span<float>(), value);
  } else {
    std::ranges::fill(weight.span<Bf16>(), Bf16(value));
  }
}

/// Decays from (0, 16), as Mamba-2 draws them, but one of each equal part: the heads' in turn.
void fill_decays(const Slice& part, const Tensor& weight) {
  const auto heads = static_cast<double>(part.global[0]);
  for_each_run(part, [&](int64_t first, int64_t local, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double decay = 16.0 * (static_cast<double>(first + i) + 0.5) / heads;
      weight.as<float>()[local + i] = static_cast<float>(std::log(decay));
    }
  });
}

/// Steps between 0.001 and 0.1 by their logarithm, as Mamba-2 draws them, here by a sequence of low
/// discrepancy, so that heads of slow and of fast decays have both. Biases are what the softplus
/// makes steps of.
void fill_steps(const Slice& part, const Tensor& weight) {
  constexpr double kGolden = 0.6180339887498949;
  for_each_run(part, [&](int64_t first, int64_t local, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double turns = (static_cast<double>(first + i) + 0.5) * kGolden;
      const double step = 0.001 * std::pow(100.0, turns - std::floor(turns));
      weight.as<float>()[local + i] = static_cast<float>(std::log(std::expm1(step)));
    }
  });
}

void fill_hash_table(const ParameterSpec& spec, const Slice& part, const Tensor& weight,
                     uint64_t seed) {
  const HashTableSpec of{part.global[0], part.global[1], spec.init_experts};
  const auto table = draw_hash_table(of, seed, hash_text(spec.name.data(), spec.name.size()));
  for_each_run(part, [&](int64_t first, int64_t local, int64_t count) {
    std::copy_n(table.begin() + first, count, weight.as<float>() + local);
  });
}

/// Numbers are drawn in blocks of the whole weight, each from its own stream, so that the result
/// depends neither on the thread count nor on the part that is held.
void fill_random(const ParameterSpec& spec, const Slice& part, const Tensor& weight,
                 uint64_t seed) {
  constexpr int64_t kBlock = 4096;
  const uint64_t stream = hash_text(spec.name.data(), spec.name.size());
  for_each_run(part, [&](int64_t first, int64_t local, int64_t count) {
#pragma omp parallel for schedule(static)
    for (int64_t block = first / kBlock; block < (first + count + kBlock - 1) / kBlock; ++block) {
      std::array<float, kBlock> values{};
      const int64_t begin = std::max(first, block * kBlock);
      const int64_t end = std::min(first + count, (block + 1) * kBlock);
      fill_normal(std::span(values).first(end - block * kBlock), seed,
                  mix(stream, static_cast<uint64_t>(block)),
                  static_cast<float>(spec.init_deviation));
      store(weight, local + begin - first,
            std::span(values).subspan(begin - block * kBlock, end - begin));
    }
  });
}

}  // namespace

void initialize_weight(const ParameterSpec& spec, const Slice& part, const Tensor& weight,
                       uint64_t seed) {
  const HostTensor host(weight, HostTensor::Access::kWrite);
  if (spec.init_decays) {
    fill_decays(part, host.get());
  } else if (spec.init_steps) {
    fill_steps(part, host.get());
  } else if (spec.init_experts > 0) {
    fill_hash_table(spec, part, host.get(), seed);
  } else if (spec.init_deviation == 0) {
    fill_constant(host.get(), spec.init_constant);
  } else {
    fill_random(spec, part, host.get(), seed);
  }
  host.store();
}

}  // namespace tessera

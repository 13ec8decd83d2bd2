#include "comm/reduce.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace tessera {
namespace {

// Elements whose partial results stay in the first-level cache.
constexpr int64_t kBlock = 1024;
// Fewer elements than this are not worth several threads.
constexpr int64_t kParallel = 1 << 16;

template <typename T>
struct SumType {
  using type = T;
};
template <>
struct SumType<Bf16> {
  using type = float;
};

template <typename T>
bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(value);
  return false;
}

// A NaN is larger than all.
template <typename T>
T larger(T a, T b) {
  return b > a || is_nan(b) ? b : a;
}

template <typename T>
void reduce_block(ReduceOp op, std::span<const void* const> inputs, T* out, int64_t begin,
                  int64_t count) {
  using Sum = typename SumType<T>::type;
  std::array<Sum, kBlock> result;
  const T* first = static_cast<const T*>(inputs[0]) + begin;
  std::copy(first, first + count, result.begin());
  for (const void* input : inputs.subspan(1)) {
    const T* next = static_cast<const T*>(input) + begin;
    Sum* sum = result.data();
    if (op == ReduceOp::kSum) {
      for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<Sum>(next[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) sum[i] = larger(sum[i], static_cast<Sum>(next[i]));
    }
  }
  for (int64_t i = 0; i < count; ++i) out[begin + i] = T(result[i]);
}

template <typename T>
void reduce_typed(ReduceOp op, std::span<const void* const> inputs, void* out, int64_t count) {
  const int64_t blocks = (count + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static) if (count >= kParallel)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * kBlock;
    reduce_block(op, inputs, static_cast<T*>(out), begin, std::min(kBlock, count - begin));
  }
}

}  // namespace

void reduce_elements(DType dtype, ReduceOp op, std::span<const void* const> inputs, void* out,
                     int64_t count) {
  switch (dtype) {
    case DType::kF32:
      return reduce_typed<float>(op, inputs, out, count);
    case DType::kBF16:
      return reduce_typed<Bf16>(op, inputs, out, count);
    case DType::kF64:
      return reduce_typed<double>(op, inputs, out, count);
    case DType::kI32:
      return reduce_typed<int32_t>(op, inputs, out, count);
    case DType::kI64:
      return reduce_typed<int64_t>(op, inputs, out, count);
    default:
      throw InternalError("reduction of " + std::string(dtype_name(dtype)));
  }
}

}  // namespace tessera

#pragma once

#include <algorithm>
#include <cmath>

#include "ops/batch_rows.h"
#include "ops/gated_delta/gated_delta.h"
#include "ops/gated_delta/small_product.h"

/// Rows of heads in and out of scratch memory, and the spread of heads over threads: what kernels
/// of delta rules for the CPU share.
namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

/// What heads of one sequence are worked on by as many workers at once, whatever the number of
/// threads: each has scratch memory of its own.
inline constexpr int64_t kMaxWorkers = 32;

inline int64_t num_workers(int64_t sequences, int64_t heads) {
  return std::min(kMaxWorkers, sequences * heads);
}

/// Calls run(task, worker) for every task; tasks of one worker follow one another.
template <typename Run>
void for_each_task(int64_t tasks, int64_t workers, Run run) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t worker = 0; worker < workers; ++worker) {
    for (int64_t task = worker; task < tasks; task += workers) run(task, worker);
  }
}

/// Texts that go on in slots (GatedDeltaBatch and its like), whose states are of `size` numbers a
/// head: calls run(rows, head, state, worker) for every head of each, with a state of zeros where a
/// text begins, and gives zeros to the rows behind the last text.
template <typename Op, typename T, typename Run>
void run_texts(const Op& op, const Args<Op>& args, int64_t heads, int64_t size, T* o, Run run) {
  const Tensor& v = args.in(Op::kV);
  const std::vector<BatchRows> batch =
      read_batch_rows(op,
                      {.cu_seqlens = args.in(Op::kCuSeqlens).template span<int32_t>(),
                       .lengths = args.in(Op::kLengths).template span<int32_t>(),
                       .slots = args.in(Op::kSlots).template span<int32_t>()},
                      v.shape[0], op.num_slots());
  auto* const states = args.out(Op::kStates).template as<float>();
  for_each_task(std::ssize(batch) * heads, num_workers(1, heads),
                [&](int64_t task, int64_t worker) {
                  const BatchRows& rows = batch[task / heads];
                  const int64_t head = task % heads;
                  float* const state = states + (rows.slot * heads + head) * size;
                  if (rows.is_first) std::fill_n(state, size, 0.0F);
                  run(rows, head, state, worker);
                });
  std::fill(o + end_of_rows(batch) * v.shape[1], o + v.num_elements(), T(0.0F));
}

/// Rows of a head as unit vectors times `scale`, and what they were divided by.
template <typename T>
void read_unit_rows(float* to, float* inverse, const T* from, int64_t stride, int64_t count,
                    int64_t size, float scale) {
  for (int64_t i = 0; i < count; ++i) {
    const T* row = from + i * stride;
    simd::Vec squares{};
    simd::for_each_vector(size, [&](int64_t j, auto lanes) {
      const simd::Vec x = simd::load(row + j, lanes);
      squares += x * x;
    });
    inverse[i] = 1.0F / std::sqrt(simd::sum(squares) + kUnitEps);
    const float factor = inverse[i] * scale;
    simd::for_each_vector(size, [&](int64_t j, auto lanes) {
      simd::store(to + i * size + j, simd::load(row + j, lanes) * factor, lanes);
    });
  }
}

/// What read_unit_rows() wrote.
struct UnitRows {
  const float* rows;
  const float* inverse;
  int64_t count;
  int64_t size;
  float scale;
};

/// Gradients of the rows that read_unit_rows() read, from those of what it wrote.
template <typename T>
void write_unit_grads(T* to, int64_t stride, const UnitRows& unit, const float* grads) {
  const int64_t size = unit.size;
  for (int64_t i = 0; i < unit.count; ++i) {
    const float* row = unit.rows + i * size;
    const float* grad = grads + i * size;
    const float along = dot_rows(row, grad, size) / (unit.scale * unit.scale);
    const float factor = unit.inverse[i] * unit.scale;
    T* out = to + i * stride;
    simd::for_each_vector(size, [&](int64_t j, auto lanes) {
      simd::store(out + j,
                  factor * (simd::load(grad + j, lanes) - along * simd::load(row + j, lanes)),
                  lanes);
    });
  }
}

template <typename T>
void read_rows(float* to, const T* from, int64_t stride, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i) {
    simd::for_each_vector(size, [&](int64_t j, auto lanes) {
      simd::store(to + i * size + j, simd::load(from + i * stride + j, lanes), lanes);
    });
  }
}

template <typename T>
void write_rows(T* to, const float* from, int64_t stride, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i) {
    simd::for_each_vector(size, [&](int64_t j, auto lanes) {
      simd::store(to + i * stride + j, simd::load(from + i * size + j, lanes), lanes);
    });
  }
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera

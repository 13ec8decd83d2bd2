#include <algorithm>
#include <numeric>

#include "core/slice.h"
#include "ops/cpu_dispatch.h"
#include "ops/expert_bias/expert_bias.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// The rows of one call: where they lie, and what is added to them.
struct BiasedRows {
  const ExpertBias& op;
  std::span<const int64_t> offsets;
  const int32_t* row_offsets = nullptr;  ///< of sparse rows
  int64_t width = 0;                     ///< of the matrix otherwise

  int64_t num_rows() const { return offsets.back(); }
  int64_t expert_of(int64_t row) const {
    return std::ranges::upper_bound(offsets, row) - offsets.begin() - 1;
  }
  /// The elements of an expert's row.
  int64_t row_width(int64_t expert) const { return op.is_sparse() ? op.sizes()[expert] : width; }
  int64_t start(int64_t row, int64_t expert) const {
    if (!op.is_sparse()) return row * width;
    const int64_t block = op.block_size();
    return row_offsets[row / block] * block * block + row % block * row_width(expert);
  }
};

template <typename Op>
BiasedRows bind_rows(const ExpertBias& forward, const Args<Op>& args, const Tensor& rows) {
  const Tensor* row_offsets = args.find_in(Op::kRowOffsets);
  BiasedRows result{.op = forward,
                    .offsets = args.in(Op::kOffsets).template span<int64_t>(),
                    .row_offsets = row_offsets == nullptr ? nullptr : row_offsets->as<int32_t>(),
                    .width = rows.shape[1]};
  ensure(forward.is_sparse() || result.num_rows() == rows.shape[0],
         "expert_bias: offsets end at {} of {} rows", result.num_rows(), rows.shape[0]);
  return result;
}

/// Where each expert's bias begins.
int64_t bias_start(const ExpertSizes& sizes, int64_t expert) {
  return std::accumulate(sizes.values().begin(), sizes.values().begin() + expert, int64_t{0});
}

constexpr int64_t kRowBlock = 16;

/// Calls run(row, expert, where the expert's bias begins) for all routed rows, on all threads.
template <typename Run>
void for_each_biased_row(const BiasedRows& rows, Run run) {
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < rows.num_rows(); first += kRowBlock) {
    int64_t expert = rows.expert_of(first);
    int64_t start = bias_start(rows.op.sizes(), expert);
    const int64_t last = std::min(first + kRowBlock, rows.num_rows());
    for (int64_t row = first; row < last; ++row) {
      while (rows.offsets[expert + 1] <= row) start += rows.op.sizes()[expert++];
      run(row, expert, start);
    }
  }
}

template <typename T>
void add_biases(const BiasedRows& rows, const Args<ExpertBias>& args) {
  using Op = ExpertBias;
  const T* x = args.in(Op::kX).as<T>();
  const float* bias = args.in(Op::kBias).as<float>();
  const Tensor* probs_R = args.find_in(Op::kProbs);
  T* y = args.out(Op::kY).as<T>();
  const int64_t first_column = rows.op.first_column();
  for_each_biased_row(rows, [&](int64_t row, int64_t expert, int64_t bias_begin) {
    const int64_t at = rows.start(row, expert);
    const int64_t size = rows.op.sizes()[expert];
    const float factor = probs_R == nullptr ? 1.0F : probs_R->as<float>()[row];
    const int64_t end = first_column + size;
    std::copy_n(x + at, first_column, y + at);
    std::copy_n(x + at + end, rows.row_width(expert) - end, y + at + end);
    const T* from = x + at + first_column;
    T* to = y + at + first_column;
    simd::for_each_vector(size, [=](int64_t i, auto lanes) {
      simd::store(to + i,
                  simd::load(from + i, lanes) + factor * simd::load(bias + bias_begin + i, lanes),
                  lanes);
    });
  });
}

template <typename T>
void find_prob_gradients(const BiasedRows& rows, const Args<ExpertBiasBackward>& args) {
  using Op = ExpertBiasBackward;
  const T* grad = args.in(Op::kGrad).as<T>() + rows.op.first_column();
  const float* bias = args.in(Op::kBias).as<float>();
  float* grad_probs = args.out(Op::kGradProbs).as<float>();
  for_each_biased_row(rows, [&](int64_t row, int64_t expert, int64_t bias_begin) {
    const T* from = grad + rows.start(row, expert);
    simd::Vec dot{};
    simd::for_each_vector(rows.op.sizes()[expert], [&](int64_t i, auto lanes) {
      dot += simd::load(from + i, lanes) * simd::load(bias + bias_begin + i, lanes);
    });
    grad_probs[row] = simd::sum(dot);
  });
}

constexpr int64_t kSumColumns = 64;
constexpr int64_t kSumRows = 256;  // whose sum is added to those before

/// Adds an expert's rows up, of `count` columns from `column` of its bias on.
template <typename T>
void sum_expert_rows(const BiasedRows& rows, const T* grad, const float* probs, int64_t expert,
                     IndexRange columns, float* total) {
  float part[kSumColumns];
  const int64_t end = rows.offsets[expert + 1];
  for (int64_t first = rows.offsets[expert]; first < end; first += kSumRows) {
    std::fill_n(part, columns.count, 0.0F);
    for (int64_t row = first; row < std::min(first + kSumRows, end); ++row) {
      const T* from = grad + rows.start(row, expert) + columns.begin;
      const float factor = probs == nullptr ? 1.0F : probs[row];
      simd::for_each_vector(columns.count, [&](int64_t i, auto lanes) {
        simd::store(part + i, simd::load(part + i, lanes) + factor * simd::load(from + i, lanes),
                    lanes);
      });
    }
    for (int64_t i = 0; i < columns.count; ++i) total[i] += part[i];
  }
}

template <typename T>
void add_bias_gradients(const BiasedRows& rows, const Args<ExpertBiasBackward>& args) {
  using Op = ExpertBiasBackward;
  const ExpertSizes& sizes = rows.op.sizes();
  const T* grad = args.in(Op::kGrad).as<T>() + rows.op.first_column();
  const Tensor* probs_R = args.find_in(Op::kProbs);
  const float* probs = probs_R == nullptr ? nullptr : probs_R->as<float>();
  float* grad_bias = args.out(Op::kGradBias).as<float>();
  const int64_t chunks = (sizes.largest() + kSumColumns - 1) / kSumColumns;
#pragma omp parallel for schedule(dynamic)
  for (int64_t item = 0; item < sizes.num_experts() * chunks; ++item) {
    const int64_t expert = item / chunks;
    const int64_t column = item % chunks * kSumColumns;
    const int64_t count = std::min(kSumColumns, sizes[expert] - column);
    if (count <= 0) continue;
    sum_expert_rows(rows, grad, probs, expert, {column, count},
                    grad_bias + bias_start(sizes, expert) + column);
  }
}

void expert_bias(const ExpertBias& op, const Args<ExpertBias>& args) {
  const Tensor& x = args.in(ExpertBias::kX);
  const BiasedRows rows = bind_rows(op, args, x);
  with_storage(x.dtype, [&](auto storage) { add_biases<decltype(storage)>(rows, args); });
}

void expert_bias_backward(const ExpertBiasBackward& op, const Args<ExpertBiasBackward>& args) {
  using Op = ExpertBiasBackward;
  const Tensor& grad = args.in(Op::kGrad);
  const BiasedRows rows = bind_rows(op.forward(), args, grad);
  with_storage(grad.dtype, [&](auto storage) {
    using T = decltype(storage);
    if (op.forward().apply_prob()) find_prob_gradients<T>(rows, args);
    if (op.of_value()) std::ranges::fill(args.out(Op::kGradBias).span<float>(), 0.0F);
    if (args.out(Op::kGradBias)) add_bias_gradients<T>(rows, args);
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_expert_bias_cpu, table) {
  add_kernel<ExpertBias>(table, expert_bias);
  add_kernel<ExpertBiasBackward>(table, expert_bias_backward);
  add_kernel<ExpertBiasBackward>(table, ExpertBiasBackward::kOfValue, expert_bias_backward);
}

}  // namespace tessera

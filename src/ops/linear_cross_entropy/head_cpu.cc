#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/gemm/gemm.h"
#include "ops/linear_cross_entropy/head.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/softmax_rows.h"
#include "ops/simd.h"
#include "ops/softcap_math.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {
namespace {

HeadRange range_at(int64_t first, int64_t step, int64_t end) {
  return {first, std::min(step, end - first)};
}

/// to += from.
void add_row(float* to, const float* from, int64_t count) {
  simd::for_each_vector(count, [=](int64_t i, auto lanes) {
    simd::store(to + i, simd::load(to + i, lanes) + simd::load(from + i, lanes), lanes);
  });
}

/// sums = or, where `accumulate`, += the sums of columns of rows [count, cols] that lie `stride`
/// elements apart, from the first row to the last.
template <typename A>
void sum_columns(const A* rows, int64_t count, int64_t stride, int64_t cols, bool accumulate,
                 float* sums) {
  simd::for_each_vector(cols, [=](int64_t i, auto lanes) {
    simd::Vec total{};
    for (int64_t row = 0; row < count; ++row) total += simd::load(rows + row * stride + i, lanes);
    simd::store(sums + i, accumulate ? simd::load(sums + i, lanes) + total : total, lanes);
  });
}

}  // namespace

Head::Head(const KernelArgs& args, const HeadSizes& sizes, const HeadNeeds& needs,
           const VocabularyPart& part)
    : sizes_(sizes),
      needs_(needs),
      layout_(sizes_, needs),
      first_row_(part.first_row),
      bias_(part.bias),
      x_(args.in(HeadOperands::kX)),
      weight_(args.in(HeadOperands::kWeight)),
      labels_(args.in(HeadOperands::kLabels).as<int32_t>()),
      scratch_(args.workspace.data()) {
  check_labels(part.vocab_size);
}

HeadRange Head::chunk_at(int64_t first) const {
  return range_at(first, sizes_.chunk, sizes_.T);
}

HeadRange Head::block_at(int64_t first) const {
  return range_at(first, sizes_.block, sizes_.V);
}

bool Head::is_ignored(int64_t token) const {
  return labels_[token] == kIgnoredLabel;
}

int64_t Head::label_column(int64_t token, HeadRange cols) const {
  const int64_t column = labels_[token] - first_row_ - cols.first;
  return !is_ignored(token) && column >= 0 && column < cols.count ? column : -1;
}

const std::byte* Head::row_of(const Tensor& matrix, int64_t row) const {
  return static_cast<const std::byte*>(matrix.data) + row * sizes_.H * dtype_size(matrix.dtype);
}

void Head::check_labels(int64_t vocab_size) const {
  for (int64_t t = 0; t < sizes_.T; ++t) {
    require((labels_[t] >= 0 && labels_[t] < vocab_size) || is_ignored(t),
            "cross-entropy: the label of token {} is {}, outside the vocabulary of {} and not {} "
            "(ignored)",
            t, labels_[t], vocab_size, kIgnoredLabel);
  }
}

void Head::multiply_logits(HeadRange rows, HeadRange cols) const {
  gemm({.transpose_b = true,
        .m = rows.count,
        .n = cols.count,
        .k = sizes_.H,
        .a = row_of(x_, rows.first),
        .lda = sizes_.H,
        .b = row_of(weight_, cols.first),
        .ldb = sizes_.H,
        .c = logits(rows, cols),
        .ldc = cols.count,
        .input_type = x_.dtype});
  if (sizes_.softcap > 0 || bias_ != nullptr) finish_logits(rows, cols);
}

void Head::finish_logits(HeadRange rows, HeadRange cols) const {
  float* block = logits(rows, cols);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) {
    float* own = block + row * cols.count;
    if (bias_ != nullptr) add_row(own, bias_ + cols.first, cols.count);
    if (sizes_.softcap > 0)
      map_row(own, own, cols.count,
              [this](simd::Vec values) { return capped_softly(values, sizes_.softcap); });
  }
}

void Head::exponentiate_block(HeadRange rows, HeadRange cols) const {
  float* block = logits(rows, cols);
  float* maxima = statistics(layout_.block_max, cols);
  float* sums = statistics(layout_.block_sum, cols);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) {
    float* row_logits = block + row * cols.count;
    const int64_t label = label_column(rows.first + row, cols);
    if (label >= 0) label_logits()[row] = row_logits[label];
    maxima[row] = row_max(row_logits, cols.count);
    sums[row] = exponentiate(row_logits, cols.count, maxima[row]);
  }
}

Head::RowStatistics Head::join_blocks(int64_t row) const {
  const float* maxima = floats(layout_.block_max);
  const float* sums = floats(layout_.block_sum);
  double maximum = -std::numeric_limits<double>::infinity();
  for (int64_t b = 0; b < sizes_.num_blocks(); ++b)
    maximum = std::max(maximum, static_cast<double>(maxima[b * sizes_.chunk + row]));
  double sum = 0;
  for (int64_t b = 0; b < sizes_.num_blocks(); ++b) {
    const int64_t idx = b * sizes_.chunk + row;
    sum += sums[idx] * std::exp(maxima[idx] - maximum);
  }
  return {maximum, std::log(sum)};
}

template <typename A>
void Head::store_row(HeadRange rows, HeadRange cols, int64_t row, const RowGradient& gradient,
                     bool from_exponentials) const {
  A* grad = static_cast<A*>(grad_logits(rows, cols)) + row * grad_stride(cols);
  if (gradient.is_zero()) {
    std::fill_n(grad, cols.count, A(0.0F));
    return;
  }
  const float* from = logits(rows, cols) + row * cols.count;
  const int64_t label = label_column(rows.first + row, cols);
  // slope: what a change of the product is to a logit.
  const auto store = [&](const auto& probability, const auto& slope) {
    const simd::Vec own = simd::broadcast(label < 0 ? 0.0F : from[label]);
    const float at_label =
        label < 0 ? 0.0F : (probability(own)[0] + gradient.at_label) * slope(own)[0];
    map_row(grad, from, cols.count,
            [&](simd::Vec values) { return probability(values) * slope(values); });
    if (label >= 0) grad[label] = A(at_label);
  };
  if (from_exponentials) {
    const float maximum = statistics(layout_.block_max, cols)[row];
    const float factor = gradient.coef * std::exp(maximum - gradient.lse);
    store([factor](simd::Vec exponentials) { return exponentials * factor; },
          [](simd::Vec /*exponentials*/) { return simd::broadcast(1.0F); });
    return;
  }
  const auto probability = [gradient](simd::Vec values) {
    return simd::exp(values - gradient.lse) * gradient.coef;
  };
  if (sizes_.softcap == 0) {
    store(probability, [](simd::Vec /*values*/) { return simd::broadcast(1.0F); });
  } else {
    store(probability, [inverse = 1.0F / sizes_.softcap](simd::Vec values) {
      return 1.0F - values * inverse * (values * inverse);
    });
  }
}

template void Head::store_row<float>(HeadRange, HeadRange, int64_t, const RowGradient&, bool) const;
template void Head::store_row<Bf16>(HeadRange, HeadRange, int64_t, const RowGradient&, bool) const;

void Head::multiply_to_dx(HeadRange rows, HeadRange cols, float* sum, bool accumulate) const {
  gemm({.m = rows.count,
        .n = sizes_.H,
        .k = cols.count,
        .a = grad_logits(rows, cols),
        .lda = grad_stride(cols),
        .b = row_of(weight_, cols.first),
        .ldb = sizes_.H,
        .c = sum,
        .ldc = sizes_.H,
        .input_type = x_.dtype,
        .accumulate = accumulate});
}

void Head::add_to_bias(HeadRange rows, HeadRange cols, const HeadWeightGradient& weight) const {
  if (!weight.bias_sum) return;
  float* const sums = weight.bias_sum.as<float>() + cols.first;
  const bool accumulate = !weight.is_unset || rows.first > 0;
  const void* const grads = grad_logits(rows, cols);
  if (narrow()) {
    sum_columns(static_cast<const Bf16*>(grads), rows.count, grad_stride(cols), cols.count,
                accumulate, sums);
  } else {
    sum_columns(static_cast<const float*>(grads), rows.count, grad_stride(cols), cols.count,
                accumulate, sums);
  }
}

void Head::multiply_to_weight(HeadRange rows, HeadRange cols,
                              const HeadWeightGradient& weight) const {
  add_to_bias(rows, cols, weight);
  if (!weight.sum) return;
  gemm({.transpose_a = true,
        .m = cols.count,
        .n = sizes_.H,
        .k = rows.count,
        .a = grad_logits(rows, cols),
        .lda = grad_stride(cols),
        .b = row_of(x_, rows.first),
        .ldb = sizes_.H,
        .c = weight.sum.as<float>() + cols.first * sizes_.H,
        .ldc = sizes_.H,
        .input_type = x_.dtype,
        .accumulate = !weight.is_unset || rows.first > 0});
}

void Head::multiply_gradients(HeadRange rows, HeadRange cols, const Tensor& dx,
                              const HeadWeightGradient& weight) const {
  const int64_t H = sizes_.H;
  float* sum = narrow() ? floats(layout_.dx) : dx.as<float>() + rows.first * H;
  multiply_to_dx(rows, cols, sum, cols.first > 0);
  if (narrow() && cols.first + cols.count == sizes_.V) {
    simd::convert(dx.as<Bf16>() + rows.first * H, sum, rows.count * H);
  }
  multiply_to_weight(rows, cols, weight);
}

HeadRange Head::blocks_of_part(int64_t part) const {
  const int64_t first = sizes_.num_blocks() * part / num_parts();
  return {first, sizes_.num_blocks() * (part + 1) / num_parts() - first};
}

void Head::multiply_gradients_of_part(HeadRange rows, HeadRange cols, int64_t part,
                                      const HeadWeightGradient& weight) const {
  const bool is_first = cols.first == blocks_of_part(part).first * sizes_.block;
  multiply_to_dx(rows, cols, part_sum(part), !is_first);
  multiply_to_weight(rows, cols, weight);
}

void Head::sum_parts(HeadRange rows, int64_t row, const Tensor& dx) const {
  const int64_t H = sizes_.H;
  float* sum = part_sum(0) + row * H;
  for (int64_t part = 1; part < num_parts(); ++part) {
    const float* from = part_sum(part) + row * H;
    simd::for_each_vector(H, [=](int64_t i, auto lanes) {
      simd::store(sum + i, simd::load(sum + i, lanes) + simd::load(from + i, lanes), lanes);
    });
  }
  if (narrow()) {
    simd::convert(dx.as<Bf16>() + (rows.first + row) * H, sum, H);
  } else {
    simd::convert(dx.as<float>() + (rows.first + row) * H, sum, H);
  }
}

float scaled_sum(std::span<const float> terms, float scale, const float* weights) {
  double sum = 0;
  for (size_t i = 0; i < terms.size(); ++i) {
    sum += weights == nullptr ? double{terms[i]} : double{weights[i]} * double{terms[i]};
  }
  return static_cast<float>(scale * sum);
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera

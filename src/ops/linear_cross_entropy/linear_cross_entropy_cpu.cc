#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/gemm/gemm.h"
#include "ops/linear_cross_entropy/head_workspace.h"
#include "ops/linear_cross_entropy/softmax_rows.h"
#include "ops/simd.h"

namespace tessera {
namespace {

/// Rows of a chunk, or columns of a block.
struct Range {
  int64_t first = 0;
  int64_t count = 0;
};

Range range_at(int64_t first, int64_t step, int64_t end) {
  return {first, std::min(step, end - first)};
}

/// One call: its tensors, its scratch memory and the steps that the three kernels are made of.
/// Every step is parallel over rows or is a product.
class Head {
 public:
  Head(const Operator& op, const KernelArgs& args, const HeadNeeds& needs)
      : sizes_(args.in(0).shape, args.in(1).shape,
               static_cast<const CrossEntropyOperator&>(op).spec()),
        needs_(needs),
        layout_(sizes_, needs),
        x_(args.in(0)),
        weight_(args.in(1)),
        labels_(args.in(2).as<int32_t>()),
        scratch_(args.workspace.data()) {
    check_labels();
  }

  const HeadSizes& sizes() const { return sizes_; }
  Range chunk_at(int64_t first) const { return range_at(first, sizes_.chunk, sizes_.T); }
  Range block_at(int64_t first) const { return range_at(first, sizes_.block, sizes_.V); }

  /// logits = x[rows] · weight[cols]ᵀ, into the block's place.
  void multiply_logits(Range rows, Range cols) const;
  /// Replaces the block's logits by exp(logit - block maximum); keeps maxima, sums and the labels'
  /// logits.
  void exponentiate_block(Range rows, Range cols) const;
  /// Joins the blocks' statistics: the chunk's token losses and lse.
  void finish_chunk(Range rows, float* token_loss, float* lse) const;
  /// The logits' gradients of a block, from its exponentials, or from its logits and their lse.
  void grad_from_exponentials(Range rows, Range cols, float coef) const;
  void grad_from_logits(Range rows, Range cols, float coef, const float* lse) const;
  /// dx[rows] += grad · weight[cols], where the first block sets and the last one stores;
  /// dweight[cols] += gradᵀ · x[rows].
  void multiply_gradients(Range rows, Range cols, const Tensor& dx, const Tensor& dweight) const;

  /// The scratch place of a chunk's lse.
  float* chunk_lse() const { return floats(layout_.lse); }

 private:
  void check_labels() const;
  float* floats(int64_t offset) const { return reinterpret_cast<float*>(scratch_ + offset); }
  float* logits(Range rows, Range cols) const {
    return floats(layout_.logits) + (needs_.all_blocks ? rows.count * cols.first : 0);
  }
  /// Statistics of a block for all rows of the chunk.
  float* statistics(int64_t offset, Range cols) const {
    return floats(offset) + cols.first / sizes_.block * sizes_.chunk;
  }
  bool narrow() const { return x_.dtype == DType::kBF16; }
  void* grad_logits(Range rows, Range cols) const {
    return narrow() ? static_cast<void*>(scratch_ + layout_.grad_logits) : logits(rows, cols);
  }
  /// The column of a row's label within the block; -1 where it lies elsewhere.
  int64_t label_column(int64_t token, Range cols) const {
    const int64_t column = labels_[token] - cols.first;
    return column >= 0 && column < cols.count ? column : -1;
  }
  const std::byte* row_of(const Tensor& matrix, int64_t row) const {
    return static_cast<const std::byte*>(matrix.data) + row * sizes_.H * dtype_size(matrix.dtype);
  }
  template <typename A, typename RowProbability>
  void grad_rows(Range rows, Range cols, float coef, const RowProbability& of_row) const;

  HeadSizes sizes_;
  HeadNeeds needs_;
  HeadWorkspace layout_;
  const Tensor& x_;
  const Tensor& weight_;
  const int32_t* labels_;
  std::byte* scratch_;
};

void Head::check_labels() const {
  for (int64_t t = 0; t < sizes_.T; ++t) {
    require((labels_[t] >= 0 && labels_[t] < sizes_.V) || labels_[t] == kIgnoredLabel,
            "cross-entropy: the label of token {} is {}, outside the vocabulary of {} and not {} "
            "(ignored)",
            t, labels_[t], sizes_.V, kIgnoredLabel);
  }
}

void Head::multiply_logits(Range rows, Range cols) const {
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
}

void Head::exponentiate_block(Range rows, Range cols) const {
  float* block = logits(rows, cols);
  float* maxima = statistics(layout_.block_max, cols);
  float* sums = statistics(layout_.block_sum, cols);
  float* label_logits = floats(layout_.label_logit);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) {
    float* row_logits = block + row * cols.count;
    const int64_t label = label_column(rows.first + row, cols);
    if (label >= 0) label_logits[row] = row_logits[label];
    maxima[row] = row_max(row_logits, cols.count);
    sums[row] = exponentiate(row_logits, cols.count, maxima[row]);
  }
}

void Head::finish_chunk(Range rows, float* token_loss, float* lse) const {
  const float* maxima = floats(layout_.block_max);
  const float* sums = floats(layout_.block_sum);
  const float* label_logits = floats(layout_.label_logit);
  for (int64_t row = 0; row < rows.count; ++row) {
    double maximum = maxima[row];
    for (int64_t b = 1; b < sizes_.num_blocks(); ++b) {
      maximum = std::max(maximum, static_cast<double>(maxima[b * sizes_.chunk + row]));
    }
    double sum = 0;
    for (int64_t b = 0; b < sizes_.num_blocks(); ++b) {
      const int64_t idx = b * sizes_.chunk + row;
      sum += sums[idx] * std::exp(maxima[idx] - maximum);
    }
    lse[row] = static_cast<float>(maximum + std::log(sum));
    const bool ignored = labels_[rows.first + row] == kIgnoredLabel;
    token_loss[row] =
        ignored ? 0.0F : static_cast<float>(maximum - label_logits[row] + std::log(sum));
  }
}

/// of_row(row) gives the function from a vector of the row's elements to its probabilities · coef.
template <typename A, typename RowProbability>
void Head::grad_rows(Range rows, Range cols, float coef, const RowProbability& of_row) const {
  const float* block = logits(rows, cols);
  A* grads = static_cast<A*>(grad_logits(rows, cols));
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) {
    A* grad = grads + row * cols.count;
    if (labels_[rows.first + row] == kIgnoredLabel) {
      std::fill_n(grad, cols.count, A(0.0F));
      continue;
    }
    const float* from = block + row * cols.count;
    const auto probability = of_row(row);
    const int64_t label = label_column(rows.first + row, cols);
    const float at_label = label < 0 ? 0.0F : probability(simd::broadcast(from[label]))[0] - coef;
    map_row(grad, from, cols.count, probability);
    if (label >= 0) grad[label] = A(at_label);
  }
}

void Head::grad_from_exponentials(Range rows, Range cols, float coef) const {
  const float* maxima = statistics(layout_.block_max, cols);
  const float* lse = chunk_lse();
  const auto of_row = [=](int64_t row) {
    const float factor = coef * std::exp(maxima[row] - lse[row]);
    return [factor](simd::Vec exponentials) { return exponentials * factor; };
  };
  narrow() ? grad_rows<Bf16>(rows, cols, coef, of_row) : grad_rows<float>(rows, cols, coef, of_row);
}

void Head::grad_from_logits(Range rows, Range cols, float coef, const float* lse) const {
  const auto of_row = [=](int64_t row) {
    const float row_lse = lse[row];
    return [=](simd::Vec values) { return simd::exp(values - row_lse) * coef; };
  };
  narrow() ? grad_rows<Bf16>(rows, cols, coef, of_row) : grad_rows<float>(rows, cols, coef, of_row);
}

void Head::multiply_gradients(Range rows, Range cols, const Tensor& dx,
                              const Tensor& dweight) const {
  const int64_t H = sizes_.H;
  float* sum = narrow() ? floats(layout_.dx) : dx.as<float>() + rows.first * H;
  gemm({.m = rows.count,
        .n = H,
        .k = cols.count,
        .a = grad_logits(rows, cols),
        .lda = cols.count,
        .b = row_of(weight_, cols.first),
        .ldb = H,
        .c = sum,
        .ldc = H,
        .input_type = x_.dtype,
        .accumulate = cols.first > 0});
  if (narrow() && cols.first + cols.count == sizes_.V) {
    simd::convert(dx.as<Bf16>() + rows.first * H, sum, rows.count * H);
  }
  if (!dweight) return;
  gemm({.transpose_a = true,
        .m = cols.count,
        .n = H,
        .k = rows.count,
        .a = grad_logits(rows, cols),
        .lda = cols.count,
        .b = row_of(x_, rows.first),
        .ldb = H,
        .c = dweight.as<float>() + cols.first * H,
        .ldc = H,
        .input_type = x_.dtype,
        .accumulate = true});
}

float total_loss(const Tensor& token_loss, float scale) {
  double sum = 0;
  for (const float loss : token_loss.span<float>()) sum += loss;
  return static_cast<float>(scale * sum);
}

void forward(const Operator& op, const KernelArgs& args) {
  const Head head(op, args, forward_needs(args.in(0).dtype));
  const HeadSizes& sizes = head.sizes();
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const Range rows = head.chunk_at(t);
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.exponentiate_block(rows, head.block_at(v));
    }
    head.finish_chunk(rows, args.out(1).as<float>() + t, args.out(2).as<float>() + t);
  }
  *args.out(0).as<float>() = total_loss(args.out(1), *args.in(3).as<float>());
}

void backward(const Operator& op, const KernelArgs& args) {
  const Head head(op, args, backward_needs(args.in(0).dtype));
  const HeadSizes& sizes = head.sizes();
  const float coef = *args.in(3).as<float>() * *args.in(5).as<float>();
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const Range rows = head.chunk_at(t);
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.grad_from_logits(rows, head.block_at(v), coef, args.in(4).as<float>() + t);
      head.multiply_gradients(rows, head.block_at(v), args.out(0), args.out(1));
    }
  }
}

void fused(const Operator& op, const KernelArgs& args) {
  const Head head(op, args, fused_needs(args.in(0).dtype));
  const HeadSizes& sizes = head.sizes();
  const float scale = *args.in(3).as<float>();
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const Range rows = head.chunk_at(t);
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.exponentiate_block(rows, head.block_at(v));
    }
    head.finish_chunk(rows, args.out(1).as<float>() + t, head.chunk_lse());
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.grad_from_exponentials(rows, head.block_at(v), scale);
      head.multiply_gradients(rows, head.block_at(v), args.out(2), args.out(3));
    }
  }
  *args.out(0).as<float>() = total_loss(args.out(1), scale);
}

}  // namespace

void add_linear_cross_entropy_cpu(KernelTable& table) {
  table["linear_cross_entropy"] = forward;
  table["linear_cross_entropy_backward"] = backward;
  table["linear_cross_entropy_fused"] = fused;
}

}  // namespace tessera

#pragma once

#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/linear_cross_entropy/head_workspace.h"
#include "ops/operator.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

/// Rows of a chunk, or columns of a block.
struct HeadRange {
  int64_t first = 0;
  int64_t count = 0;
};

/// Where the gradients of the weight, F32 [V, H], and of the bias, F32 [V], are added up; null
/// where they are not wanted.
struct HeadWeightGradient {
  Tensor sum;
  Tensor bias_sum;
  bool is_unset = false;  ///< the first tokens' part is written rather than added
};

/// The rows of the vocabulary that a weight holds, and their bias.
struct VocabularyPart {
  int64_t first_row = 0;
  int64_t vocab_size = 0;       ///< of the whole vocabulary
  const float* bias = nullptr;  ///< null: none
};

/// What a row's logits' gradients are made of: exp(logit - lse) · coef, and `at_label` more where
/// the label is.
struct RowGradient {
  float lse = 0;
  float coef = 0;
  float at_label = 0;
  bool is_zero() const { return coef == 0 && at_label == 0; }
};

/// One call of a kernel over x A [T, H] and weight A [V, H]: its tensors, its scratch memory and
/// the steps that the kernels are made of. Every step is parallel over rows or is a product.
class Head {
 public:
  /// The first inputs are HeadOperands. Throws UserError for a label outside the
  /// whole vocabulary that is not kIgnoredLabel.
  Head(const KernelArgs& args, const HeadSizes& sizes, const HeadNeeds& needs,
       const VocabularyPart& part);

  const HeadSizes& sizes() const { return sizes_; }
  HeadRange chunk_at(int64_t first) const;
  HeadRange block_at(int64_t first) const;
  bool is_ignored(int64_t token) const;

  /// logits = x[rows] · weight[cols]ᵀ + bias[cols], capped, into the block's place.
  void multiply_logits(HeadRange rows, HeadRange cols) const;
  /// Replaces the block's logits by exp(logit - block maximum); keeps maxima, sums and the labels'
  /// logits.
  void exponentiate_block(HeadRange rows, HeadRange cols) const;
  /// Joins the blocks' statistics: log Σ exp(logit) of a row of the chunk, as the maximum and the
  /// logarithm of the rest.
  struct RowStatistics {
    double maximum = 0;
    double log_sum = 0;
    double lse() const { return maximum + log_sum; }
  };
  RowStatistics join_blocks(int64_t row) const;
  /// The labels' logits of a chunk; those of labels that are not here are what they were before.
  float* label_logits() const { return floats(layout_.label_logit); }
  /// The scratch place of a chunk's lse.
  float* chunk_lse() const { return floats(layout_.lse); }

  /// Exponentials no longer say what capped logits were: of these gradients come from logits.
  bool grads_need_logits() const { return sizes_.softcap > 0; }
  /// The logits' gradients of a block, from its exponentials or from its logits. of_row(row), the
  /// row counted in the chunk, gives the RowGradient.
  template <typename OfRow>
  void grad_from_exponentials(HeadRange rows, HeadRange cols, const OfRow& of_row) const;
  template <typename OfRow>
  void grad_from_logits(HeadRange rows, HeadRange cols, const OfRow& of_row) const;
  /// dx[rows] += grad · weight[cols], where the first block sets and the last one stores;
  /// weight.sum[cols] += gradᵀ · x[rows], and bias_sum[cols] the columns' sums of grad.
  void multiply_gradients(HeadRange rows, HeadRange cols, const Tensor& dx,
                          const HeadWeightGradient& weight) const;

  /// Parts of the vocabulary, where the work is cut into some: runs of whole blocks.
  int64_t num_parts() const { return std::min(needs_.num_parts, sizes_.num_blocks()); }
  HeadRange blocks_of_part(int64_t part) const;
  /// As multiply_gradients, with the part's own sum in place of dx[rows].
  void multiply_gradients_of_part(HeadRange rows, HeadRange cols, int64_t part,
                                  const HeadWeightGradient& weight) const;
  /// dx[row of the chunk] = Σ of the parts' sums, in their order.
  void sum_parts(HeadRange rows, int64_t row, const Tensor& dx) const;

 private:
  /// Adds the bias to a block's products, where there is one, and caps them.
  void finish_logits(HeadRange rows, HeadRange cols) const;
  void add_to_bias(HeadRange rows, HeadRange cols, const HeadWeightGradient& weight) const;
  /// sum[rows of the chunk] = or += grad · weight[cols].
  void multiply_to_dx(HeadRange rows, HeadRange cols, float* sum, bool accumulate) const;
  void multiply_to_weight(HeadRange rows, HeadRange cols, const HeadWeightGradient& weight) const;
  float* part_sum(int64_t part) const {
    return floats(layout_.dx) + part * sizes_.chunk * sizes_.H;
  }
  void check_labels(int64_t vocab_size) const;
  float* floats(int64_t offset) const { return reinterpret_cast<float*>(scratch_ + offset); }
  float* logits(HeadRange rows, HeadRange cols) const {
    return floats(layout_.logits) + (needs_.all_blocks ? rows.count * cols.first : 0);
  }
  /// Statistics of a block for all rows of the chunk.
  float* statistics(int64_t offset, HeadRange cols) const {
    return floats(offset) + cols.first / sizes_.block * sizes_.chunk;
  }
  bool narrow() const { return is_low_precision(x_.dtype); }
  /// By parts, gradients take the place of the logits, each row that of its own.
  bool grads_in_place() const { return !narrow() || needs_.num_parts > 0; }
  void* grad_logits(HeadRange rows, HeadRange cols) const {
    return grads_in_place() ? logits(rows, cols) : floats(layout_.grad_logits);
  }
  /// Elements between rows of grad_logits.
  int64_t grad_stride(HeadRange cols) const {
    return narrow() && grads_in_place() ? 2 * cols.count : cols.count;
  }
  /// The column of a row's label within the block; -1 where it lies elsewhere.
  int64_t label_column(int64_t token, HeadRange cols) const;
  const std::byte* row_of(const Tensor& matrix, int64_t row) const;
  /// Stores a row's gradients. from_exponentials: what stands there is exp(logit - maximum).
  template <typename A>
  void store_row(HeadRange rows, HeadRange cols, int64_t row, const RowGradient& gradient,
                 bool from_exponentials) const;
  template <typename OfRow>
  void grad_rows(HeadRange rows, HeadRange cols, const OfRow& of_row, bool from_exponentials) const;

  HeadSizes sizes_;
  HeadNeeds needs_;
  HeadWorkspace layout_;
  int64_t first_row_;
  const float* bias_;
  Tensor x_;
  Tensor weight_;
  const int32_t* labels_;
  std::byte* scratch_;
};

/// Σ of the elements in double from the first to the last, times `scale`; each times its weight
/// where there are weights.
float scaled_sum(std::span<const float> terms, float scale, const float* weights = nullptr);

template <typename OfRow>
void Head::grad_rows(HeadRange rows, HeadRange cols, const OfRow& of_row,
                     bool from_exponentials) const {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) {
    const RowGradient gradient = of_row(row);
    narrow() ? store_row<Bf16>(rows, cols, row, gradient, from_exponentials)
             : store_row<float>(rows, cols, row, gradient, from_exponentials);
  }
}

template <typename OfRow>
void Head::grad_from_exponentials(HeadRange rows, HeadRange cols, const OfRow& of_row) const {
  grad_rows(rows, cols, of_row, true);
}

template <typename OfRow>
void Head::grad_from_logits(HeadRange rows, HeadRange cols, const OfRow& of_row) const {
  grad_rows(rows, cols, of_row, false);
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera

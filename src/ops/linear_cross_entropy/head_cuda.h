#pragma once

#include "ops/linear_cross_entropy/head_kernels.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tessera::cuda {

/// How a head's rows are cut on a GPU: into chunks whose logits F32 take about kLogitsBytes, but of
/// at least kMinRows or the specification's chunk_tokens, so that adding a chunk to the weight's
/// gradient costs little beside its product.
struct HeadCut {
  static constexpr int64_t kLogitsBytes = int64_t{512} << 20;
  static constexpr int64_t kMinRows = 2048;

  int64_t T = 0;
  int64_t H = 0;
  int64_t V = 0;
  int64_t chunk = 0;
  int64_t stride = 0;  ///< of a row of logits
  float softcap = 0;   ///< of the logits; 0: none

  HeadCut(const Shape& x, const Shape& weight, const CrossEntropySpec& spec);
};

/// Byte offsets of the scratch memory. The logits' gradients take the logits' place.
struct HeadScratch {
  int64_t logits = 0;    ///< F32 [chunk, stride]
  int64_t x = 0;         ///< A [chunk, H], where rows beyond a ragged extent must be zero
  int64_t partials = 0;  ///< F32, of the bias's gradient
  int64_t num_bytes = 0;

  HeadScratch(const HeadCut& cut, DType type, bool copies_x, bool sums_bias);
};

/// The rows of the vocabulary that a weight holds, and where their bias and its gradient are.
struct VocabularyPart {
  int64_t first_row = 0;
  int64_t vocab_size = 0;          ///< of the whole vocabulary
  const float* bias = nullptr;     ///< null: none
  float* bias_gradient = nullptr;  ///< null: not wanted
};

/// The scratch memory of a kernel that finds losses alone, and of one that makes gradients.
int64_t losses_scratch_bytes(std::span<const ValueType> inputs, const CrossEntropySpec& spec);
int64_t gradients_scratch_bytes(std::span<const ValueType> inputs, const CrossEntropySpec& spec);

/// One call of a kernel over x A [T, H] and weight A [V, H], labels I32 [T] being the third input;
/// see Head for the CPU's.
class Head {
 public:
  Head(const KernelArgs& args, const CrossEntropySpec& spec, const VocabularyPart& part,
       bool makes_gradients);

  const HeadCut& cut() const { return cut_; }
  /// The chunk that begins at a token, with its logits, capped.
  HeadRows multiply_logits(int64_t first_token) const;
  /// dx[rows] = gradients · weight, dweight += gradientsᵀ · x[rows], unless it is null, and the
  /// bias's gradient += gradients' sums; the first chunk writes these where the accumulators are
  /// unset.
  void multiply_gradients(const HeadRows& rows, const Tensor& dx, const Tensor& dweight) const;

 private:
  /// x's rows of a chunk, in which no row is garbage.
  const void* finite_rows(const HeadRows& rows) const;
  void add_to_bias(const HeadRows& rows) const;
  int64_t row_bytes() const { return cut_.H * dtype_size(x_.dtype); }

  const KernelArgs& args_;
  HeadCut cut_;
  HeadScratch scratch_;
  VocabularyPart part_;
  Tensor x_;
  Tensor weight_;
};

}  // namespace tessera::cuda

#pragma once

#include "core/memory.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tessera {

/// The sizes of one head product and how it is cut into chunks of tokens and blocks of the
/// vocabulary. V may be 0.
struct HeadSizes {
  int64_t T = 0;
  int64_t H = 0;
  int64_t V = 0;
  int64_t chunk = 0;
  int64_t block = 0;
  float softcap = 0;  ///< of the logits; 0: none

  HeadSizes(const Shape& x, const Shape& weight, const CrossEntropySpec& spec);
  int64_t num_blocks() const { return (V + block - 1) / block; }
};

/// Which parts of the scratch memory a kernel wants.
struct HeadNeeds {
  bool all_blocks = false;  ///< the logits of every block of a chunk at once, not of one
  bool statistics = false;
  bool gradients = false;
  int64_t num_parts = 0;  ///< sums for dx; 0: one, and one place for the gradients of logits
  DType type = DType::kF32;
};

/// Byte offsets of the scratch memory; the one description of it, for its size and for its
/// pointers.
struct HeadWorkspace {
  int64_t logits = 0;       ///< F32: block after block, each [chunk rows, block columns]
  int64_t block_max = 0;    ///< F32 [num_blocks, chunk]
  int64_t block_sum = 0;    ///< F32 [num_blocks, chunk]
  int64_t label_logit = 0;  ///< F32 [chunk]
  int64_t lse = 0;          ///< F32 [chunk]
  int64_t grad_logits = 0;  ///< BF16 [chunk, block], where A is BF16; by parts in logits' place
  int64_t dx = 0;           ///< F32 [chunk, H], where A is BF16; by parts: [parts, chunk, H]
  int64_t num_bytes = 0;

  HeadWorkspace(const HeadSizes& sizes, const HeadNeeds& needs);
};

/// What each operator's kernel needs.
HeadNeeds forward_needs(DType type);
HeadNeeds backward_needs(DType type);
HeadNeeds fused_needs(DType type, const CrossEntropySpec& spec);

/// The sizes of the fused operator, which are those of its parts where it has some.
HeadSizes fused_sizes(const Shape& x, const Shape& weight, const CrossEntropySpec& spec);

/// Scratch memory of an operator whose first inputs are HeadOperands.
int64_t head_workspace_bytes(std::span<const ValueType> inputs, const CrossEntropySpec& spec,
                             const HeadNeeds& needs);

}  // namespace tessera

#include "ops/cpu_dispatch.h"
#include "ops/linear_cross_entropy/head.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/vocab_lse.h"

namespace tessera {
namespace {

/// The whole vocabulary.
template <typename Op>
VocabularyPart vocabulary_of(const Args<Op>& args) {
  const Tensor* const bias = args.find_in(Op::kBias);
  return {.first_row = 0,
          .vocab_size = args.in(Op::kWeight).shape[0],
          .bias = bias == nullptr ? nullptr : bias->template as<float>()};
}

template <typename Op>
Head make_head(const Op& op, const Args<Op>& args, const HeadNeeds& needs) {
  const HeadSizes sizes(args.in(Op::kX).shape, args.in(Op::kWeight).shape, op.spec());
  return {args, sizes, needs, vocabulary_of(args)};
}

/// Where the gradients of weight and bias go.
template <typename Op>
HeadWeightGradient weight_gradient(const Args<Op>& args) {
  const Tensor* const bias = args.find_out(Op::kGradBias);
  return {args.out(Op::kGradWeight), bias == nullptr ? Tensor() : *bias, args.set_accumulators};
}

/// The token losses and lse of a chunk from its blocks' statistics.
void finish_chunk(const Head& head, HeadRange rows, float* token_loss, float* lse) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) {
    const Head::RowStatistics statistics = head.join_blocks(row);
    lse[row] = static_cast<float>(statistics.lse());
    token_loss[row] = head.is_ignored(rows.first + row)
                          ? 0.0F
                          : static_cast<float>(statistics.maximum - head.label_logits()[row] +
                                               statistics.log_sum);
  }
}

/// The weights of all tokens; null where each counts the same.
template <typename Op>
const float* weights_of(const Op& op, const Args<Op>& args) {
  return op.spec().weighted ? args.in(Op::kTokenWeights).template as<float>() : nullptr;
}

/// What the gradients of a chunk's rows are made of.
struct ChunkGradient {
  const float* lse = nullptr;  ///< of the chunk
  float coef = 0;
  const float* token_weights = nullptr;  ///< of all tokens, or null
};

/// The function from a row of the chunk to its gradient.
auto gradient_of(const Head& head, HeadRange rows, const ChunkGradient& chunk) {
  return [=, &head](int64_t row) {
    const int64_t token = rows.first + row;
    if (head.is_ignored(token)) return RowGradient{};
    const float coef =
        chunk.token_weights == nullptr ? chunk.coef : chunk.coef * chunk.token_weights[token];
    return RowGradient{chunk.lse[row], coef, -coef};
  };
}

void forward(const LinearCrossEntropy& op, const Args<LinearCrossEntropy>& args) {
  using Op = LinearCrossEntropy;
  const Head head = make_head(op, args, forward_needs(args.in(Op::kX).dtype));
  const HeadSizes& sizes = head.sizes();
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const HeadRange rows = head.chunk_at(t);
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.exponentiate_block(rows, head.block_at(v));
    }
    finish_chunk(head, rows, args.out(Op::kTokenLoss).as<float>() + t,
                 args.out(Op::kLse).as<float>() + t);
  }
  *args.out(Op::kLoss).as<float>() =
      scaled_sum(args.out(Op::kTokenLoss).span<float>(), *args.in(Op::kScale).as<float>(),
                 weights_of(op, args));
}

void backward(const LinearCrossEntropyBackward& op, const Args<LinearCrossEntropyBackward>& args) {
  using Op = LinearCrossEntropyBackward;
  const Head head = make_head(op, args, backward_needs(args.in(Op::kX).dtype));
  const HeadSizes& sizes = head.sizes();
  const float coef = *args.in(Op::kScale).as<float>() * *args.in(Op::kGradLoss).as<float>();
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const HeadRange rows = head.chunk_at(t);
    const auto of_row = gradient_of(
        head, rows, {args.in(Op::kForwardLse).as<float>() + t, coef, weights_of(op, args)});
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.grad_from_logits(rows, head.block_at(v), of_row);
      head.multiply_gradients(rows, head.block_at(v), args.out(Op::kGradX), weight_gradient(args));
    }
  }
}

using Fused = LinearCrossEntropyFused;

/// Of a chunk whose lse are there.
ChunkGradient chunk_gradient(const Head& head, const Fused& op, const Args<Fused>& args) {
  return {head.chunk_lse(), *args.in(Fused::kScale).as<float>(), weights_of(op, args)};
}

/// The gradients of a block's logits, of which there are exponentials.
template <typename OfRow>
void replace_by_gradients(const Head& head, HeadRange rows, HeadRange cols, const OfRow& of_row) {
  if (!head.grads_need_logits()) return head.grad_from_exponentials(rows, cols, of_row);
  head.multiply_logits(rows, cols);
  head.grad_from_logits(rows, cols, of_row);
}

/// The fused kernel's steps for one chunk, all threads at one block of the vocabulary.
void run_chunk(const Head& head, const Fused& op, const Args<Fused>& args, HeadRange rows) {
  const HeadSizes& sizes = head.sizes();
  for (int64_t v = 0; v < sizes.V; v += sizes.block) {
    head.multiply_logits(rows, head.block_at(v));
    head.exponentiate_block(rows, head.block_at(v));
  }
  finish_chunk(head, rows, args.out(Fused::kTokenLoss).as<float>() + rows.first, head.chunk_lse());
  const auto of_row = gradient_of(head, rows, chunk_gradient(head, op, args));
  for (int64_t v = 0; v < sizes.V; v += sizes.block) {
    replace_by_gradients(head, rows, head.block_at(v), of_row);
    head.multiply_gradients(rows, head.block_at(v), args.out(Fused::kGradX), weight_gradient(args));
  }
}

/// The same, each block by one thread. Which thread takes which does not change any sum.
void run_chunk_by_parts(const Head& head, const Fused& op, const Args<Fused>& args,
                        HeadRange rows) {
  const HeadSizes& sizes = head.sizes();
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t block = 0; block < sizes.num_blocks(); ++block) {
    const HeadRange cols = head.block_at(block * sizes.block);
    head.multiply_logits(rows, cols);
    head.exponentiate_block(rows, cols);
  }
  finish_chunk(head, rows, args.out(Fused::kTokenLoss).as<float>() + rows.first, head.chunk_lse());
  const auto of_row = gradient_of(head, rows, chunk_gradient(head, op, args));
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t part = 0; part < head.num_parts(); ++part) {
    const HeadRange blocks = head.blocks_of_part(part);
    for (int64_t i = 0; i < blocks.count; ++i) {
      const HeadRange cols = head.block_at((blocks.first + i) * sizes.block);
      replace_by_gradients(head, rows, cols, of_row);
      head.multiply_gradients_of_part(rows, cols, part, weight_gradient(args));
    }
  }
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) head.sum_parts(rows, row, args.out(Fused::kGradX));
}

void fused(const Fused& op, const Args<Fused>& args) {
  const CrossEntropySpec& spec = op.spec();
  const HeadSizes sizes =
      fused_sizes(args.in(Fused::kX).shape, args.in(Fused::kWeight).shape, spec);
  const Head head(args, sizes, fused_needs(args.in(Fused::kX).dtype, spec), vocabulary_of(args));
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    (spec.parts ? run_chunk_by_parts : run_chunk)(head, op, args, head.chunk_at(t));
  }
  *args.out(Fused::kLoss).as<float>() =
      scaled_sum(args.out(Fused::kTokenLoss).span<float>(), *args.in(Fused::kScale).as<float>(),
                 weights_of(op, args));
}

int64_t forward_workspace(const LinearCrossEntropy& op, std::span<const ValueType> inputs) {
  return head_workspace_bytes(inputs, op.spec(),
                              forward_needs(inputs[LinearCrossEntropy::kX].dtype));
}

int64_t backward_workspace(const LinearCrossEntropyBackward& op,
                           std::span<const ValueType> inputs) {
  return head_workspace_bytes(inputs, op.spec(),
                              backward_needs(inputs[LinearCrossEntropyBackward::kX].dtype));
}

int64_t fused_workspace(const Fused& op, std::span<const ValueType> inputs) {
  const ValueType& x = inputs[Fused::kX];
  const HeadSizes sizes = fused_sizes(x.shape, inputs[Fused::kWeight].shape, op.spec());
  return HeadWorkspace(sizes, fused_needs(x.dtype, op.spec())).num_bytes;
}

}  // namespace

TESSERA_CPU_KERNELS(add_linear_cross_entropy_cpu, table) {
  add_kernel<LinearCrossEntropy>(table, forward, {.workspace = forward_workspace});
  add_kernel<LinearCrossEntropyBackward>(
      table, backward, {.workspace = backward_workspace, .sets_accumulators = true});
  add_kernel<LinearCrossEntropyFused>(table, fused,
                                      {.workspace = fused_workspace, .sets_accumulators = true});
  add_vocab_lse_cpu(table);
}

}  // namespace tessera

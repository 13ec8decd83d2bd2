#include "ops/cpu_dispatch.h"
#include "ops/linear_cross_entropy/head.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/vocab_lse.h"

namespace tessera {
namespace {

Head make_head(const Operator& op, const KernelArgs& args, const HeadNeeds& needs) {
  const CrossEntropySpec& spec = static_cast<const CrossEntropyOperator&>(op).spec();
  const HeadSizes sizes(args.in(0).shape, args.in(1).shape, spec);
  return {args, sizes, needs, {.first_row = 0, .vocab_size = sizes.V}};
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

/// The function from a row of the chunk to its gradient.
auto gradient_of(const Head& head, HeadRange rows, float coef, const float* lse) {
  return [=, &head](int64_t row) {
    return head.is_ignored(rows.first + row) ? RowGradient{} : RowGradient{lse[row], coef, -coef};
  };
}

void forward(const Operator& op, const KernelArgs& args) {
  const Head head = make_head(op, args, forward_needs(args.in(0).dtype));
  const HeadSizes& sizes = head.sizes();
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const HeadRange rows = head.chunk_at(t);
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.exponentiate_block(rows, head.block_at(v));
    }
    finish_chunk(head, rows, args.out(1).as<float>() + t, args.out(2).as<float>() + t);
  }
  *args.out(0).as<float>() = scaled_sum(args.out(1).span<float>(), *args.in(3).as<float>());
}

void backward(const Operator& op, const KernelArgs& args) {
  const Head head = make_head(op, args, backward_needs(args.in(0).dtype));
  const HeadSizes& sizes = head.sizes();
  const float coef = *args.in(3).as<float>() * *args.in(5).as<float>();
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const HeadRange rows = head.chunk_at(t);
    const auto of_row = gradient_of(head, rows, coef, args.in(4).as<float>() + t);
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.grad_from_logits(rows, head.block_at(v), of_row);
      head.multiply_gradients(rows, head.block_at(v), args.out(0),
                              {args.out(1), args.set_accumulators});
    }
  }
}

HeadWeightGradient weight_gradient(const KernelArgs& args) {
  return {args.out(3), args.set_accumulators};
}

/// The fused kernel's steps for one chunk, all threads at one block of the vocabulary.
void run_chunk(const Head& head, const KernelArgs& args, HeadRange rows) {
  const HeadSizes& sizes = head.sizes();
  for (int64_t v = 0; v < sizes.V; v += sizes.block) {
    head.multiply_logits(rows, head.block_at(v));
    head.exponentiate_block(rows, head.block_at(v));
  }
  finish_chunk(head, rows, args.out(1).as<float>() + rows.first, head.chunk_lse());
  const auto of_row = gradient_of(head, rows, *args.in(3).as<float>(), head.chunk_lse());
  for (int64_t v = 0; v < sizes.V; v += sizes.block) {
    head.grad_from_exponentials(rows, head.block_at(v), of_row);
    head.multiply_gradients(rows, head.block_at(v), args.out(2), weight_gradient(args));
  }
}

/// The same, each block by one thread. Which thread takes which does not change any sum.
void run_chunk_by_parts(const Head& head, const KernelArgs& args, HeadRange rows) {
  const HeadSizes& sizes = head.sizes();
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t block = 0; block < sizes.num_blocks(); ++block) {
    const HeadRange cols = head.block_at(block * sizes.block);
    head.multiply_logits(rows, cols);
    head.exponentiate_block(rows, cols);
  }
  finish_chunk(head, rows, args.out(1).as<float>() + rows.first, head.chunk_lse());
  const auto of_row = gradient_of(head, rows, *args.in(3).as<float>(), head.chunk_lse());
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t part = 0; part < head.num_parts(); ++part) {
    const HeadRange blocks = head.blocks_of_part(part);
    for (int64_t i = 0; i < blocks.count; ++i) {
      const HeadRange cols = head.block_at((blocks.first + i) * sizes.block);
      head.grad_from_exponentials(rows, cols, of_row);
      head.multiply_gradients_of_part(rows, cols, part, weight_gradient(args));
    }
  }
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) head.sum_parts(rows, row, args.out(2));
}

void fused(const Operator& op, const KernelArgs& args) {
  const CrossEntropySpec& spec = static_cast<const CrossEntropyOperator&>(op).spec();
  const HeadSizes sizes = fused_sizes(args.in(0).shape, args.in(1).shape, spec);
  const Head head(args, sizes, fused_needs(args.in(0).dtype, spec),
                  {.first_row = 0, .vocab_size = sizes.V});
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    (spec.parts ? run_chunk_by_parts : run_chunk)(head, args, head.chunk_at(t));
  }
  *args.out(0).as<float>() = scaled_sum(args.out(1).span<float>(), *args.in(3).as<float>());
}

}  // namespace

TESSERA_CPU_KERNELS(add_linear_cross_entropy_cpu, table) {
  table["linear_cross_entropy"] = forward;
  table["linear_cross_entropy_backward"] = Kernel(backward).setting_accumulators();
  table["linear_cross_entropy_fused"] = Kernel(fused).setting_accumulators();
  add_vocab_lse_cpu(table);
}

}  // namespace tessera

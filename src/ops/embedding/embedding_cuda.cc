#include "ops/cuda/row_args.h"
#include "ops/embedding/embedding.h"
#include "ops/embedding/embedding_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::TokenRows describe(const Args<Op>& args, const EmbeddingSpec& spec, int64_t num_rows) {
  return {.rows = cuda::rows_of(args, Op::kTokens, 1),
          .tokens = args.in(Op::kTokens).template as<int32_t>(),
          .vocab_size = spec.vocab_size == 0 ? num_rows : spec.vocab_size,
          .first_row = spec.first_row,
          .num_rows = num_rows};
}

void embed(const Embedding& op, const Args<Embedding>& args) {
  const Tensor& table = args.in(Embedding::kTable);
  const EmbeddingSpec& spec = op.spec();
  cuda::launch_embedding({.tokens = describe(args, spec, table.shape[0]),
                          .dtype = table.dtype,
                          .hidden = table.shape[1],
                          .table = table.data,
                          .out = args.out(Embedding::kRows).data},
                         cuda::stream_of(args));
}

void embed_backward(const EmbeddingBackward& op, const Args<EmbeddingBackward>& args) {
  const Tensor& accumulator = args.out(EmbeddingBackward::kGradTable);
  if (!accumulator) return;
  const EmbeddingSpec& spec = op.spec();
  const Tensor& grad = args.in(EmbeddingBackward::kGrad);
  cuda::launch_embedding_backward({.tokens = describe(args, spec, accumulator.shape[0]),
                                   .padding_token = spec.padding_token,
                                   .dtype = grad.dtype,
                                   .hidden = grad.shape[1],
                                   .grad = grad.data,
                                   .accumulator = accumulator.as<float>(),
                                   .workspace = args.workspace.data(),
                                   .num_sms = cuda::context_of(args).num_sms()},
                                  cuda::stream_of(args));
}

int64_t backward_workspace(const EmbeddingBackward& /*op*/, std::span<const ValueType> inputs) {
  return cuda::embedding_backward_workspace(inputs[EmbeddingBackward::kGrad].shape[0],
                                            inputs[EmbeddingBackward::kGrad].shape[1]);
}

}  // namespace

void add_embedding_cuda(KernelTable& table) {
  add_kernel<Embedding>(table, embed);
  add_kernel<EmbeddingBackward>(table, embed_backward, {.workspace = backward_workspace});
}

}  // namespace tessera

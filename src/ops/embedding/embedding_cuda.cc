#include "ops/cuda/row_args.h"
#include "ops/embedding/embedding.h"
#include "ops/embedding/embedding_kernels.h"

namespace tessera {
namespace {

cuda::TokenRows describe(const KernelArgs& args, const EmbeddingSpec& spec, int64_t num_rows) {
  return {.rows = cuda::rows_of(args, 0, 1),
          .tokens = args.in(0).as<int32_t>(),
          .vocab_size = spec.vocab_size == 0 ? num_rows : spec.vocab_size,
          .first_row = spec.first_row,
          .num_rows = num_rows};
}

void embed(const Operator& op, const KernelArgs& args) {
  const Tensor& table = args.in(1);
  const EmbeddingSpec& spec = static_cast<const Embedding&>(op).spec();
  cuda::launch_embedding({.tokens = describe(args, spec, table.shape[0]),
                          .dtype = table.dtype,
                          .hidden = table.shape[1],
                          .table = table.data,
                          .out = args.out(0).data},
                         cuda::stream_of(args));
}

void embed_backward(const Operator& op, const KernelArgs& args) {
  const Tensor& accumulator = args.out(0);
  if (!accumulator) return;
  const EmbeddingSpec& spec = static_cast<const EmbeddingBackward&>(op).spec();
  const Tensor& grad = args.in(1);
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

int64_t backward_workspace(const Operator& /*op*/, std::span<const ValueType> inputs) {
  return cuda::embedding_backward_workspace(inputs[1].shape[0], inputs[1].shape[1]);
}

}  // namespace

void add_embedding_cuda(KernelTable& table) {
  table["embedding"] = embed;
  table["embedding_backward"] = Kernel(embed_backward, backward_workspace);
}

}  // namespace tessera

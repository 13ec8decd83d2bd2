#include <algorithm>

#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/index_topk/index_topk.h"
#include "ops/index_topk/index_topk_kernels.h"
#include "ops/paged_attention/kept_rows_cuda.h"
#include "ops/paged_attention/pages.h"

namespace tessera {
namespace {

using Op = IndexTopkOperator;

cuda::IndexQueries describe(const Op& op, const KernelArgs& args, int64_t longest) {
  const IndexSpec& spec = op.spec();
  return {.dtype = args.in(Op::kQ).dtype,
          .num_tokens = args.in(Op::kQ).shape[0],
          .num_heads = static_cast<int>(spec.num_heads),
          .head_size = static_cast<int>(spec.head_size),
          .top_k = static_cast<int>(spec.top_k),
          .num_rows = args.in(Op::kKeys).shape[0],
          .longest = longest,
          .q = args.in(Op::kQ).data,
          .weights = args.in(Op::kWeights).data,
          .keys = args.in(Op::kKeys).data,
          .scores = reinterpret_cast<uint32_t*>(args.workspace.data()),
          .chosen = args.out(Op::kChosen).as<int32_t>()};
}

void index_topk(const IndexTopk& op, const KernelArgs& args) {
  const Tensor& bounds = args.in(IndexTopk::kCuSeqlens);
  cuda::IndexQueries call = describe(op, args, args.in(Op::kKeys).shape[0]);
  call.cu_seqlens = bounds.as<int32_t>();
  call.num_sequences = static_cast<int>(bounds.shape[0]) - 1;
  cuda::launch_index_topk(call, cuda::stream_of(args));
}

/// Entries of a sequence at most, of so many rows of keys.
int64_t longest_entries(KeptRows kept, int64_t num_rows, int64_t pages_per_sequence) {
  return kept == KeptRows::kPaged ? pages_per_sequence * kPageTokens : num_rows;
}

void index_topk_entries(const IndexTopkEntries& op, const KernelArgs& args) {
  const int64_t pages =
      op.kept() == KeptRows::kPaged ? args.in(IndexTopkEntries::kFirstKept + 1).shape[1] : 0;
  cuda::IndexQueries call =
      describe(op, args, longest_entries(op.kept(), args.in(Op::kKeys).shape[0], pages));
  call.entries = cuda::kept_tokens(op.kept(), args, IndexTopkEntries::kPositions,
                                   IndexTopkEntries::kFirstKept);
  call.rate = static_cast<int>(op.rate());
  cuda::launch_index_topk(call, cuda::stream_of(args));
}

void index_topk_cached(const IndexTopkCached& op, const KernelArgs& args) {
  cuda::IndexQueries call = describe(op, args, args.in(Op::kKeys).shape[0]);
  call.lengths = args.in(IndexTopkCached::kCacheLength).as<int32_t>();
  cuda::launch_index_topk(call, cuda::stream_of(args));
}

void index_topk_paged(const IndexTopkPaged& op, const KernelArgs& args) {
  using Paged = IndexTopkPaged;
  const Tensor& table = args.in(Paged::kPageTable);
  cuda::IndexQueries call = describe(op, args, table.shape[1] * kPageTokens);
  call.cu_seqlens = args.in(Paged::kCuSeqlens).as<int32_t>();
  call.num_sequences = static_cast<int>(table.shape[0]);
  call.lengths = args.in(Paged::kLengths).as<int32_t>();
  call.page_table = table.as<int32_t>();
  call.pages_per_sequence = static_cast<int>(table.shape[1]);
  cuda::launch_index_topk(call, cuda::stream_of(args));
}

int64_t scratch_bytes(const Op& op, std::span<const ValueType> inputs, int64_t longest) {
  const IndexSpec& spec = op.spec();
  cuda::check_limit(op, cuda::index_shared_bytes(spec.num_heads, spec.head_size),
                    cuda::kMostIndexSharedBytes, "bytes of a token's index queries");
  return std::min(inputs[Op::kQ].shape[0], cuda::kMostIndexBlocks) * longest *
         static_cast<int64_t>(sizeof(uint32_t));
}

template <typename Contiguous>
int64_t workspace_of_keys(const Contiguous& op, std::span<const ValueType> inputs) {
  return scratch_bytes(op, inputs, inputs[Op::kKeys].shape[0]);
}

int64_t entries_workspace(const IndexTopkEntries& op, std::span<const ValueType> inputs) {
  const int64_t pages =
      op.kept() == KeptRows::kPaged ? inputs[IndexTopkEntries::kFirstKept + 1].shape[1] : 0;
  return scratch_bytes(op, inputs, longest_entries(op.kept(), inputs[Op::kKeys].shape[0], pages));
}

int64_t paged_workspace(const IndexTopkPaged& op, std::span<const ValueType> inputs) {
  return scratch_bytes(op, inputs, inputs[IndexTopkPaged::kPageTable].shape[1] * kPageTokens);
}

}  // namespace

void add_index_topk_cuda(KernelTable& table) {
  add_kernel<IndexTopk>(table, index_topk, {.workspace = workspace_of_keys<IndexTopk>});
  for (const KeptRows kept : {KeptRows::kPacked, KeptRows::kCached, KeptRows::kPaged}) {
    add_kernel<IndexTopkEntries>(table, IndexTopkEntries::name_of(kept), index_topk_entries,
                                 {.workspace = entries_workspace});
  }
  add_kernel<IndexTopkCached>(table, index_topk_cached,
                              {.workspace = workspace_of_keys<IndexTopkCached>});
  add_kernel<IndexTopkPaged>(table, index_topk_paged, {.workspace = paged_workspace});
}

}  // namespace tessera

#include "ops/paged_attention/paged_attention.h"

#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/paged_attention/paged_attention_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using cuda::stream_of;
using Op = PagedAttention;

void page_write(const PageWrite& /*op*/, const Args<PageWrite>& args) {
  const Tensor& rows = args.in(PageWrite::kRows);
  const Tensor& cache = args.out(PageWrite::kCache);
  if (!cache) return;
  cuda::launch_page_write({.dtype = rows.dtype,
                           .num_rows = rows.shape[0],
                           .width = rows.shape[1],
                           .capacity = cache.shape[0],
                           .rows = rows.data,
                           .to = args.in(PageWrite::kCacheRows).as<int32_t>(),
                           .cache = cache.data},
                          stream_of(args));
}

/// Where the runs' results lie in scratch memory.
struct RunResults {
  RunResults(const AttentionSpec& spec, int64_t num_rows, int64_t pages_per_sequence) {
    const int64_t count = num_rows * spec.num_heads * cuda::paged_runs(pages_per_sequence);
    partials = layout.add<float>(count * spec.head_size_v);
    statistics = layout.add<float2>(count);
  }

  WorkspaceLayout layout;
  int64_t partials;
  int64_t statistics;
};

void paged_attention(const PagedAttention& op, const Args<PagedAttention>& args) {
  const AttentionSpec& spec = op.spec();
  const Tensor& q = args.in(Op::kQ);
  const Tensor& table = args.in(Op::kPageTable);
  const RunResults results(spec, q.shape[0], table.shape[1]);
  cuda::launch_paged_attention(
      {.dtype = q.dtype,
       .num_rows = q.shape[0],
       .num_sequences = static_cast<int>(table.shape[0]),
       .pages_per_sequence = static_cast<int>(table.shape[1]),
       .num_pages = static_cast<int>(args.in(Op::kKeyPages).shape[0] / kPageTokens),
       .num_heads = static_cast<int>(spec.num_heads),
       .num_kv_heads = static_cast<int>(spec.num_kv_heads),
       .head_size = static_cast<int>(spec.head_size),
       .head_size_v = static_cast<int>(spec.head_size_v),
       .scale = static_cast<float>(spec.scale),
       .window = spec.window,
       .chunk = spec.chunk,
       .q = q.data,
       .keys = args.in(Op::kKeyPages).data,
       .values = args.in(Op::kValuePages).data,
       .cu_seqlens = args.in(Op::kCuSeqlens).as<int32_t>(),
       .lengths = args.in(Op::kLengths).as<int32_t>(),
       .page_table = table.as<int32_t>(),
       .o = args.out(attention::kO).data,
       .lse = args.out(attention::kLse) ? args.out(attention::kLse).as<float>() : nullptr,
       .partials = workspace_part<float>(args.workspace, results.partials),
       .statistics = workspace_part<float2>(args.workspace, results.statistics)},
      stream_of(args));
}

int64_t paged_attention_workspace(const PagedAttention& op, std::span<const ValueType> inputs) {
  cuda::check_limit(op, op.spec().head_size, kMostPagedHeadSize, "values of a key");
  cuda::check_limit(op, op.spec().head_size_v, kMostPagedHeadSizeV, "values of a head");
  return RunResults(op.spec(), inputs[Op::kQ].shape[0], inputs[Op::kPageTable].shape[1])
      .layout.num_bytes();
}

}  // namespace

void add_paged_attention_cuda(KernelTable& table) {
  add_kernel<PageWrite>(table, page_write);
  add_kernel<PagedAttention>(table, paged_attention, {.workspace = paged_attention_workspace});
}

}  // namespace tessera

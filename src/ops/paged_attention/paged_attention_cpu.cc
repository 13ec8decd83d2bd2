#include "ops/paged_attention/paged_attention.h"

#include <cstring>

#include "ops/attention/attention_blocks.h"
#include "ops/attention/attention_kernels.h"
#include "ops/cpu_dispatch.h"
#include "ops/sequence_bounds.h"

namespace tessera {
namespace {

using namespace attention;
using Op = PagedAttention;

static_assert(kPageTokens % kKeyTile == 0, "pages are whole tiles, so that sums are those of rows");

void page_write(const PageWrite& op, const Args<PageWrite>& args) {
  const Tensor& rows = args.in(PageWrite::kRows);
  const Tensor& cache = args.out(PageWrite::kCache);
  if (!cache) return;
  const auto to = args.in(PageWrite::kCacheRows).span<int32_t>();
  const int64_t row_bytes = rows.shape[1] * dtype_size(rows.dtype);
  const auto* from = static_cast<const std::byte*>(rows.data);
  for (size_t i = 0; i < to.size(); ++i) {
    check_shape(op, to[i] >= -1 && to[i] < cache.shape[0], "row {} of a cache of {} rows", to[i],
                cache.shape[0]);
    if (to[i] < 0) continue;
    std::memcpy(static_cast<std::byte*>(cache.data) + to[i] * row_bytes,
                from + static_cast<int64_t>(i) * row_bytes, row_bytes);
  }
}

struct PagedInputs {
  std::span<const int32_t> bounds;
  std::span<const int32_t> lengths;
  std::span<const int32_t> table;
  int64_t pages_per_sequence;
  int64_t num_pages;
};

PagedInputs paged_inputs(const KernelArgs& args) {
  return {args.in(Op::kCuSeqlens).span<int32_t>(), args.in(Op::kLengths).span<int32_t>(),
          args.in(Op::kPageTable).span<int32_t>(), args.in(Op::kPageTable).shape[1],
          args.in(Op::kKeyPages).shape[0] / kPageTokens};
}

WorkList take_paged_work(const PagedAttention& op, const Shape& q, const Shape& table,
                         Carver& carver) {
  const int64_t parts = most_chunks(table[0], q[0], op.spec().chunk);
  return {parts, table[0] * table[1] + parts, q[0], block_positions(op), carver};
}

/// Adds the new tokens of one sequence and its keys, page by page, as sequences from number `next`
/// on: one for each chunk that new tokens are of.
void add_sequence(const PagedAttention& op, const PagedInputs& x, int64_t sequence, int64_t& next,
                  WorkList& work) {
  const int64_t first = x.bounds[sequence];
  const int64_t count = x.bounds[sequence + 1] - first;
  const int64_t length = x.lengths[sequence];
  if (count == 0) return;
  check_shape(op, count <= length && length <= x.pages_per_sequence * kPageTokens,
              "sequence {} has {} tokens; expected at least the {} new ones and at most {} pages "
              "of {}",
              sequence, length, count, x.pages_per_sequence, kPageTokens);
  const int64_t chunk = op.spec().chunk;
  const int64_t before = length - count;
  const int64_t from = first_seen(before, chunk);
  const int64_t own = next;
  for_each_chunk({.row_of_zero = first - before, .begin = before, .end = length}, chunk, own,
                 [&](const TokenSpan& part) {
                   work.add_queries(part);
                   next = part.sequence + 1;
                 });
  for (int64_t begin = from / kPageTokens * kPageTokens; begin < length; begin += kPageTokens) {
    const int64_t page = x.table[sequence * x.pages_per_sequence + begin / kPageTokens];
    check_shape(op, page >= 0 && page < x.num_pages, "page {} of sequence {}; there are {}", page,
                sequence, x.num_pages);
    const TokenSpan keys = {.row_of_zero = page * kPageTokens - begin,
                            .begin = std::max(begin, from),
                            .end = std::min(begin + kPageTokens, length)};
    const int64_t chunks_before = chunk > 0 ? (keys.begin - from) / chunk : 0;
    for_each_chunk(keys, chunk, own + chunks_before,
                   [&](const TokenSpan& part) { work.add_keys(part); });
  }
}

void clear_rows_after(const Tensor& o, const Tensor& lse, int64_t row) {
  const int64_t num_rows = o.shape[0];
  const int64_t row_bytes = o.shape[1] * dtype_size(o.dtype);
  std::memset(static_cast<std::byte*>(o.data) + row * row_bytes, 0, (num_rows - row) * row_bytes);
  for (int64_t head = 0; head < lse.shape[0]; ++head) {
    float* begin = lse.as<float>() + head * num_rows;
    std::fill(begin + row, begin + num_rows, 0.0F);
  }
}

void paged_attention(const PagedAttention& op, const KernelArgs& args) {
  const PagedInputs x = paged_inputs(args);
  const int64_t num_rows = args.in(Op::kQ).shape[0];
  check_shape(op, x.bounds.back() <= num_rows, "cu_seqlens ends at {}, after the {} rows",
              x.bounds.back(), num_rows);
  check_cu_seqlens(op, x.bounds, x.bounds.back());
  Carver carver(args.workspace.data());
  WorkList work = take_paged_work(op, args.in(Op::kQ).shape, args.in(Op::kPageTable).shape, carver);
  int64_t next = 0;
  for (int64_t s = 0; s < std::ssize(x.lengths); ++s) add_sequence(op, x, s, next, work);
  run_forward(make_forward_pass(op, args, work), args.workspace.subspan(carver.used()));
  clear_rows_after(args.out(attention::kO), args.out(attention::kLse), x.bounds.back());
}

int64_t paged_attention_workspace(const PagedAttention& op, std::span<const ValueType> inputs) {
  Carver counter(nullptr);
  take_paged_work(op, inputs[Op::kQ].shape, inputs[Op::kPageTable].shape, counter);
  return counter.used() + forward_scratch_bytes(op, inputs[Op::kQ].dtype);
}

}  // namespace

TESSERA_CPU_KERNELS(add_paged_attention_cpu, table) {
  add_kernel<PageWrite>(table, page_write);
  add_kernel<PagedAttention>(table, paged_attention, {.workspace = paged_attention_workspace});
}

}  // namespace tessera

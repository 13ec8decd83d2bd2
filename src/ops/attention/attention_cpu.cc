#include "ops/attention/attention_blocks.h"
#include "ops/attention/attention_kernels.h"
#include "ops/cpu_dispatch.h"
#include "ops/sequence_bounds.h"

namespace tessera {
namespace {

using namespace attention;

/// Work lists for `num_tokens` queries of sequences that are whole.
WorkList take_work(const AttentionOperator& op, int64_t num_tokens, int64_t num_sequences,
                   Carver& carver) {
  return {num_sequences, num_sequences, num_tokens, block_positions(op), carver};
}

std::span<std::byte> rest(const KernelArgs& args, const Carver& carver) {
  return args.workspace.subspan(carver.used());
}

/// The work of all tokens against all keys of their sequences.
WorkList whole_work(const AttentionOperator& op, std::span<const int32_t> cu_seqlens,
                    int64_t num_tokens, Carver& carver) {
  check_cu_seqlens(op, cu_seqlens, num_tokens);
  const auto num_sequences = static_cast<int64_t>(cu_seqlens.size()) - 1;
  WorkList work = take_work(op, num_tokens, num_sequences, carver);
  for_each_span(cu_seqlens, {0, num_tokens}, 0, [&](const TokenSpan& span) {
    work.add_queries(span);
    work.add_keys(span);
  });
  return work;
}

void attention_kernel(const Attention& op, const KernelArgs& args) {
  Carver carver(args.workspace.data());
  const WorkList work =
      whole_work(op, args.in(kForwardCuSeqlens).span<int32_t>(), args.in(kQ).shape[0], carver);
  run_forward(make_forward_pass(op, args, work), rest(args, carver));
}

void attention_cached_kernel(const AttentionCached& op, const KernelArgs& args) {
  const int64_t queries = args.in(kQ).shape[0];
  const int64_t capacity = args.in(kK).shape[0];
  const int64_t length = *args.in(kCacheLength).as<int32_t>();
  check_shape(op, queries <= length && length <= capacity,
              "cache_length = {} must be at least the {} new tokens and at most the capacity {}",
              length, queries, capacity);
  Carver carver(args.workspace.data());
  const int64_t chunk = op.spec().chunk;
  const int64_t before = length - queries;
  WorkList work = take_work(op, queries, most_chunks(1, queries, chunk), carver);
  for_each_chunk({.row_of_zero = -before, .begin = before, .end = length}, chunk, 0,
                 [&](const TokenSpan& part) { work.add_queries(part); });
  for_each_chunk({.begin = first_seen(before, chunk), .end = length}, chunk, 0,
                 [&](const TokenSpan& part) { work.add_keys(part); });
  run_forward(make_forward_pass(op, args, work), rest(args, carver));
}

void attention_backward_kernel(const AttentionBackward& op, const KernelArgs& args) {
  const int64_t num_tokens = args.in(kQ).shape[0];
  Carver carver(args.workspace.data());
  const WorkList work =
      whole_work(op, args.in(kBackwardCuSeqlens).span<int32_t>(), num_tokens, carver);
  const KeySums key_sums(op, num_tokens, carver);
  run_backward(make_backward_pass(op, args, work, key_sums), rest(args, carver));
}

/// Bytes of the work lists for `num_tokens` queries of whole sequences.
int64_t work_bytes(const AttentionOperator& op, int64_t num_tokens, int64_t num_sequences) {
  Carver counter(nullptr);
  take_work(op, num_tokens, num_sequences, counter);
  return counter.used();
}

}  // namespace

namespace attention {
inline namespace TESSERA_CPU_LEVEL {

ForwardPass make_forward_pass(const AttentionOperator& op, const KernelArgs& args,
                              const WorkList& work) {
  return {.op = op,
          .work = work,
          .q = args.in(kQ),
          .k = args.in(kK),
          .v = args.in(kV),
          .o = args.out(kO),
          .lse = std::ssize(args.outputs) > kLse ? args.out(kLse) : Tensor{}};
}

BackwardPass make_backward_pass(const AttentionOperator& op, const KernelArgs& args,
                                const WorkList& work, const KeySums& key_sums) {
  return {.op = op,
          .work = work,
          .q = args.in(kQ),
          .k = args.in(kK),
          .v = args.in(kV),
          .o = args.in(kSavedO),
          .lse = args.in(kSavedLse),
          .grad_o = args.in(kGradO),
          .grad_lse = std::ssize(args.inputs) > kGradLse ? args.in(kGradLse) : Tensor{},
          .grad_q = args.out(kGradQ),
          .grad_k = args.out(kGradK),
          .grad_v = args.out(kGradV),
          .key_sums = key_sums};
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace attention

namespace {

int64_t attention_workspace(const Attention& op, std::span<const ValueType> inputs) {
  return work_bytes(op, inputs[kQ].shape[0], inputs[kForwardCuSeqlens].shape[0] - 1) +
         forward_scratch_bytes(op, inputs[kQ].dtype);
}

int64_t attention_cached_workspace(const AttentionCached& op, std::span<const ValueType> inputs) {
  const int64_t queries = inputs[kQ].shape[0];
  return work_bytes(op, queries, most_chunks(1, queries, op.spec().chunk)) +
         forward_scratch_bytes(op, inputs[kQ].dtype);
}

int64_t attention_backward_workspace(const AttentionBackward& op,
                                     std::span<const ValueType> inputs) {
  Carver counter(nullptr);
  take_work(op, inputs[kQ].shape[0], inputs[kBackwardCuSeqlens].shape[0] - 1, counter);
  const KeySums counted(op, inputs[kQ].shape[0], counter);
  return counter.used() + backward_scratch_bytes(op, inputs[kQ].dtype);
}

}  // namespace

TESSERA_CPU_KERNELS(add_attention_cpu, table) {
  add_kernel<Attention>(table, attention_kernel, {.workspace = attention_workspace});
  add_kernel<AttentionCached>(table, attention_cached_kernel,
                              {.workspace = attention_cached_workspace});
  add_kernel<AttentionBackward>(table, attention_backward_kernel,
                                {.workspace = attention_backward_workspace});
}

}  // namespace tessera

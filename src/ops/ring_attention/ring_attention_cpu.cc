#include "ops/cpu_dispatch.h"
#include "ops/ring_attention/key_ring.h"
#include "ops/ring_attention/ring_attention.h"
#include "ops/ring_attention/ring_work.h"
#include "ops/sequence_bounds.h"

namespace tessera {
namespace {

using namespace attention;

/// Tokens whose sums wait between steps: none where there is one step.
int64_t waiting_tokens(const RingAttentionOperator& op) {
  return op.comm().size() == 1 ? 0 : op.tokens().tokens_per_rank();
}

/// The forward operator's scratch memory but for the threads' own.
struct ForwardMemory {
  ForwardMemory(const RingAttention& op, const Tensor& k, const Tensor& v, int64_t num_sequences,
                Carver& carver)
      : work(take_ring_work(op, op.tokens(), num_sequences, carver)),
        keys(op.comm(), k, v, carver),
        sums(op, waiting_tokens(op), carver) {}

  WorkList work;
  KeyRing keys;
  ForwardSums sums;
};

/// The backward operator's. Sums of this rank's own keys, found in the first step, are kept for
/// those of the other ranks to come.
struct BackwardMemory {
  BackwardMemory(const RingAttentionBackward& op, const Tensor& k, const Tensor& v,
                 int64_t num_sequences, Carver& carver)
      : work(take_ring_work(op, op.tokens(), num_sequences, carver)),
        keys(op.comm(), k, v, carver),
        own_sums(op, k.shape[0], carver),
        step_sums(op, waiting_tokens(op), carver),
        query_sums(take_query_sums(op, waiting_tokens(op), carver)),
        passed_sums(op.comm(), op, waiting_tokens(op), carver) {}

  WorkList work;
  KeyRing keys;
  KeySums own_sums;
  KeySums step_sums;
  float* query_sums;
  KeySumRing passed_sums;
};

Tensor sized_as(const ValueType& type) {
  return {nullptr, type.dtype, type.shape};
}

std::span<std::byte> rest(const KernelArgs& args, const Carver& carver) {
  return args.workspace.subspan(carver.used());
}

/// Throws UserError where sequences that are dealt out one by one cannot be cut into chunks.
void check_chunks(const RingAttentionOperator& op, std::span<const int32_t> cu_seqlens) {
  const int64_t chunks = 2 * op.tokens().ring;
  if (!op.tokens().by_sequence || op.tokens().ring == 1) return;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    const int64_t length = cu_seqlens[i] - cu_seqlens[i - 1];
    check_shape(op, length % chunks == 0,
                "sequence {} has {} tokens, expected a multiple of {} for {} ranks", i - 1, length,
                chunks, op.tokens().ring);
  }
}

void add_queries(WorkList& work, const RingAttentionOperator& op,
                 std::span<const int32_t> cu_seqlens) {
  check_cu_seqlens(op, cu_seqlens, op.tokens().num_tokens());
  check_chunks(op, cu_seqlens);
  for_each_span_of(op.tokens(), cu_seqlens, op.comm().rank(),
                   [&](const TokenSpan& span) { work.add_queries(span); });
}

void ring_attention_kernel(const RingAttention& ring, const KernelArgs& args) {
  const std::span<const int32_t> cu_seqlens = args.in(kForwardCuSeqlens).span<int32_t>();
  Carver carver(args.workspace.data());
  ForwardMemory memory(ring, args.in(kK), args.in(kV), std::ssize(cu_seqlens) - 1, carver);
  add_queries(memory.work, ring, cu_seqlens);
  ForwardPass pass = make_forward_pass(ring, args, memory.work);
  pass.sums = memory.sums;
  KeyRing& keys = memory.keys;
  pass.poll = [&] { keys.poll(); };
  for (;; keys.advance()) {
    keys.start_next();
    take_keys(memory.work, ring.tokens(), cu_seqlens, keys.source());
    pass.k = keys.k();
    pass.v = keys.v();
    pass.first = keys.step() == 0;
    pass.last = keys.is_last();
    run_forward(pass, rest(args, carver));
    if (pass.last) return;
  }
}

/// Writes the gradients of all keys and values of this rank.
void store_gradients(const BackwardPass& pass, const KeySums& sums, const KernelArgs& args) {
  constexpr int64_t kRows = 64;
  const int64_t num_tokens = args.in(kK).shape[0];
  const int64_t parts = (num_tokens + kRows - 1) / kRows;
#pragma omp parallel for schedule(static)
  for (int64_t item = 0; item < parts * pass.op.spec().num_kv_heads; ++item) {
    const int64_t begin = item % parts * kRows;
    store_key_gradients(pass.op, sums, item / parts, {begin, std::min(kRows, num_tokens - begin)},
                        args.out(kGradK), args.out(kGradV));
  }
}

/// All steps; leaves the sums for the rank's own keys, without the other ranks', in own_sums.
void run_backward_ring(const RingAttentionBackward& ring, BackwardMemory& memory,
                       std::span<const int32_t> cu_seqlens, BackwardPass pass,
                       std::span<std::byte> scratch) {
  KeyRing& keys = memory.keys;
  pass.poll = [&] {
    keys.poll();
    memory.passed_sums.poll();
  };
  for (;; keys.advance()) {
    if (keys.step() > 1) memory.passed_sums.start_receive();
    keys.start_next();
    take_keys(memory.work, ring.tokens(), cu_seqlens, keys.source());
    pass.k = keys.k();
    pass.v = keys.v();
    pass.first = keys.step() == 0;
    pass.last = keys.is_last();
    pass.key_sums = pass.first ? memory.own_sums : memory.step_sums;
    run_backward(pass, scratch);
    if (!pass.first) memory.passed_sums.pass_on(memory.step_sums);
    if (pass.last) return;
  }
}

void ring_attention_backward_kernel(const RingAttentionBackward& ring, const KernelArgs& args) {
  const std::span<const int32_t> cu_seqlens = args.in(kBackwardCuSeqlens).span<int32_t>();
  Carver carver(args.workspace.data());
  BackwardMemory memory(ring, args.in(kK), args.in(kV), std::ssize(cu_seqlens) - 1, carver);
  add_queries(memory.work, ring, cu_seqlens);
  BackwardPass pass = make_backward_pass(ring, args, memory.work, memory.own_sums);
  pass.query_sums = memory.query_sums;
  const bool several = ring.comm().size() > 1;
  if (several) pass.grad_k = pass.grad_v = {};
  run_backward_ring(ring, memory, cu_seqlens, pass, rest(args, carver));
  if (!several) return;
  memory.passed_sums.collect(memory.own_sums);
  store_gradients(pass, memory.own_sums, args);
}

/// Bytes of `Memory` for the inputs of `op`; input number `cu_seqlens` is cu_seqlens.
template <typename Memory, typename Op>
int64_t memory_bytes(const Op& op, std::span<const ValueType> inputs, int cu_seqlens) {
  Carver counter(nullptr);
  const Memory counted(op, sized_as(inputs[kK]), sized_as(inputs[kV]),
                       inputs[cu_seqlens].shape[0] - 1, counter);
  return counter.used();
}

int64_t ring_attention_workspace(const RingAttention& op, std::span<const ValueType> inputs) {
  return memory_bytes<ForwardMemory>(op, inputs, kForwardCuSeqlens) +
         forward_scratch_bytes(op, inputs[kQ].dtype);
}

int64_t ring_attention_backward_workspace(const RingAttentionBackward& op,
                                          std::span<const ValueType> inputs) {
  return memory_bytes<BackwardMemory>(op, inputs, kBackwardCuSeqlens) +
         backward_scratch_bytes(op, inputs[kQ].dtype);
}

}  // namespace

TESSERA_CPU_KERNELS(add_ring_attention_cpu, table) {
  add_kernel<RingAttention>(table, ring_attention_kernel, {.workspace = ring_attention_workspace});
  add_kernel<RingAttentionBackward>(table, ring_attention_backward_kernel,
                                    {.workspace = ring_attention_backward_workspace});
}

}  // namespace tessera

#include <algorithm>
#include <cmath>

#include "core/slice.h"
#include "ops/cpu_dispatch.h"
#include "ops/gated_delta/delta_rows.h"
#include "ops/kda/kda.h"
#include "ops/kda/kda_chunk.h"
#include "ops/kda/kda_chunk_grads.h"
#include "ops/sequence_bounds.h"
#include "ops/storage.h"

namespace tessera {
namespace {

int64_t num_chunks(int64_t tokens) {
  return (tokens + kKdaChunk - 1) / kKdaChunk;
}

float query_scale(const KdaSpec& spec) {
  return 1.0F / std::sqrt(static_cast<float>(spec.key_size));
}

/// Scratch memory of one worker.
struct KdaScratch {
  KdaChunk chunk;
  KdaChunkGrads grads;
  float* o = nullptr;           // [C, Dv]
  float* state = nullptr;       // [Dk, Dv]
  float* state_grad = nullptr;  // [Dk, Dv]
  float* states = nullptr;      // [chunks, Dk, Dv] before the chunks
  int64_t num_bytes = 0;
};

KdaScratch place_forward(const KdaSpec& spec, std::span<std::byte> memory) {
  WorkspaceLayout layout;
  KdaScratch scratch{.chunk = KdaChunk::place(spec, layout, memory)};
  scratch.o = workspace_part<float>(memory, layout.add<float>(kKdaChunk * spec.value_size));
  scratch.state = workspace_part<float>(memory, layout.add<float>(spec.key_size * spec.value_size));
  scratch.num_bytes = layout.num_bytes();
  return scratch;
}

KdaScratch place_backward(const KdaSpec& spec, int64_t tokens, std::span<std::byte> memory) {
  WorkspaceLayout layout;
  KdaScratch scratch{.chunk = KdaChunk::place(spec, layout, memory),
                     .grads = KdaChunkGrads::place(spec, layout, memory)};
  const int64_t state = spec.key_size * spec.value_size;
  scratch.state = workspace_part<float>(memory, layout.add<float>(state));
  scratch.state_grad = workspace_part<float>(memory, layout.add<float>(state));
  scratch.states = workspace_part<float>(
      memory, layout.add<float>(state * std::max<int64_t>(num_chunks(tokens), 1)));
  scratch.num_bytes = layout.num_bytes();
  return scratch;
}

/// The operands of either pass.
template <typename T>
struct KdaOperands {
  KdaSpec spec;
  const T* q;
  const T* k;
  const T* v;
  const float* decay;
  const float* beta;

  template <typename Op>
  static KdaOperands of(const Op& op, const Args<Op>& args) {
    return {.spec = op.spec(),
            .q = args.in(Op::kQ).template as<T>(),
            .k = args.in(Op::kK).template as<T>(),
            .v = args.in(Op::kV).template as<T>(),
            .decay = args.in(Op::kDecay).template as<float>(),
            .beta = args.in(Op::kBeta).template as<float>()};
  }

  int64_t key_stride() const { return spec.num_heads * spec.key_size; }
  int64_t value_stride() const { return spec.num_heads * spec.value_size; }
  int64_t key_at(int64_t token, int64_t head) const {
    return token * key_stride() + head * spec.key_size;
  }
  int64_t value_at(int64_t token, int64_t head) const {
    return token * value_stride() + head * spec.value_size;
  }

  /// The chunk's operands and the decays between its tokens.
  void read(KdaChunk& c, int64_t token, int64_t head) const {
    const int64_t at = key_at(token, head);
    read_unit_rows(c.q, c.q_inverse, q + at, key_stride(), c.count, c.key_size, query_scale(spec));
    read_unit_rows(c.k, c.k_inverse, k + at, key_stride(), c.count, c.key_size, 1.0F);
    read_rows(c.v, v + value_at(token, head), value_stride(), c.count, c.value_size);
    for (int64_t i = 0; i < c.count; ++i) {
      const float* g = decay + at + i * key_stride();
      simd::for_each_vector(c.key_size, [&](int64_t e, auto lanes) {
        simd::store(c.step + i * c.key_size + e, simd::exp(simd::load(g + e, lanes)), lanes);
      });
      c.beta[i] = beta[(token + i) * spec.num_heads + head];
    }
    c.decay_keys();
  }
};

/// One head of a sequence, from the state before its first token, which becomes that behind its
/// last.
template <typename T>
void run_head(const KdaOperands<T>& x, KdaScratch& scratch, IndexRange tokens, int64_t head,
              float* state, T* o) {
  KdaChunk& c = scratch.chunk;
  for (int64_t t = tokens.begin; t < tokens.end(); t += kKdaChunk) {
    c.count = std::min(kKdaChunk, tokens.end() - t);
    x.read(c, t, head);
    c.compare<true>();
    c.solve(state);
    c.write_outputs(state, scratch.o);
    c.advance(state);
    write_rows(o + x.value_at(t, head), scratch.o, x.value_stride(), c.count, c.value_size);
  }
}

void kda(const Kda& op, const Args<Kda>& args) {
  const KdaSpec& spec = op.spec();
  const Tensor& v = args.in(Kda::kV);
  const auto bounds = args.in(Kda::kCuSeqlens).span<int32_t>();
  check_cu_seqlens(op, bounds, v.shape[0]);
  const auto sequences = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t bytes = place_forward(spec, {}).num_bytes;
  with_storage(v.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = KdaOperands<T>::of(op, args);
    T* o = args.out(Kda::kO).as<T>();
    for_each_task(sequences * spec.num_heads, num_workers(sequences, spec.num_heads),
                  [&](int64_t task, int64_t worker) {
                    const int64_t s = task / spec.num_heads;
                    KdaScratch scratch =
                        place_forward(spec, args.workspace.subspan(worker * bytes, bytes));
                    std::fill_n(scratch.state, spec.key_size * spec.value_size, 0.0F);
                    run_head(operands, scratch, IndexRange{bounds[s], bounds[s + 1] - bounds[s]},
                             task % spec.num_heads, scratch.state, o);
                  });
  });
}

void kda_cached(const KdaCached& op, const Args<KdaCached>& args) {
  using Op = KdaCached;
  const KdaSpec& spec = op.spec();
  const Tensor& v = args.in(Op::kV);
  const IndexRange tokens{0, v.shape[0]};
  const bool is_first = *args.in(Op::kStart).as<int32_t>() == 0;
  const int64_t size = spec.key_size * spec.value_size;
  const int64_t bytes = place_forward(spec, {}).num_bytes;
  with_storage(v.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = KdaOperands<T>::of(op, args);
    T* o = args.out(Op::kO).as<T>();
    for_each_task(
        spec.num_heads, num_workers(1, spec.num_heads), [&](int64_t head, int64_t worker) {
          float* state = args.out(Op::kStates).as<float>() + head * size;
          if (is_first) std::fill_n(state, size, 0.0F);
          KdaScratch scratch = place_forward(spec, args.workspace.subspan(worker * bytes, bytes));
          run_head(operands, scratch, tokens, head, state, o);
        });
  });
}

/// Each token by itself.
void kda_batch(const KdaBatch& op, const Args<KdaBatch>& args) {
  const KdaSpec& spec = op.spec();
  const int64_t bytes = place_forward(spec, {}).num_bytes;
  with_storage(args.in(KdaBatch::kV).dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = KdaOperands<T>::of(op, args);
    T* o = args.out(KdaBatch::kO).template as<T>();
    run_texts(op, args, spec.num_heads, spec.key_size * spec.value_size, o,
              [&](const BatchRows& rows, int64_t head, float* state, int64_t worker) {
                KdaScratch scratch =
                    place_forward(spec, args.workspace.subspan(worker * bytes, bytes));
                for (int64_t t = rows.begin; t < rows.end; ++t)
                  run_head(operands, scratch, IndexRange{t, 1}, head, state, o);
              });
  });
}

template <typename T>
struct KdaGradients {
  const T* o;
  T* q;
  T* k;
  T* v;
  float* decay;
  float* beta;
};

/// The states before each chunk of a sequence, of one head.
template <typename T>
void keep_states(const KdaOperands<T>& x, KdaScratch& scratch, IndexRange tokens, int64_t head) {
  KdaChunk& c = scratch.chunk;
  const int64_t size = c.key_size * c.value_size;
  float* states = scratch.states;
  std::fill_n(scratch.state, size, 0.0F);
  for (int64_t t = tokens.begin; t < tokens.end(); t += kKdaChunk, states += size) {
    std::copy_n(scratch.state, size, states);
    c.count = std::min(kKdaChunk, tokens.end() - t);
    if (t + c.count == tokens.end()) break;
    x.read(c, t, head);
    c.compare<false>();
    c.solve(scratch.state);
    c.advance(scratch.state);
  }
}

template <typename T>
void run_chunk_backward(const KdaOperands<T>& x, const KdaGradients<T>& grads, KdaScratch& scratch,
                        int64_t token, int64_t head, const float* state) {
  KdaChunk& c = scratch.chunk;
  KdaChunkGrads& g = scratch.grads;
  const int64_t values = x.value_at(token, head);
  const int64_t keys = x.key_at(token, head);
  x.read(c, token, head);
  c.compare<true>();
  c.solve(state);
  read_rows(g.o, grads.o + values, x.value_stride(), c.count, c.value_size);
  g.run(c, state, scratch.state_grad);
  write_unit_grads(grads.q + keys, x.key_stride(),
                   {c.q, c.q_inverse, c.count, c.key_size, query_scale(x.spec)}, g.q);
  write_unit_grads(grads.k + keys, x.key_stride(), {c.k, c.k_inverse, c.count, c.key_size, 1.0F},
                   g.k);
  write_rows(grads.v + values, g.v, x.value_stride(), c.count, c.value_size);
  write_rows(grads.decay + keys, g.decay, x.key_stride(), c.count, c.key_size);
  for (int64_t i = 0; i < c.count; ++i)
    grads.beta[(token + i) * x.spec.num_heads + head] = g.beta[i];
}

template <typename T>
void run_head_backward(const KdaOperands<T>& x, const KdaGradients<T>& grads, KdaScratch& scratch,
                       IndexRange tokens, int64_t head) {
  const int64_t size = x.spec.key_size * x.spec.value_size;
  keep_states(x, scratch, tokens, head);
  std::fill_n(scratch.state_grad, size, 0.0F);
  for (int64_t chunk = num_chunks(tokens.count) - 1; chunk >= 0; --chunk) {
    const int64_t t = tokens.begin + chunk * kKdaChunk;
    scratch.chunk.count = std::min(kKdaChunk, tokens.end() - t);
    run_chunk_backward(x, grads, scratch, t, head, scratch.states + chunk * size);
  }
}

void kda_backward(const KdaBackward& op, const Args<KdaBackward>& args) {
  using Op = KdaBackward;
  const KdaSpec& spec = op.spec();
  const Tensor& v = args.in(Op::kV);
  const int64_t tokens = v.shape[0];
  const auto bounds = args.in(Op::kCuSeqlens).span<int32_t>();
  check_cu_seqlens(op, bounds, tokens);
  const auto sequences = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t bytes = place_backward(spec, tokens, {}).num_bytes;
  with_storage(v.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = KdaOperands<T>::of(op, args);
    const KdaGradients<T> grads{.o = args.in(Op::kGrad).as<T>(),
                                .q = args.out(Op::kGradQ).as<T>(),
                                .k = args.out(Op::kGradK).as<T>(),
                                .v = args.out(Op::kGradV).as<T>(),
                                .decay = args.out(Op::kGradDecay).as<float>(),
                                .beta = args.out(Op::kGradBeta).as<float>()};
    for_each_task(sequences * spec.num_heads, num_workers(sequences, spec.num_heads),
                  [&](int64_t task, int64_t worker) {
                    const int64_t s = task / spec.num_heads;
                    KdaScratch scratch =
                        place_backward(spec, tokens, args.workspace.subspan(worker * bytes, bytes));
                    run_head_backward(operands, grads, scratch,
                                      IndexRange{bounds[s], bounds[s + 1] - bounds[s]},
                                      task % spec.num_heads);
                  });
  });
}

int64_t sequences_of(std::span<const ValueType> inputs) {
  return inputs[Kda::kCuSeqlens].shape[0] - 1;
}

int64_t kda_workspace(const Kda& op, std::span<const ValueType> inputs) {
  return num_workers(sequences_of(inputs), op.spec().num_heads) *
         place_forward(op.spec(), {}).num_bytes;
}

/// Of a head at a time.
int64_t kda_cached_workspace(const KdaOperator& op, std::span<const ValueType> /*inputs*/) {
  return num_workers(1, op.spec().num_heads) * place_forward(op.spec(), {}).num_bytes;
}

int64_t kda_backward_workspace(const KdaBackward& op, std::span<const ValueType> inputs) {
  return num_workers(sequences_of(inputs), op.spec().num_heads) *
         place_backward(op.spec(), inputs[Kda::kV].shape[0], {}).num_bytes;
}

}  // namespace

TESSERA_CPU_KERNELS(add_kda_cpu, table) {
  add_kernel<Kda>(table, kda, {.workspace = kda_workspace});
  add_kernel<KdaCached>(table, kda_cached, {.workspace = kda_cached_workspace});
  add_kernel<KdaBatch>(table, kda_batch, {.workspace = kda_cached_workspace});
  add_kernel<KdaBackward>(table, kda_backward, {.workspace = kda_backward_workspace});
}

}  // namespace tessera

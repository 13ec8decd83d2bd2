#include "ops/gated_delta/gated_delta.h"

#include <algorithm>
#include <cmath>

#include "core/slice.h"
#include "ops/cpu_dispatch.h"
#include "ops/gated_delta/delta_chunk.h"
#include "ops/gated_delta/delta_chunk_grads.h"
#include "ops/gated_delta/delta_rows.h"
#include "ops/sequence_bounds.h"
#include "ops/storage.h"

namespace tessera {
namespace {

int64_t num_chunks(int64_t tokens) {
  return (tokens + kDeltaChunk - 1) / kDeltaChunk;
}

float query_scale(const GatedDeltaSpec& spec) {
  return 1.0F / std::sqrt(static_cast<float>(spec.key_size));
}

/// Scratch memory of one worker. `states`: of how many chunks the states before them are kept.
struct DeltaScratch {
  DeltaChunk chunk;
  DeltaChunkGrads grads;
  float* state = nullptr;       // [heads, Dk, Dv]
  float* state_grad = nullptr;  // [heads, Dk, Dv]
  float* states = nullptr;      // [heads, chunks, Dk, Dv]
  int64_t num_bytes = 0;
};

DeltaScratch place_forward(const GatedDeltaSpec& spec, std::span<std::byte> memory) {
  WorkspaceLayout layout;
  DeltaScratch scratch{.chunk = DeltaChunk::place(spec, layout, memory)};
  scratch.grads.o = workspace_part<float>(memory, layout.add<float>(kDeltaChunk * spec.value_size));
  scratch.state = workspace_part<float>(memory, layout.add<float>(spec.key_size * spec.value_size));
  scratch.num_bytes = layout.num_bytes();
  return scratch;
}

DeltaScratch place_backward(const GatedDeltaSpec& spec, int64_t tokens,
                            std::span<std::byte> memory) {
  WorkspaceLayout layout;
  DeltaScratch scratch{.chunk = DeltaChunk::place(spec, layout, memory),
                       .grads = DeltaChunkGrads::place(spec, layout, memory)};
  const int64_t group = spec.num_value_heads / spec.num_key_heads;
  const int64_t states = group * spec.key_size * spec.value_size;
  scratch.state = workspace_part<float>(memory, layout.add<float>(states));
  scratch.state_grad = workspace_part<float>(memory, layout.add<float>(states));
  scratch.states = workspace_part<float>(
      memory, layout.add<float>(states * std::max<int64_t>(num_chunks(tokens), 1)));
  scratch.num_bytes = layout.num_bytes();
  return scratch;
}

/// The operands of either pass.
template <typename T>
struct DeltaOperands {
  GatedDeltaSpec spec;
  const T* q;
  const T* k;
  const T* v;
  const float* decay;
  const float* beta;

  template <typename Op>
  static DeltaOperands of(const Op& op, const Args<Op>& args) {
    return {.spec = op.spec(),
            .q = args.in(Op::kQ).template as<T>(),
            .k = args.in(Op::kK).template as<T>(),
            .v = args.in(Op::kV).template as<T>(),
            .decay = args.in(Op::kDecay).template as<float>(),
            .beta = args.in(Op::kBeta).template as<float>()};
  }

  int64_t key_stride() const { return spec.num_key_heads * spec.key_size; }
  int64_t value_stride() const { return spec.num_value_heads * spec.value_size; }
  int64_t key_at(int64_t token, int64_t head) const {
    return token * key_stride() + head * spec.key_size;
  }
  int64_t value_at(int64_t token, int64_t head) const {
    return token * value_stride() + head * spec.value_size;
  }

  void read_keys(DeltaChunk& c, int64_t token, int64_t key_head) const {
    const int64_t at = key_at(token, key_head);
    read_unit_rows(c.q, c.q_inverse, q + at, key_stride(), c.count, c.key_size, query_scale(spec));
    read_unit_rows(c.k, c.k_inverse, k + at, key_stride(), c.count, c.key_size, 1.0F);
  }
  void read_values(DeltaChunk& c, int64_t token, int64_t head) const {
    read_rows(c.v, v + value_at(token, head), value_stride(), c.count, c.value_size);
    float sum = 0;
    for (int64_t i = 0; i < c.count; ++i) {
      const int64_t at = (token + i) * spec.num_value_heads + head;
      sum += decay[at];
      c.decay[i] = sum;
      c.beta[i] = beta[at];
    }
  }
};

/// One value head of a sequence, from the state before its first token, which becomes that behind
/// its last.
template <typename T>
void run_head(const DeltaOperands<T>& x, DeltaScratch& scratch, IndexRange tokens, int64_t head,
              float* state, T* o) {
  DeltaChunk& c = scratch.chunk;
  const int64_t key_head = head / (x.spec.num_value_heads / x.spec.num_key_heads);
  for (int64_t t = tokens.begin; t < tokens.end(); t += kDeltaChunk) {
    c.count = std::min(kDeltaChunk, tokens.end() - t);
    x.read_keys(c, t, key_head);
    x.read_values(c, t, head);
    c.solve(state);
    c.query(state);
    c.write_outputs(scratch.grads.o);
    c.advance(state);
    write_rows(o + x.value_at(t, head), scratch.grads.o, x.value_stride(), c.count, c.value_size);
  }
}

void gated_delta(const GatedDelta& op, const Args<GatedDelta>& args) {
  const GatedDeltaSpec& spec = op.spec();
  const Tensor& v = args.in(GatedDelta::kV);
  const auto bounds = args.in(GatedDelta::kCuSeqlens).span<int32_t>();
  check_cu_seqlens(op, bounds, v.shape[0]);
  const auto sequences = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t bytes = place_forward(spec, {}).num_bytes;
  with_storage(v.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = DeltaOperands<T>::of(op, args);
    T* o = args.out(GatedDelta::kO).as<T>();
    for_each_task(sequences * spec.num_value_heads, num_workers(sequences, spec.num_value_heads),
                  [&](int64_t task, int64_t worker) {
                    const int64_t s = task / spec.num_value_heads;
                    DeltaScratch scratch =
                        place_forward(spec, args.workspace.subspan(worker * bytes, bytes));
                    std::fill_n(scratch.state, spec.key_size * spec.value_size, 0.0F);
                    run_head(operands, scratch, IndexRange{bounds[s], bounds[s + 1] - bounds[s]},
                             task % spec.num_value_heads, scratch.state, o);
                  });
  });
}

void gated_delta_cached(const GatedDeltaCached& op, const Args<GatedDeltaCached>& args) {
  using Op = GatedDeltaCached;
  const GatedDeltaSpec& spec = op.spec();
  const Tensor& v = args.in(Op::kV);
  const IndexRange tokens{0, v.shape[0]};
  const bool is_first = *args.in(Op::kStart).as<int32_t>() == 0;
  const int64_t size = spec.key_size * spec.value_size;
  const int64_t bytes = place_forward(spec, {}).num_bytes;
  with_storage(v.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = DeltaOperands<T>::of(op, args);
    T* o = args.out(Op::kO).as<T>();
    for_each_task(spec.num_value_heads, num_workers(1, spec.num_value_heads),
                  [&](int64_t head, int64_t worker) {
                    float* state = args.out(Op::kStates).as<float>() + head * size;
                    if (is_first) std::fill_n(state, size, 0.0F);
                    DeltaScratch scratch =
                        place_forward(spec, args.workspace.subspan(worker * bytes, bytes));
                    run_head(operands, scratch, tokens, head, state, o);
                  });
  });
}

/// Each token by itself.
void gated_delta_batch(const GatedDeltaBatch& op, const Args<GatedDeltaBatch>& args) {
  const GatedDeltaSpec& spec = op.spec();
  const int64_t bytes = place_forward(spec, {}).num_bytes;
  with_storage(args.in(GatedDeltaBatch::kV).dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = DeltaOperands<T>::of(op, args);
    T* o = args.out(GatedDeltaBatch::kO).template as<T>();
    run_texts(op, args, spec.num_value_heads, spec.key_size * spec.value_size, o,
              [&](const BatchRows& rows, int64_t head, float* state, int64_t worker) {
                DeltaScratch scratch =
                    place_forward(spec, args.workspace.subspan(worker * bytes, bytes));
                for (int64_t t = rows.begin; t < rows.end; ++t)
                  run_head(operands, scratch, IndexRange{t, 1}, head, state, o);
              });
  });
}

template <typename T>
struct DeltaGradients {
  const T* o;
  T* q;
  T* k;
  T* v;
  float* decay;
  float* beta;
};

/// The states before each chunk of a sequence, of one value head.
template <typename T>
void keep_states(const DeltaOperands<T>& x, DeltaScratch& scratch, IndexRange tokens, int64_t head,
                 float* states) {
  DeltaChunk& c = scratch.chunk;
  const int64_t size = c.key_size * c.value_size;
  const int64_t key_head = head / (x.spec.num_value_heads / x.spec.num_key_heads);
  std::fill_n(scratch.state, size, 0.0F);
  for (int64_t t = tokens.begin; t < tokens.end(); t += kDeltaChunk, states += size) {
    std::copy_n(scratch.state, size, states);
    c.count = std::min(kDeltaChunk, tokens.end() - t);
    if (t + c.count == tokens.end()) break;
    x.read_keys(c, t, key_head);
    x.read_values(c, t, head);
    c.solve(scratch.state);
    c.advance(scratch.state);
  }
}

/// One value head of a chunk whose keys were read.
template <typename T>
void run_chunk_backward(const DeltaOperands<T>& x, const DeltaGradients<T>& grads,
                        DeltaScratch& scratch, int64_t token, int64_t head, const float* state,
                        float* state_grad) {
  DeltaChunk& c = scratch.chunk;
  DeltaChunkGrads& g = scratch.grads;
  const int64_t at = x.value_at(token, head);
  x.read_values(c, token, head);
  c.solve(state);
  c.query(state);
  read_rows(g.o, grads.o + at, x.value_stride(), c.count, c.value_size);
  g.run(c, state, state_grad);
  write_rows(grads.v + at, g.v, x.value_stride(), c.count, c.value_size);
  float sum = 0;
  for (int64_t i = c.count - 1; i >= 0; --i) {
    const int64_t gate = (token + i) * x.spec.num_value_heads + head;
    sum += g.decay[i];
    grads.decay[gate] = sum;
    grads.beta[gate] = g.beta[i];
  }
}

/// One key head of a sequence with the value heads that read it.
template <typename T>
void run_key_head_backward(const DeltaOperands<T>& x, const DeltaGradients<T>& grads,
                           DeltaScratch& scratch, IndexRange tokens, int64_t key_head) {
  DeltaChunk& c = scratch.chunk;
  DeltaChunkGrads& g = scratch.grads;
  const int64_t group = x.spec.num_value_heads / x.spec.num_key_heads;
  const int64_t size = c.key_size * c.value_size;
  const int64_t chunks = num_chunks(tokens.count);
  for (int64_t r = 0; r < group; ++r)
    keep_states(x, scratch, tokens, key_head * group + r, scratch.states + r * chunks * size);
  std::fill_n(scratch.state_grad, group * size, 0.0F);
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t t = tokens.begin + chunk * kDeltaChunk;
    c.count = std::min(kDeltaChunk, tokens.end() - t);
    x.read_keys(c, t, key_head);
    std::fill_n(g.q, c.count * c.key_size, 0.0F);
    std::fill_n(g.k, c.count * c.key_size, 0.0F);
    for (int64_t r = 0; r < group; ++r) {
      run_chunk_backward(x, grads, scratch, t, key_head * group + r,
                         scratch.states + (r * chunks + chunk) * size,
                         scratch.state_grad + r * size);
    }
    const int64_t at = x.key_at(t, key_head);
    write_unit_grads(grads.q + at, x.key_stride(),
                     {c.q, c.q_inverse, c.count, c.key_size, query_scale(x.spec)}, g.q);
    write_unit_grads(grads.k + at, x.key_stride(), {c.k, c.k_inverse, c.count, c.key_size, 1.0F},
                     g.k);
  }
}

void gated_delta_backward(const GatedDeltaBackward& op, const Args<GatedDeltaBackward>& args) {
  using Op = GatedDeltaBackward;
  const GatedDeltaSpec& spec = op.spec();
  const Tensor& v = args.in(Op::kV);
  const int64_t tokens = v.shape[0];
  const auto bounds = args.in(Op::kCuSeqlens).span<int32_t>();
  check_cu_seqlens(op, bounds, tokens);
  const auto sequences = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t bytes = place_backward(spec, tokens, {}).num_bytes;
  with_storage(v.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = DeltaOperands<T>::of(op, args);
    const DeltaGradients<T> grads{.o = args.in(Op::kGrad).as<T>(),
                                  .q = args.out(Op::kGradQ).as<T>(),
                                  .k = args.out(Op::kGradK).as<T>(),
                                  .v = args.out(Op::kGradV).as<T>(),
                                  .decay = args.out(Op::kGradDecay).as<float>(),
                                  .beta = args.out(Op::kGradBeta).as<float>()};
    for_each_task(sequences * spec.num_key_heads, num_workers(sequences, spec.num_key_heads),
                  [&](int64_t task, int64_t worker) {
                    const int64_t s = task / spec.num_key_heads;
                    DeltaScratch scratch =
                        place_backward(spec, tokens, args.workspace.subspan(worker * bytes, bytes));
                    run_key_head_backward(operands, grads, scratch,
                                          IndexRange{bounds[s], bounds[s + 1] - bounds[s]},
                                          task % spec.num_key_heads);
                  });
  });
}

int64_t sequences_of(std::span<const ValueType> inputs) {
  return inputs[GatedDelta::kCuSeqlens].shape[0] - 1;
}

int64_t gated_delta_workspace(const GatedDelta& op, std::span<const ValueType> inputs) {
  return num_workers(sequences_of(inputs), op.spec().num_value_heads) *
         place_forward(op.spec(), {}).num_bytes;
}

/// Of a head at a time.
int64_t gated_delta_cached_workspace(const GatedDeltaOperator& op,
                                     std::span<const ValueType> /*inputs*/) {
  return num_workers(1, op.spec().num_value_heads) * place_forward(op.spec(), {}).num_bytes;
}

int64_t gated_delta_backward_workspace(const GatedDeltaBackward& op,
                                       std::span<const ValueType> inputs) {
  return num_workers(sequences_of(inputs), op.spec().num_key_heads) *
         place_backward(op.spec(), inputs[GatedDelta::kV].shape[0], {}).num_bytes;
}

}  // namespace

TESSERA_CPU_KERNELS(add_gated_delta_cpu, table) {
  add_kernel<GatedDelta>(table, gated_delta, {.workspace = gated_delta_workspace});
  add_kernel<GatedDeltaCached>(table, gated_delta_cached,
                               {.workspace = gated_delta_cached_workspace});
  add_kernel<GatedDeltaBatch>(table, gated_delta_batch,
                              {.workspace = gated_delta_cached_workspace});
  add_kernel<GatedDeltaBackward>(table, gated_delta_backward,
                                 {.workspace = gated_delta_backward_workspace});
}

}  // namespace tessera

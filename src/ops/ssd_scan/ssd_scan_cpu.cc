#include <algorithm>
#include <cmath>

#include "core/slice.h"
#include "ops/batch_rows.h"
#include "ops/cpu_dispatch.h"
#include "ops/sequence_bounds.h"
#include "ops/simd.h"
#include "ops/ssd_scan/ssd_scan.h"
#include "ops/storage.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

/// Whatever the number of threads: each worker has scratch memory of its own.
constexpr int64_t kMaxSsdWorkers = 32;
/// Into how many parts a group's heads are cut at most, whose gradients of B and C are summed
/// apart.
constexpr int64_t kMaxSsdParts = 16;

int64_t num_ssd_workers(int64_t tasks) {
  return std::min(kMaxSsdWorkers, tasks);
}

int64_t num_ssd_parts(const SsdSpec& spec) {
  const int64_t parts = std::max<int64_t>(kMaxSsdParts / spec.num_groups, 1);
  return std::min(parts, spec.num_heads / spec.num_groups);
}

/// Calls run(task, worker) for all tasks, those of one worker in order.
template <typename Run>
void for_each_ssd_task(int64_t tasks, Run run) {
  const int64_t workers = num_ssd_workers(tasks);
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t worker = 0; worker < workers; ++worker) {
    for (int64_t task = worker; task < tasks; task += workers) run(task, worker);
  }
}

/// A token's step and what follows from it.
struct SsdStep {
  float size;       ///< d
  float decay;      ///< exp(-exp(A_log) d)
  float log_decay;  ///< -exp(A_log) d
  float slope;      ///< of the step by dt
};

/// One head's numbers.
struct SsdHead {
  float rate;  ///< -exp(A_log)
  float skip;  ///< D
  float bias;
  float min_step;
  float max_step;  ///< 0: none

  SsdStep step(float dt) const {
    const float x = dt + bias;
    SsdStep step{};
    step.size = std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x)));
    step.slope = 1.0F / (1.0F + std::exp(-x));
    if (step.size < min_step || (max_step > 0 && step.size > max_step)) {
      step.size = step.size < min_step ? min_step : max_step;
      step.slope = 0;
    }
    step.log_decay = rate * step.size;
    step.decay = std::exp(step.log_decay);
    return step;
  }
};

/// The operands of either pass.
template <typename T>
struct SsdOperands {
  SsdSpec spec;
  const T* x;
  const T* dt;
  const T* b;
  const T* c;
  const float* a_log;
  const float* skip;
  const float* bias;

  template <typename Op>
  static SsdOperands of(const Op& op, const Args<Op>& args) {
    return {.spec = op.spec(),
            .x = args.in(Op::kX).template as<T>(),
            .dt = args.in(Op::kDt).template as<T>(),
            .b = args.in(Op::kB).template as<T>(),
            .c = args.in(Op::kC).template as<T>(),
            .a_log = args.in(Op::kALog).template as<float>() + op.spec().first_head,
            .skip = args.in(Op::kD).template as<float>() + op.spec().first_head,
            .bias = args.in(Op::kDtBias).template as<float>() + op.spec().first_head};
  }

  int64_t group_of(int64_t head) const { return head / (spec.num_heads / spec.num_groups); }
  int64_t state_elements() const { return spec.state_size * spec.head_size; }
  int64_t x_at(int64_t token, int64_t head) const {
    return (token * spec.num_heads + head) * spec.head_size;
  }
  int64_t group_at(int64_t token, int64_t group) const {
    return (token * spec.num_groups + group) * spec.state_size;
  }
  SsdHead head(int64_t idx) const {
    return {.rate = -std::exp(a_log[idx]),
            .skip = skip[idx],
            .bias = bias[idx],
            .min_step = static_cast<float>(spec.min_step),
            .max_step = static_cast<float>(spec.max_step)};
  }
  SsdStep step(const SsdHead& head, int64_t token, int64_t idx) const {
    return head.step(static_cast<float>(dt[token * spec.num_heads + idx]));
  }
};

/// to [N, P] = decay · from + d B xᵀ; the two may be one.
template <typename T>
void advance_state(const SsdOperands<T>& in, const SsdStep& step, const T* b, const T* x,
                   const float* from, float* to) {
  const int64_t size = in.spec.head_size;
  for (int64_t n = 0; n < in.spec.state_size; ++n) {
    const float write = step.size * static_cast<float>(b[n]);
    const float* old = from + n * size;
    float* row = to + n * size;
    simd::for_each_vector(size, [&](int64_t p, auto lanes) {
      simd::store(row + p,
                  step.decay * simd::load(old + p, lanes) + write * simd::load(x + p, lanes),
                  lanes);
    });
  }
}

/// y = stateᵀ C + D x.
template <typename T>
void read_state(const SsdOperands<T>& in, float skip, const T* c, const T* x, const float* state,
                T* y) {
  const int64_t size = in.spec.head_size;
  simd::for_each_vector(size, [&](int64_t p, auto lanes) {
    simd::Vec sum = skip * simd::load(x + p, lanes);
    for (int64_t n = 0; n < in.spec.state_size; ++n)
      sum += static_cast<float>(c[n]) * simd::load(state + n * size + p, lanes);
    simd::store(y + p, sum, lanes);
  });
}

/// One head of a sequence, from the state before its first token, which becomes that behind its
/// last.
template <typename T>
void scan_head(const SsdOperands<T>& in, IndexRange tokens, int64_t idx, float* state, T* y) {
  const SsdHead head = in.head(idx);
  for (int64_t t = tokens.begin; t < tokens.end(); ++t) {
    const T* x = in.x + in.x_at(t, idx);
    const int64_t group_at = in.group_at(t, in.group_of(idx));
    advance_state(in, in.step(head, t, idx), in.b + group_at, x, state, state);
    read_state(in, head.skip, in.c + group_at, x, state, y + in.x_at(t, idx));
  }
}

void ssd_scan(const SsdScan& op, const Args<SsdScan>& args) {
  const Tensor& x = args.in(SsdScan::kX);
  const auto bounds = args.in(SsdScan::kCuSeqlens).span<int32_t>();
  check_cu_seqlens(op, bounds, x.shape[0]);
  const auto sequences = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t heads = op.spec().num_heads;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = SsdOperands<T>::of(op, args);
    const int64_t bytes = align_up(operands.state_elements() * dtype_size(DType::kF32));
    T* y = args.out(SsdScan::kY).as<T>();
    for_each_ssd_task(sequences * heads, [&](int64_t task, int64_t worker) {
      const int64_t s = task / heads;
      auto* const state = workspace_part<float>(args.workspace, worker * bytes);
      std::fill_n(state, operands.state_elements(), 0.0F);
      scan_head(operands, IndexRange{bounds[s], bounds[s + 1] - bounds[s]}, task % heads, state, y);
    });
  });
}

void ssd_scan_cached(const SsdScanCached& op, const Args<SsdScanCached>& args) {
  using Op = SsdScanCached;
  const Tensor& x = args.in(Op::kX);
  if (x.shape[0] == 0) return;
  const bool is_first = *args.in(Op::kStart).as<int32_t>() == 0;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = SsdOperands<T>::of(op, args);
    const int64_t elements = operands.state_elements();
    float* states = args.out(Op::kStates).as<float>();
    T* y = args.out(Op::kY).as<T>();
    for_each_ssd_task(op.spec().num_heads, [&](int64_t head, int64_t /*worker*/) {
      float* state = states + head * elements;
      if (is_first) std::fill_n(state, elements, 0.0F);
      scan_head(operands, IndexRange{0, x.shape[0]}, head, state, y);
    });
  });
}

void ssd_scan_batch(const SsdScanBatch& op, const Args<SsdScanBatch>& args) {
  using Op = SsdScanBatch;
  const Tensor& x = args.in(Op::kX);
  const std::vector<BatchRows> batch =
      read_batch_rows(op,
                      {.cu_seqlens = args.in(Op::kCuSeqlens).span<int32_t>(),
                       .lengths = args.in(Op::kLengths).span<int32_t>(),
                       .slots = args.in(Op::kSlots).span<int32_t>()},
                      x.shape[0], op.num_slots());
  const int64_t heads = op.spec().num_heads;
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = SsdOperands<T>::of(op, args);
    const int64_t elements = operands.state_elements();
    T* y = args.out(Op::kY).as<T>();
    for_each_ssd_task(std::ssize(batch) * heads, [&](int64_t task, int64_t /*worker*/) {
      const BatchRows& rows = batch[task / heads];
      const int64_t head = task % heads;
      float* state = args.out(Op::kStates).as<float>() + (rows.slot * heads + head) * elements;
      if (rows.is_first) std::fill_n(state, elements, 0.0F);
      scan_head(operands, IndexRange{rows.begin, rows.end - rows.begin}, head, state, y);
    });
    std::fill(y + end_of_rows(batch) * x.shape[1], y + x.num_elements(), T(0.0F));
  });
}

/// Scratch memory of one worker of the backward pass.
struct SsdScratch {
  float* kept = nullptr;        // [chunks, N, P]: states before the chunks
  float* states = nullptr;      // [kSsdChunk + 1, N, P]: before and behind a chunk's tokens
  float* state_grad = nullptr;  // [N, P]
  float* of_written = nullptr;  // [P]: gradient of d x
  int64_t num_bytes = 0;

  static SsdScratch place(const SsdSpec& spec, int64_t tokens, std::span<std::byte> memory) {
    WorkspaceLayout layout;
    const int64_t elements = spec.state_size * spec.head_size;
    const int64_t chunks = std::max<int64_t>((tokens + kSsdChunk - 1) / kSsdChunk, 1);
    SsdScratch scratch;
    const auto floats = [&](int64_t count) {
      return workspace_part<float>(memory, layout.add<float>(count));
    };
    scratch.kept = floats(chunks * elements);
    scratch.states = floats((kSsdChunk + 1) * elements);
    scratch.state_grad = floats(elements);
    scratch.of_written = floats(spec.head_size);
    scratch.num_bytes = layout.num_bytes();
    return scratch;
  }
};

/// Gradients, those of B and C of one part of each group's heads: F32 [T, G·N].
template <typename T>
struct SsdGradients {
  const T* y;
  T* x;
  T* dt;
  float* b;
  float* c;
};

/// What a head's tokens add to the gradients of its own numbers.
struct SsdHeadGrads {
  double a_log = 0;
  double skip = 0;
  double bias = 0;
};

/// Adds C dyᵀ to the state's gradient, adds to the gradients of B and C and gives that of d x;
/// then takes the state's gradient before the token. Returns the gradient of the decay's logarithm.
template <typename T>
float state_backward(const SsdOperands<T>& in, const SsdStep& step, int64_t token, int64_t idx,
                     const SsdGradients<T>& grads, SsdScratch& scratch, const float* states) {
  const int64_t size = in.spec.head_size;
  const int64_t group_at = in.group_at(token, in.group_of(idx));
  const T* x = in.x + in.x_at(token, idx);
  const T* dy = grads.y + in.x_at(token, idx);
  const float* behind = states + in.state_elements();
  std::fill_n(scratch.of_written, size, 0.0F);
  simd::Vec of_decay{};
  for (int64_t n = 0; n < in.spec.state_size; ++n) {
    const auto b = static_cast<float>(in.b[group_at + n]);
    const auto c = static_cast<float>(in.c[group_at + n]);
    float* grad = scratch.state_grad + n * size;
    simd::Vec of_b{};
    simd::Vec of_c{};
    simd::for_each_vector(size, [&](int64_t p, auto lanes) {
      const simd::Vec g = simd::load(dy + p, lanes);
      const simd::Vec total = simd::load(grad + p, lanes) + c * g;
      of_b += total * simd::load(x + p, lanes);
      of_c += g * simd::load(behind + n * size + p, lanes);
      of_decay += total * simd::load(states + n * size + p, lanes);
      simd::store(scratch.of_written + p, simd::load(scratch.of_written + p, lanes) + b * total,
                  lanes);
      simd::store(grad + p, step.decay * total, lanes);
    });
    grads.b[group_at + n] += step.size * simd::sum(of_b);
    grads.c[group_at + n] += simd::sum(of_c);
  }
  return step.decay * simd::sum(of_decay);
}

template <typename T>
void token_backward(const SsdOperands<T>& in, const SsdHead& head, int64_t token, int64_t idx,
                    const SsdGradients<T>& grads, SsdScratch& scratch, const float* states,
                    SsdHeadGrads& of_head) {
  const SsdStep step = in.step(head, token, idx);
  const float of_log = state_backward(in, step, token, idx, grads, scratch, states);
  const int64_t at = in.x_at(token, idx);
  simd::Vec of_step{};
  simd::Vec of_skip{};
  simd::for_each_vector(in.spec.head_size, [&](int64_t p, auto lanes) {
    const simd::Vec x = simd::load(in.x + at + p, lanes);
    const simd::Vec g = simd::load(grads.y + at + p, lanes);
    const simd::Vec of_written = simd::load(scratch.of_written + p, lanes);
    of_step += of_written * x;
    of_skip += g * x;
    simd::store(grads.x + at + p, step.size * of_written + head.skip * g, lanes);
  });
  const float of_dt = (simd::sum(of_step) + of_log * head.rate) * step.slope;
  grads.dt[token * in.spec.num_heads + idx] = T(of_dt);
  of_head.a_log += static_cast<double>(of_log * step.log_decay);
  of_head.skip += static_cast<double>(simd::sum(of_skip));
  of_head.bias += static_cast<double>(of_dt);
}

template <typename T>
void head_backward(const SsdOperands<T>& in, IndexRange tokens, int64_t idx,
                   const SsdGradients<T>& grads, SsdScratch& scratch, SsdHeadGrads& of_head) {
  const SsdHead head = in.head(idx);
  const int64_t elements = in.state_elements();
  const auto advance = [&](int64_t t, const float* from, float* to) {
    advance_state(in, in.step(head, t, idx), in.b + in.group_at(t, in.group_of(idx)),
                  in.x + in.x_at(t, idx), from, to);
  };
  float* state = scratch.states;
  std::fill_n(state, elements, 0.0F);
  for (int64_t t = tokens.begin; t < tokens.end(); ++t) {
    const int64_t done = t - tokens.begin;
    if (done % kSsdChunk == 0)
      std::copy_n(state, elements, scratch.kept + done / kSsdChunk * elements);
    advance(t, state, state);
  }
  std::fill_n(scratch.state_grad, elements, 0.0F);
  const int64_t chunks = (tokens.count + kSsdChunk - 1) / kSsdChunk;
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = tokens.begin + chunk * kSsdChunk;
    const int64_t count = std::min(kSsdChunk, tokens.end() - first);
    std::copy_n(scratch.kept + chunk * elements, elements, scratch.states);
    for (int64_t i = 0; i < count; ++i) {
      float* before = scratch.states + i * elements;
      advance(first + i, before, before + elements);
    }
    for (int64_t i = count - 1; i >= 0; --i)
      token_backward(in, head, first + i, idx, grads, scratch, scratch.states + i * elements,
                     of_head);
  }
}

/// Scratch memory of the backward pass: gradients of B and C by parts, then the workers'.
struct SsdBackwardMemory {
  float* b = nullptr;  // [parts, T, G·N]
  float* c = nullptr;
  int64_t worker_begin = 0;
  int64_t worker_bytes = 0;

  static SsdBackwardMemory place(const SsdSpec& spec, int64_t tokens, std::span<std::byte> memory) {
    WorkspaceLayout layout;
    const int64_t partials = num_ssd_parts(spec) * tokens * spec.num_groups * spec.state_size;
    SsdBackwardMemory result;
    result.b = workspace_part<float>(memory, layout.add<float>(partials));
    result.c = workspace_part<float>(memory, layout.add<float>(partials));
    result.worker_begin = layout.num_bytes();
    result.worker_bytes = SsdScratch::place(spec, tokens, {}).num_bytes;
    return result;
  }
};

/// The parts' sums in order.
template <typename T>
void sum_parts(const float* partials, int64_t parts, int64_t rows, int64_t width, T* to) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    simd::for_each_vector(width, [&](int64_t i, auto lanes) {
      simd::Vec total{};
      for (int64_t part = 0; part < parts; ++part)
        total += simd::load(partials + (part * rows + row) * width + i, lanes);
      simd::store(to + row * width + i, total, lanes);
    });
  }
}

/// Adds to the accumulators of one head's numbers, the one number `head` of the weights.
void add_head_grads(const Args<SsdScanBackward>& args, int64_t head, const SsdHeadGrads& grads) {
  using Op = SsdScanBackward;
  const auto add = [&](Op::Output output, double value) {
    const Tensor& sums = args.out(output);
    if (sums) sums.as<float>()[head] += static_cast<float>(value);
  };
  add(Op::kGradALog, grads.a_log);
  add(Op::kGradD, grads.skip);
  add(Op::kGradDtBias, grads.bias);
}

void ssd_scan_backward(const SsdScanBackward& op, const Args<SsdScanBackward>& args) {
  using Op = SsdScanBackward;
  const SsdSpec& spec = op.spec();
  const Tensor& x = args.in(Op::kX);
  const int64_t tokens = x.shape[0];
  const auto bounds = args.in(Op::kCuSeqlens).span<int32_t>();
  check_cu_seqlens(op, bounds, tokens);
  const int64_t width = spec.num_groups * spec.state_size;
  const int64_t parts = num_ssd_parts(spec);
  const int64_t group_heads = spec.num_heads / spec.num_groups;
  const auto memory = SsdBackwardMemory::place(spec, tokens, args.workspace);
  std::fill_n(memory.b, parts * tokens * width, 0.0F);
  std::fill_n(memory.c, parts * tokens * width, 0.0F);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto operands = SsdOperands<T>::of(op, args);
    for_each_ssd_task(spec.num_groups * parts, [&](int64_t task, int64_t worker) {
      const int64_t part = task % parts;
      const int64_t group_first = task / parts * group_heads;
      const SsdGradients<T> grads{.y = args.in(Op::kGrad).as<T>(),
                                  .x = args.out(Op::kGradX).as<T>(),
                                  .dt = args.out(Op::kGradDt).as<T>(),
                                  .b = memory.b + part * tokens * width,
                                  .c = memory.c + part * tokens * width};
      SsdScratch scratch = SsdScratch::place(
          spec, tokens, args.workspace.subspan(memory.worker_begin + worker * memory.worker_bytes));
      const int64_t end = group_first + group_heads * (part + 1) / parts;
      for (int64_t head = group_first + group_heads * part / parts; head < end; ++head) {
        SsdHeadGrads of_head;
        for (size_t s = 0; s + 1 < bounds.size(); ++s)
          head_backward(operands, IndexRange{bounds[s], bounds[s + 1] - bounds[s]}, head, grads,
                        scratch, of_head);
        add_head_grads(args, spec.first_head + head, of_head);
      }
    });
    sum_parts(memory.b, parts, tokens, width, args.out(Op::kGradB).as<T>());
    sum_parts(memory.c, parts, tokens, width, args.out(Op::kGradC).as<T>());
  });
}

int64_t ssd_scan_workspace(const SsdScan& op, std::span<const ValueType> inputs) {
  const SsdSpec& spec = op.spec();
  const int64_t sequences = inputs[SsdScan::kCuSeqlens].shape[0] - 1;
  return num_ssd_workers(sequences * spec.num_heads) *
         align_up(spec.state_size * spec.head_size * dtype_size(DType::kF32));
}

int64_t ssd_scan_backward_workspace(const SsdScanBackward& op, std::span<const ValueType> inputs) {
  const auto memory = SsdBackwardMemory::place(op.spec(), inputs[SsdScanBackward::kX].shape[0], {});
  return memory.worker_begin +
         num_ssd_workers(op.spec().num_groups * num_ssd_parts(op.spec())) * memory.worker_bytes;
}

}  // namespace

TESSERA_CPU_KERNELS(add_ssd_scan_cpu, table) {
  add_kernel<SsdScan>(table, ssd_scan, {.workspace = ssd_scan_workspace});
  add_kernel<SsdScanCached>(table, ssd_scan_cached);
  add_kernel<SsdScanBatch>(table, ssd_scan_batch);
  add_kernel<SsdScanBackward>(table, ssd_scan_backward, {.workspace = ssd_scan_backward_workspace});
}

}  // namespace tessera

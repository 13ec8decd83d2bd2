#include "ops/cuda/limits.h"
#include "ops/gated_delta/delta_args.h"
#include "ops/kda/kda.h"
#include "ops/kda/kda_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

cuda::DeltaSizes sizes_of(const KdaSpec& spec) {
  return {spec.num_heads, spec.num_heads, spec.key_size, spec.value_size};
}

/// What scratch memory is for.
enum class KdaPass { kForward, kCached, kBackward };

struct PlacedChunks {
  cuda::KdaChunks chunks;
  int64_t num_bytes = 0;
};

PlacedChunks place(const KdaSpec& spec, int64_t tokens, KdaPass pass, std::span<std::byte> memory) {
  WorkspaceLayout layout;
  const auto floats = [&](int64_t count) {
    return workspace_part<float>(memory, layout.add<float>(count));
  };
  const int64_t heads = spec.num_heads;
  const int64_t chunks = cuda::num_delta_chunks(tokens);
  const int64_t squares = chunks * heads * cuda::kDeltaSquare;
  const int64_t states = heads * spec.key_size * spec.value_size;
  const int64_t values = tokens * heads * spec.value_size;
  const int64_t keys = tokens * heads * spec.key_size;
  cuda::KdaChunks x{};
  x.marks = {.starts = workspace_part<int32_t>(memory, layout.add<int32_t>(tokens)),
             .q_inverse = floats(tokens * heads),
             .k_inverse = floats(tokens * heads),
             .sums = nullptr};
  for (float** part : {&x.sums, &x.q_kept, &x.k_kept, &x.k_rest}) *part = floats(keys);
  x.kept = floats(chunks * heads * spec.key_size);
  x.p = floats(squares);
  x.inverse = floats(squares);
  x.written = floats(values);
  if (pass == KdaPass::kForward) x.states = floats(states);
  if (pass == KdaPass::kBackward) {
    x.states = floats((chunks + 1) * states);
    x.a = floats(squares);
    x.state_grads = floats(chunks * states);
    x.of_right = floats(values);
    x.scaled = floats(heads * cuda::kDeltaRows * spec.value_size);
  }
  return {x, layout.num_bytes()};
}

struct PlacedFastKda {
  cuda::FastKda scratch;
  int64_t num_bytes = 0;
};

PlacedFastKda place_fast(const KdaSpec& spec, int64_t tokens, KdaPass pass,
                         std::span<std::byte> memory) {
  WorkspaceLayout layout;
  const auto floats = [&](int64_t count) {
    return workspace_part<float>(memory, layout.add<float>(count));
  };
  const auto rounded = [&](int64_t count) {
    return workspace_part<Bf16>(memory, layout.add<Bf16>(count));
  };
  const int64_t heads = spec.num_heads;
  const int64_t tasks = cuda::num_delta_chunks(tokens) * heads;
  const int64_t states = tasks * spec.key_size * spec.value_size;
  const int64_t values = tokens * heads * spec.value_size;
  const int64_t keys = tokens * heads * spec.key_size;
  cuda::FastKda x{};
  x.delta.starts = workspace_part<int32_t>(memory, layout.add<int32_t>(tokens));
  x.delta.factors =
      workspace_part<cuda::DeltaFactors>(memory, layout.add<cuda::DeltaFactors>(tasks));
  x.delta.inverse = rounded(tasks * cuda::kDeltaSquare);
  x.delta.p_inverse = rounded(tasks * cuda::kDeltaSquare);
  x.marks = {.starts = x.delta.starts,
             .q_inverse = floats(tokens * heads),
             .k_inverse = floats(tokens * heads),
             .sums = nullptr};
  x.sums = floats(keys);
  x.kept = floats(tasks * spec.key_size);
  for (void** part : {&x.q_kept, &x.k_kept, &x.k_rest}) *part = rounded(keys);
  if (pass == KdaPass::kBackward) {
    x.delta.states = rounded(states);
    x.delta.state_grads = rounded(states);
    x.delta.written = rounded(values);
    x.delta.of_right = rounded(values);
    x.a = floats(tasks * cuda::kDeltaSquare);
    x.p = floats(tasks * cuda::kDeltaSquare);
    for (float** part : {&x.of_q, &x.of_k}) *part = floats(keys);
    x.of_last = floats(tasks * spec.key_size);
  }
  return {x, layout.num_bytes()};
}

bool is_fast(const KdaSpec& spec, DType dtype) {
  return cuda::takes_fast_delta(dtype, spec.key_size, spec.value_size);
}

/// `states`: those that go on, or null.
void run_forward(const KdaSpec& spec, const cuda::DeltaOperands& x, const KernelArgs& args, void* o,
                 float* states) {
  const KdaPass pass = states == nullptr ? KdaPass::kForward : KdaPass::kCached;
  const cudaStream_t stream = cuda::stream_of(args);
  if (is_fast(spec, x.dtype)) {
    const PlacedFastKda placed = place_fast(spec, x.tokens, pass, args.workspace);
    cuda::launch_fast_kda(x, placed.scratch, o, states, stream);
    return;
  }
  PlacedChunks placed = place(spec, x.tokens, pass, args.workspace);
  if (states != nullptr) placed.chunks.states = states;
  cuda::launch_kda(x, placed.chunks, false, o, stream);
}

void kda(const Kda& op, const Args<Kda>& args) {
  run_forward(op.spec(), cuda::packed_delta_operands(sizes_of(op.spec()), args), args,
              args.out(Kda::kO).data, nullptr);
}

void kda_cached(const KdaCached& op, const Args<KdaCached>& args) {
  using Op = KdaCached;
  cuda::DeltaOperands x = cuda::delta_operands(sizes_of(op.spec()), args);
  x.start = args.in(Op::kStart).as<int32_t>();
  run_forward(op.spec(), x, args, args.out(Op::kO).data, args.out(Op::kStates).as<float>());
}

void kda_batch(const KdaBatch& op, const Args<KdaBatch>& args) {
  using Op = KdaBatch;
  const Tensor& lengths = args.in(Op::kLengths);
  cuda::launch_delta_batch({.x = cuda::delta_operands(sizes_of(op.spec()), args),
                            .bounds = args.in(Op::kCuSeqlens).as<int32_t>(),
                            .lengths = lengths.as<int32_t>(),
                            .slots = args.in(Op::kSlots).as<int32_t>(),
                            .num_sequences = static_cast<int>(lengths.shape[0]),
                            .num_slots = static_cast<int>(op.num_slots()),
                            .states = args.out(Op::kStates).as<float>(),
                            .o = args.out(Op::kO).data,
                            .decays_by_element = true},
                           cuda::stream_of(args));
}

void kda_backward(const KdaBackward& op, const Args<KdaBackward>& args) {
  using Op = KdaBackward;
  const cuda::DeltaOperands x = cuda::packed_delta_operands(sizes_of(op.spec()), args);
  const cuda::DeltaGrads grads = {.o = args.in(Op::kGrad).data,
                                  .q = args.out(Op::kGradQ).data,
                                  .k = args.out(Op::kGradK).data,
                                  .v = args.out(Op::kGradV).data,
                                  .decay = args.out(Op::kGradDecay).as<float>(),
                                  .beta = args.out(Op::kGradBeta).as<float>()};
  const cudaStream_t stream = cuda::stream_of(args);
  if (is_fast(op.spec(), x.dtype)) {
    const PlacedFastKda fast = place_fast(op.spec(), x.tokens, KdaPass::kBackward, args.workspace);
    return cuda::launch_fast_kda_backward(x, fast.scratch, grads, stream);
  }
  const PlacedChunks placed = place(op.spec(), x.tokens, KdaPass::kBackward, args.workspace);
  cuda::launch_kda(x, placed.chunks, true, nullptr, stream);
  cuda::launch_kda_backward(x, placed.chunks, grads, stream);
}

void check_limits(const KdaOperator& op, std::span<const ValueType> inputs) {
  constexpr int64_t kMaxGridRows = 65535;
  cuda::check_limit(op, op.spec().num_heads, kMaxGridRows, "heads");
  cuda::check_limit(op, inputs[Kda::kV].shape[0], INT32_MAX, "tokens");
}

template <KdaPass kPass>
int64_t workspace(const KdaOperator& op, std::span<const ValueType> inputs) {
  check_limits(op, inputs);
  const ValueType& v = inputs[Kda::kV];
  return is_fast(op.spec(), v.dtype) ? place_fast(op.spec(), v.shape[0], kPass, {}).num_bytes
                                     : place(op.spec(), v.shape[0], kPass, {}).num_bytes;
}

/// None; its limits are checked.
int64_t batch_workspace(const KdaBatch& op, std::span<const ValueType> inputs) {
  check_limits(op, inputs);
  cuda::check_limit(op, op.spec().key_size, cuda::kMostBatchKeySize, "values of a key");
  return 0;
}

}  // namespace

void add_kda_cuda(KernelTable& table) {
  add_kernel<Kda>(table, kda, {.workspace = workspace<KdaPass::kForward>});
  add_kernel<KdaCached>(table, kda_cached, {.workspace = workspace<KdaPass::kCached>});
  add_kernel<KdaBatch>(table, kda_batch, {.workspace = batch_workspace});
  add_kernel<KdaBackward>(table, kda_backward, {.workspace = workspace<KdaPass::kBackward>});
}

}  // namespace tessera

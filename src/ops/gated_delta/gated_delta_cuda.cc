#include "ops/cuda/limits.h"
#include "ops/gated_delta/delta_args.h"
#include "ops/gated_delta/gated_delta.h"
#include "ops/gated_delta/gated_delta_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

static_assert(cuda::kDeltaRows == kDeltaChunk && cuda::kDeltaUnitEps == kUnitEps);

cuda::DeltaSizes sizes_of(const GatedDeltaSpec& spec) {
  return {spec.num_key_heads, spec.num_value_heads, spec.key_size, spec.value_size};
}

/// What scratch memory is for.
enum class DeltaPass { kForward, kCached, kBackward };

cuda::DeltaMarks place_marks(const GatedDeltaSpec& spec, int64_t tokens, WorkspaceLayout& layout,
                             std::span<std::byte> memory) {
  const auto floats = [&](int64_t count) {
    return workspace_part<float>(memory, layout.add<float>(count));
  };
  return {.starts = workspace_part<int32_t>(memory, layout.add<int32_t>(tokens)),
          .q_inverse = floats(tokens * spec.num_key_heads),
          .k_inverse = floats(tokens * spec.num_key_heads),
          .sums = floats(tokens * spec.num_value_heads)};
}

struct PlacedDelta {
  cuda::ExactDelta scratch;
  int64_t num_bytes = 0;
};

PlacedDelta place_exact(const GatedDeltaSpec& spec, int64_t tokens, DeltaPass pass,
                        std::span<std::byte> memory) {
  WorkspaceLayout layout;
  const auto floats = [&](int64_t count) {
    return workspace_part<float>(memory, layout.add<float>(count));
  };
  const int64_t heads = spec.num_value_heads;
  const int64_t chunks = cuda::num_delta_chunks(tokens);
  const int64_t squares = chunks * heads * cuda::kDeltaSquare;
  const int64_t states = heads * spec.key_size * spec.value_size;
  const int64_t values = tokens * heads * spec.value_size;
  const int64_t keys = tokens * heads * spec.key_size;
  cuda::ExactDelta x{.marks = place_marks(spec, tokens, layout, memory)};
  x.inverse = floats(squares);
  x.p = floats(squares);
  x.written = floats(values);
  x.scaled = floats(2 * heads * cuda::kDeltaRows * spec.value_size);
  if (pass == DeltaPass::kForward) x.states = floats(states);
  if (pass == DeltaPass::kBackward) {
    x.states = floats((chunks + 1) * states);
    x.square = floats(squares);
    x.state_grads = floats(chunks * states);
    x.of_right = floats(values);
    x.of_q = floats(keys);
    x.of_k = floats(keys);
  }
  return {x, layout.num_bytes()};
}

struct PlacedFastDelta {
  cuda::FastDelta scratch;
  int64_t num_bytes = 0;
};

PlacedFastDelta place_fast(const GatedDeltaSpec& spec, int64_t tokens, DeltaPass pass,
                           std::span<std::byte> memory) {
  WorkspaceLayout layout;
  const auto values = [&](int64_t count) {
    return workspace_part<Bf16>(memory, layout.add<Bf16>(count));
  };
  const int64_t heads = spec.num_value_heads;
  const int64_t chunks = cuda::num_delta_chunks(tokens);
  cuda::FastDelta x{};
  x.starts = workspace_part<int32_t>(memory, layout.add<int32_t>(tokens));
  x.factors =
      workspace_part<cuda::DeltaFactors>(memory, layout.add<cuda::DeltaFactors>(chunks * heads));
  x.inverse = values(chunks * heads * cuda::kDeltaSquare);
  x.p_inverse = values(chunks * heads * cuda::kDeltaSquare);
  if (pass == DeltaPass::kBackward) {
    x.states = values(chunks * heads * spec.key_size * spec.value_size);
    x.state_grads = values(chunks * heads * spec.key_size * spec.value_size);
    x.written = values(tokens * heads * spec.value_size);
    x.of_right = values(tokens * heads * spec.value_size);
    if (heads > spec.num_key_heads)
      x.totals = workspace_part<float>(memory, layout.add<float>(3 * cuda::kDeltaFinishBlocks *
                                                                 cuda::kDeltaRows * spec.key_size));
  }
  return {x, layout.num_bytes()};
}

bool is_fast(const GatedDeltaSpec& spec, DType dtype) {
  return cuda::takes_fast_delta(dtype, spec.key_size, spec.value_size);
}

/// `states`: those that go on, or null.
void run_forward(const GatedDeltaSpec& spec, const cuda::DeltaOperands& x, const KernelArgs& args,
                 void* o, float* states) {
  const DeltaPass pass = states == nullptr ? DeltaPass::kForward : DeltaPass::kCached;
  const cudaStream_t stream = cuda::stream_of(args);
  if (is_fast(spec, x.dtype)) {
    const PlacedFastDelta placed = place_fast(spec, x.tokens, pass, args.workspace);
    const int num_sms = cuda::context_of(args).num_sms();
    cuda::launch_fast_delta(x, placed.scratch, {.o = o, .states = states, .num_sms = num_sms},
                            stream);
    return;
  }
  PlacedDelta placed = place_exact(spec, x.tokens, pass, args.workspace);
  if (states != nullptr) placed.scratch.states = states;
  cuda::launch_exact_delta(x, placed.scratch, false, o, stream);
}

void gated_delta(const GatedDelta& op, const Args<GatedDelta>& args) {
  run_forward(op.spec(), cuda::packed_delta_operands(sizes_of(op.spec()), args), args,
              args.out(GatedDelta::kO).data, nullptr);
}

void gated_delta_cached(const GatedDeltaCached& op, const Args<GatedDeltaCached>& args) {
  using Op = GatedDeltaCached;
  cuda::DeltaOperands x = cuda::delta_operands(sizes_of(op.spec()), args);
  x.start = args.in(Op::kStart).as<int32_t>();
  run_forward(op.spec(), x, args, args.out(Op::kO).data, args.out(Op::kStates).as<float>());
}

void gated_delta_batch(const GatedDeltaBatch& op, const Args<GatedDeltaBatch>& args) {
  using Op = GatedDeltaBatch;
  const Tensor& lengths = args.in(Op::kLengths);
  cuda::launch_delta_batch({.x = cuda::delta_operands(sizes_of(op.spec()), args),
                            .bounds = args.in(Op::kCuSeqlens).as<int32_t>(),
                            .lengths = lengths.as<int32_t>(),
                            .slots = args.in(Op::kSlots).as<int32_t>(),
                            .num_sequences = static_cast<int>(lengths.shape[0]),
                            .num_slots = static_cast<int>(op.num_slots()),
                            .states = args.out(Op::kStates).as<float>(),
                            .o = args.out(Op::kO).data},
                           cuda::stream_of(args));
}

void gated_delta_backward(const GatedDeltaBackward& op, const Args<GatedDeltaBackward>& args) {
  using Op = GatedDeltaBackward;
  const cuda::DeltaOperands x = cuda::packed_delta_operands(sizes_of(op.spec()), args);
  const cuda::DeltaGrads grads = {.o = args.in(Op::kGrad).data,
                                  .q = args.out(Op::kGradQ).data,
                                  .k = args.out(Op::kGradK).data,
                                  .v = args.out(Op::kGradV).data,
                                  .decay = args.out(Op::kGradDecay).as<float>(),
                                  .beta = args.out(Op::kGradBeta).as<float>()};
  const cudaStream_t stream = cuda::stream_of(args);
  if (is_fast(op.spec(), x.dtype)) {
    const auto placed = place_fast(op.spec(), x.tokens, DeltaPass::kBackward, args.workspace);
    cuda::launch_fast_delta_backward(x, placed.scratch, grads, cuda::context_of(args).num_sms(),
                                     stream);
    return;
  }
  const auto placed = place_exact(op.spec(), x.tokens, DeltaPass::kBackward, args.workspace);
  cuda::launch_exact_delta(x, placed.scratch, true, nullptr, stream);
  cuda::launch_exact_delta_backward(x, placed.scratch, grads, stream);
}

template <DeltaPass kPass>
int64_t workspace(const GatedDeltaOperator& op, std::span<const ValueType> inputs) {
  constexpr int64_t kMaxGridRows = 65535;
  const int64_t tokens = inputs[GatedDelta::kV].shape[0];
  cuda::check_limit(op, op.spec().num_value_heads, kMaxGridRows, "value heads");
  cuda::check_limit(op, tokens, INT32_MAX, "tokens");
  return is_fast(op.spec(), inputs[GatedDelta::kV].dtype)
             ? place_fast(op.spec(), tokens, kPass, {}).num_bytes
             : place_exact(op.spec(), tokens, kPass, {}).num_bytes;
}

/// None; its limits are checked.
int64_t batch_workspace(const GatedDeltaBatch& op, std::span<const ValueType> inputs) {
  constexpr int64_t kMaxGridRows = 65535;
  cuda::check_limit(op, op.spec().num_value_heads, kMaxGridRows, "value heads");
  cuda::check_limit(op, op.spec().key_size, cuda::kMostBatchKeySize, "values of a key");
  cuda::check_limit(op, inputs[GatedDeltaBatch::kV].shape[0], INT32_MAX, "tokens");
  return 0;
}

}  // namespace

void add_gated_delta_cuda(KernelTable& table) {
  add_kernel<GatedDelta>(table, gated_delta, {.workspace = workspace<DeltaPass::kForward>});
  add_kernel<GatedDeltaCached>(table, gated_delta_cached,
                               {.workspace = workspace<DeltaPass::kCached>});
  add_kernel<GatedDeltaBatch>(table, gated_delta_batch, {.workspace = batch_workspace});
  add_kernel<GatedDeltaBackward>(table, gated_delta_backward,
                                 {.workspace = workspace<DeltaPass::kBackward>});
}

}  // namespace tessera

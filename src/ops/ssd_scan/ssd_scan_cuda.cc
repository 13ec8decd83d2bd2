#include "ops/cuda/limits.h"
#include "ops/cuda/row_args.h"
#include "ops/ssd_scan/ssd_dual.h"
#include "ops/ssd_scan/ssd_scan.h"
#include "ops/ssd_scan/ssd_scan_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

template <typename Op>
cuda::SsdRows describe(const SsdSpec& spec, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  return {.dtype = x.dtype,
          .tokens = static_cast<int>(x.shape[0]),
          .heads = static_cast<int>(spec.num_heads),
          .groups = static_cast<int>(spec.num_groups),
          .head_size = static_cast<int>(spec.head_size),
          .state_size = static_cast<int>(spec.state_size),
          .min_step = static_cast<float>(spec.min_step),
          .max_step = static_cast<float>(spec.max_step),
          .x = x.data,
          .dt = args.in(Op::kDt).data,
          .b = args.in(Op::kB).data,
          .c = args.in(Op::kC).data,
          .a_log = args.in(Op::kALog).template as<float>() + spec.first_head,
          .skip = args.in(Op::kD).template as<float>() + spec.first_head,
          .dt_bias = args.in(Op::kDtBias).template as<float>() + spec.first_head};
}

template <typename Op>
cuda::SsdRows describe_packed(const SsdSpec& spec, const Args<Op>& args) {
  const Tensor& bounds = args.in(Op::kCuSeqlens);
  cuda::SsdRows x = describe(spec, args);
  x.bounds = bounds.template as<int32_t>();
  x.num_sequences = static_cast<int>(bounds.shape[0] - 1);
  return x;
}

struct PlacedSsd {
  cuda::SsdMarks marks{};
  cuda::SsdBackward backward{};
  int64_t num_bytes = 0;
};

PlacedSsd place(const SsdSpec& spec, int64_t tokens, bool is_backward,
                std::span<std::byte> memory) {
  WorkspaceLayout layout;
  const auto floats = [&](int64_t count) {
    return workspace_part<float>(memory, layout.add<float>(count));
  };
  const int64_t chunks = cuda::num_ssd_chunks(tokens);
  const int64_t states = chunks * spec.num_heads * spec.state_size * spec.head_size;
  const int64_t rows = tokens * spec.num_heads;
  PlacedSsd placed;
  placed.marks = {.steps = floats(rows),
                  .decays = floats(rows),
                  .chunk_decays = floats(chunks * spec.num_heads),
                  .states = floats(states)};
  if (is_backward) {
    placed.backward = {.state_grads = floats(states),
                       .of_heads = floats(rows * spec.state_size),
                       .chunk_ends = floats(chunks * spec.num_heads),
                       .reads = floats(rows),
                       .writes = floats(rows),
                       .skips = floats(rows),
                       .partials = workspace_part<float>(
                           memory, layout.add<std::byte>(cuda::column_sums_bytes(spec.num_heads)))};
  }
  placed.num_bytes = layout.num_bytes();
  return placed;
}

struct PlacedDual {
  cuda::SsdDual scratch{};
  cuda::SsdDualBackward backward{};
  int64_t num_bytes = 0;
};

/// Lays out the dual form's scratch memory.
class DualLayout {
 public:
  DualLayout(const SsdSpec& spec, int64_t tokens, std::span<std::byte> memory)
      : sizes_(cuda::ssd_dual_sizes(
            tokens, static_cast<int>(spec.num_heads), static_cast<int>(spec.num_groups),
            static_cast<int>(spec.head_size), static_cast<int>(spec.state_size))),
        heads_(spec.num_heads),
        groups_(spec.num_groups),
        memory_(memory) {}

  cuda::SsdDual forward() {
    cuda::SsdDual x{};
    x.starts = part<int32_t>(sizes_.chunks * int64_t{cuda::kSsdRows});
    for (float** rows : {&x.steps, &x.sums, &x.reads, &x.ends, &x.writes}) *rows = chunk_rows();
    x.kept = part<float>(sizes_.chunks * heads_);
    x.products = part<float>(sizes_.chunks * groups_ * cuda::kSsdTriangle);
    x.segment = part<float>(int64_t{sizes_.segments} * sizes_.slices * sizes_.state_values);
    x.segment_kept = part<float>(sizes_.segments * heads_);
    x.states = states();
    return x;
  }
  cuda::SsdDualBackward backward() {
    cuda::SsdDualBackward x{};
    x.turned = part<float>(sizes_.chunks * groups_ * cuda::kSsdTriangle);
    x.state_grads = states();
    x.joined = part<float>(int64_t{sizes_.chunks} * sizes_.slices);
    for (float** rows : {&x.read_dots, &x.write_dots, &x.row_sums, &x.column_sums, &x.skips})
      *rows = chunk_rows();
    const int64_t blocks = int64_t{sizes_.chunks} * sizes_.all_blocks;
    x.squares = part<float>(blocks * cuda::kSsdTriangle);
    x.of_b = part<float>(blocks * cuda::kSsdRows * sizes_.state_rows);
    x.of_c = part<float>(blocks * cuda::kSsdRows * sizes_.state_rows);
    for (float** terms : {&x.of_a_log, &x.of_skip, &x.of_bias})
      *terms = part<float>(sizes_.chunks * heads_);
    x.partials = part<float>(cuda::column_sums_bytes(heads_) / dtype_size(DType::kF32));
    return x;
  }
  int64_t num_bytes() const { return layout_.num_bytes(); }

 private:
  template <typename T>
  T* part(int64_t count) {
    return workspace_part<T>(memory_, layout_.add<T>(count));
  }
  float* chunk_rows() { return part<float>(sizes_.chunks * heads_ * cuda::kSsdRows); }
  void* states() {
    return part<Bf16>(int64_t{sizes_.chunks} * sizes_.slices * sizes_.state_values);
  }

  cuda::SsdDualSizes sizes_;
  int64_t heads_;
  int64_t groups_;
  std::span<std::byte> memory_;
  WorkspaceLayout layout_;
};

PlacedDual place_dual(const SsdSpec& spec, int64_t tokens, bool is_backward,
                      std::span<std::byte> memory) {
  DualLayout layout(spec, tokens, memory);
  PlacedDual placed;
  placed.scratch = layout.forward();
  if (is_backward) placed.backward = layout.backward();
  placed.num_bytes = layout.num_bytes();
  return placed;
}

constexpr int64_t kMaxGridRows = 65535;

bool is_dual(const SsdSpec& spec, DType dtype) {
  const int64_t slices = (spec.head_size + cuda::kSsdSlice - 1) / cuda::kSsdSlice;
  return cuda::takes_ssd_dual(dtype, spec.head_size, spec.state_size) &&
         spec.num_heads * slices <= kMaxGridRows;
}

void ssd_scan(const SsdScan& op, const Args<SsdScan>& args) {
  const cuda::SsdRows x = describe_packed(op.spec(), args);
  if (is_dual(op.spec(), x.dtype)) {
    const PlacedDual placed = place_dual(op.spec(), x.tokens, false, args.workspace);
    cuda::launch_ssd_dual(x, placed.scratch, args.out(SsdScan::kY).data, cuda::stream_of(args));
    return;
  }
  cuda::launch_ssd_scan(x, place(op.spec(), x.tokens, false, args.workspace).marks,
                        args.out(SsdScan::kY).data, cuda::stream_of(args));
}

void ssd_scan_cached(const SsdScanCached& op, const Args<SsdScanCached>& args) {
  using Op = SsdScanCached;
  cuda::SsdRows x = describe(op.spec(), args);
  x.start = args.in(Op::kStart).as<int32_t>();
  cuda::launch_ssd_scan_cached(x, place(op.spec(), x.tokens, false, args.workspace).marks,
                               args.out(Op::kY).data, args.out(Op::kStates).as<float>(),
                               cuda::stream_of(args));
}

void ssd_scan_batch(const SsdScanBatch& op, const Args<SsdScanBatch>& args) {
  using Op = SsdScanBatch;
  cuda::launch_ssd_scan_batch({.x = describe_packed(op.spec(), args),
                               .lengths = args.in(Op::kLengths).as<int32_t>(),
                               .slots = args.in(Op::kSlots).as<int32_t>(),
                               .num_slots = static_cast<int>(op.num_slots()),
                               .y = args.out(Op::kY).data,
                               .states = args.out(Op::kStates).as<float>()},
                              cuda::stream_of(args));
}

void ssd_scan_backward(const SsdScanBackward& op, const Args<SsdScanBackward>& args) {
  using Op = SsdScanBackward;
  const cuda::SsdRows x = describe_packed(op.spec(), args);
  const auto of_heads = [&](Op::Output output) {
    return cuda::accumulator_of_rows(args, args.out(output),
                                     {op.spec().first_head, op.spec().num_heads});
  };
  const cuda::SsdGrads grads = {.y = args.in(Op::kGrad).data,
                                .x = args.out(Op::kGradX).data,
                                .dt = args.out(Op::kGradDt).data,
                                .b = args.out(Op::kGradB).data,
                                .c = args.out(Op::kGradC).data,
                                .a_log = of_heads(Op::kGradALog),
                                .skip = of_heads(Op::kGradD),
                                .dt_bias = of_heads(Op::kGradDtBias),
                                .num_sms = cuda::context_of(args).num_sms()};
  if (is_dual(op.spec(), x.dtype)) {
    const PlacedDual placed = place_dual(op.spec(), x.tokens, true, args.workspace);
    cuda::launch_ssd_dual_backward(x, placed.scratch, placed.backward, grads,
                                   cuda::stream_of(args));
    return;
  }
  const PlacedSsd placed = place(op.spec(), x.tokens, true, args.workspace);
  cuda::launch_ssd_scan_backward(x, placed.marks, placed.backward, grads, cuda::stream_of(args));
}

void check_ssd_limits(const SsdOperator& op, std::span<const ValueType> inputs) {
  const SsdSpec& spec = op.spec();
  const int64_t tokens = inputs[SsdScan::kX].shape[0];
  cuda::check_limit(op, spec.num_heads, kMaxGridRows, "heads");
  cuda::check_limit(op, spec.head_size, cuda::kMaxSsdWidth, "elements of a head");
  cuda::check_limit(op, spec.state_size, cuda::kMaxSsdWidth, "numbers of an element's state");
  cuda::check_limit(op, tokens * spec.num_groups, INT32_MAX, "tokens of groups");
}

enum class SsdPassKind { kForward, kBackward, kCached };

template <SsdPassKind kPass>
int64_t ssd_workspace(const SsdOperator& op, std::span<const ValueType> inputs) {
  check_ssd_limits(op, inputs);
  const SsdSpec& spec = op.spec();
  const int64_t tokens = inputs[SsdScan::kX].shape[0];
  constexpr bool kBackward = kPass == SsdPassKind::kBackward;
  return kPass != SsdPassKind::kCached && is_dual(spec, inputs[SsdScan::kX].dtype)
             ? place_dual(spec, tokens, kBackward, {}).num_bytes
             : place(spec, tokens, kBackward, {}).num_bytes;
}

int64_t ssd_batch_workspace(const SsdScanBatch& op, std::span<const ValueType> inputs) {
  check_ssd_limits(op, inputs);
  return 0;
}

}  // namespace

void add_ssd_scan_cuda(KernelTable& table) {
  add_kernel<SsdScan>(table, ssd_scan, {.workspace = ssd_workspace<SsdPassKind::kForward>});
  add_kernel<SsdScanCached>(table, ssd_scan_cached,
                            {.workspace = ssd_workspace<SsdPassKind::kCached>});
  add_kernel<SsdScanBatch>(table, ssd_scan_batch, {.workspace = ssd_batch_workspace});
  add_kernel<SsdScanBackward>(
      table, ssd_scan_backward,
      {.workspace = ssd_workspace<SsdPassKind::kBackward>, .sets_accumulators = true});
}

}  // namespace tessera

#include "ops/cuda/limits.h"
#include "ops/cuda/row_args.h"
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
          .a_log = args.in(Op::kALog).template as<float>(),
          .skip = args.in(Op::kD).template as<float>(),
          .dt_bias = args.in(Op::kDtBias).template as<float>()};
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

void ssd_scan(const SsdScan& op, const Args<SsdScan>& args) {
  const cuda::SsdRows x = describe_packed(op.spec(), args);
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
  const PlacedSsd placed = place(op.spec(), x.tokens, true, args.workspace);
  cuda::launch_ssd_scan_backward(x, placed.marks, placed.backward,
                                 {.y = args.in(Op::kGrad).data,
                                  .x = args.out(Op::kGradX).data,
                                  .dt = args.out(Op::kGradDt).data,
                                  .b = args.out(Op::kGradB).data,
                                  .c = args.out(Op::kGradC).data,
                                  .a_log = cuda::accumulator_of(args, args.out(Op::kGradALog)),
                                  .skip = cuda::accumulator_of(args, args.out(Op::kGradD)),
                                  .dt_bias = cuda::accumulator_of(args, args.out(Op::kGradDtBias)),
                                  .num_sms = cuda::context_of(args).num_sms()},
                                 cuda::stream_of(args));
}

void check_ssd_limits(const SsdOperator& op, std::span<const ValueType> inputs) {
  constexpr int64_t kMaxGridRows = 65535;
  const SsdSpec& spec = op.spec();
  const int64_t tokens = inputs[SsdScan::kX].shape[0];
  cuda::check_limit(op, spec.num_heads, kMaxGridRows, "heads");
  cuda::check_limit(op, spec.head_size, cuda::kMaxSsdWidth, "elements of a head");
  cuda::check_limit(op, spec.state_size, cuda::kMaxSsdWidth, "numbers of an element's state");
  cuda::check_limit(op, tokens * spec.num_groups, INT32_MAX, "tokens of groups");
}

template <bool kBackward>
int64_t ssd_workspace(const SsdOperator& op, std::span<const ValueType> inputs) {
  check_ssd_limits(op, inputs);
  return place(op.spec(), inputs[SsdScan::kX].shape[0], kBackward, {}).num_bytes;
}

int64_t ssd_batch_workspace(const SsdScanBatch& op, std::span<const ValueType> inputs) {
  check_ssd_limits(op, inputs);
  return 0;
}

}  // namespace

void add_ssd_scan_cuda(KernelTable& table) {
  add_kernel<SsdScan>(table, ssd_scan, {.workspace = ssd_workspace<false>});
  add_kernel<SsdScanCached>(table, ssd_scan_cached, {.workspace = ssd_workspace<false>});
  add_kernel<SsdScanBatch>(table, ssd_scan_batch, {.workspace = ssd_batch_workspace});
  add_kernel<SsdScanBackward>(table, ssd_scan_backward,
                              {.workspace = ssd_workspace<true>, .sets_accumulators = true});
}

}  // namespace tessera

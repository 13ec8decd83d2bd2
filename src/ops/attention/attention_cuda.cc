#include "ops/attention/attention_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "core/memory.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/attention/large_heads.h"
#include "ops/cuda/context.h"
#include "ops/cuda/tensor_map.h"
#include "ops/workspace.h"

namespace tessera {
namespace cuda::attention {
namespace {

using tessera::attention::BackwardInput;
using tessera::attention::BackwardOutput;
using tessera::attention::Input;

Heads heads_of(const AttentionSpec& spec, const KernelArgs& args) {
  const bool has_window = spec.window > 0 && spec.window < args.in(Input::kK).shape[0];
  return {.num_heads = static_cast<int>(spec.num_heads),
          .num_kv_heads = static_cast<int>(spec.num_kv_heads),
          .head_size = static_cast<int>(spec.head_size),
          .head_size_v = static_cast<int>(spec.head_size_v),
          .window = has_window ? static_cast<int>(spec.window) : 0,
          .chunk = spec.chunk < args.in(Input::kK).shape[0] ? static_cast<int>(spec.chunk) : 0,
          .num_rows = args.in(Input::kQ).shape[0],
          .scale = static_cast<float>(spec.scale)};
}

CUtensorMap map_of(const Tensor& tensor, int64_t num_heads, int64_t head_size) {
  return cuda::make_heads_map({tensor.data, tensor.shape[0], num_heads, head_size}, kTensorBox);
}

/// The backward's pointers, the same by name for both kinds of parameters.
template <typename Params>
void set_gradients(Params& params, const KernelArgs& args, const float* delta) {
  params.delta = delta;
  params.lse = args.in(BackwardInput::kSavedLse).as<float>();
  params.grad_q = args.out(BackwardOutput::kGradQ).data;
  params.grad_k = args.out(BackwardOutput::kGradK).data;
  params.grad_v = args.out(BackwardOutput::kGradV).data;
}

}  // namespace

bool uses_tensor_cores(const AttentionSpec& spec, DType dtype) {
  return dtype == DType::kBF16 &&
         tensor_fits(static_cast<int>(spec.head_size), static_cast<int>(spec.head_size_v));
}

int block_size(const AttentionSpec& spec, DType dtype) {
  return uses_tensor_cores(spec, dtype) ? kTensorBlock : kExactBlock;
}

TensorParams tensor_params(const AttentionSpec& spec, const KernelArgs& args,
                           const WorkList& list) {
  return {.q = map_of(args.in(Input::kQ), spec.num_heads, spec.head_size),
          .k = map_of(args.in(Input::kK), spec.num_kv_heads, spec.head_size),
          .v = map_of(args.in(Input::kV), spec.num_kv_heads, spec.head_size_v),
          .num_items = list.num_items,
          .items = list.items,
          .max_items = list.capacity,
          .num_sms = context_of(args).num_sms(),
          .heads = heads_of(spec, args),
          .pairs = {.num_kv_heads = static_cast<int>(spec.num_kv_heads)}};
}

ExactParams exact_params(const AttentionSpec& spec, const KernelArgs& args, const WorkList& list) {
  return {.list = list,
          .heads = heads_of(spec, args),
          .q = args.in(Input::kQ).data,
          .k = args.in(Input::kK).data,
          .v = args.in(Input::kV).data};
}

large_heads::Params large_params(const AttentionSpec& spec, const KernelArgs& args,
                                 const WorkList& list) {
  static_assert(kExactBlock == large_heads::kRows);
  return {.heads = heads_of(spec, args),
          .num_rows = static_cast<int>(args.in(Input::kK).shape[0]),
          .num_sms = context_of(args).num_sms(),
          .q = args.in(Input::kQ).data,
          .k = args.in(Input::kK).data,
          .v = args.in(Input::kV).data,
          .chosen = nullptr,
          .top_k = 0,
          .num_items = list.num_items,
          .items = list.items,
          .max_items = list.capacity};
}

void check_sizes(const Operator& op, const AttentionSpec& spec, int64_t num_tokens) {
  // Rows and blocks are counted in 32 bits on the GPU.
  check_shape(op, num_tokens <= INT32_MAX / (2 * spec.num_heads),
              "{} tokens of {} heads are more than the GPU's kernels take", num_tokens,
              spec.num_heads);
}

DeltaParams delta_params(const AttentionSpec& spec, const KernelArgs& args, float* delta) {
  const bool has_grad_lse = std::ssize(args.inputs) > BackwardInput::kGradLse;
  const Tensor& o = args.in(BackwardInput::kSavedO);
  return {.o = o.data,
          .grad_o = args.in(BackwardInput::kGradO).data,
          .grad_lse = has_grad_lse ? args.in(BackwardInput::kGradLse).as<float>() : nullptr,
          .delta = delta,
          .num_rows = o.shape[0],
          .num_heads = static_cast<int>(spec.num_heads),
          .head_size_v = static_cast<int>(spec.head_size_v)};
}

void set_backward(TensorParams& params, const AttentionSpec& spec, const KernelArgs& args,
                  const float* delta) {
  params.grad_o = map_of(args.in(BackwardInput::kGradO), spec.num_heads, spec.head_size_v);
  set_gradients(params, args, delta);
}

void set_backward(ExactParams& params, const KernelArgs& args, const float* delta) {
  params.grad_o = args.in(BackwardInput::kGradO).data;
  set_gradients(params, args, delta);
}

void set_backward(large_heads::Params& params, const KernelArgs& args, const float* delta) {
  params.grad_o = args.in(BackwardInput::kGradO).data;
  set_gradients(params, args, delta);
}

}  // namespace cuda::attention

namespace {

namespace device = cuda::attention;
namespace large = cuda::large_heads;
using attention::BackwardInput;
using attention::Input;
using attention::Output;

/// Whether heads of packed sequences have the kernels for large ones.
bool has_large_heads(const AttentionSpec& spec, DType dtype) {
  return dtype == DType::kBF16 && !device::uses_tensor_cores(spec, dtype) &&
         large::fits(spec.head_size, spec.head_size_v);
}

/// What the backward keeps of the pairs of queries and keys (device::KeptPairs): tiles of a head,
/// and the key-value heads taken at a time; 0: none. Windows see few of the pairs there is room
/// for.
struct PairRoom {
  int64_t tiles = 0;
  int64_t kv_heads = 0;
};

PairRoom pair_room(const AttentionSpec& spec, DType dtype, int64_t num_tokens,
                   const cuda::PairLimits& limits) {
  if (!device::uses_tensor_cores(spec, dtype) || num_tokens == 0 ||
      spec.head_size < limits.least_size)
    return {};
  const int64_t length =
      spec.sequence_length > 0 ? std::min(spec.sequence_length, num_tokens) : num_tokens;
  if (spec.window > 0 && spec.window < length) return {};
  const int64_t tiles = num_tokens / length * device::num_pair_tiles(length) +
                        device::num_pair_tiles(num_tokens % length);
  const int64_t of_kv_head = tiles * device::kPairTileBytes * (spec.num_heads / spec.num_kv_heads);
  const int64_t most = std::min(spec.num_kv_heads, limits.most_bytes / of_kv_head);
  if (most == 0) return {};
  const int64_t num_chunks = (spec.num_kv_heads + most - 1) / most;
  const int64_t kv_heads = (spec.num_kv_heads + num_chunks - 1) / num_chunks;
  const int64_t tasks = (num_tokens + device::kTensorBlock - 1) / device::kTensorBlock * kv_heads;
  if (num_chunks > 1 && tasks < limits.least_tasks) return {};
  return {tiles, kv_heads};
}

/// What the backward of large heads leaves in parts of the keys' gradients.
struct PartRoom {
  int num_parts = 1;
  int64_t num_sums = 0;  ///< values
};

PartRoom part_room(const AttentionSpec& spec, DType dtype, int64_t num_tokens, int64_t num_items) {
  if (!has_large_heads(spec, dtype)) return {};
  const int parts = large::num_parts(num_items * spec.num_kv_heads,
                                     static_cast<int>(spec.num_heads / spec.num_kv_heads));
  if (parts == 1) return {};
  return {parts,
          parts * num_tokens * spec.num_kv_heads * std::max(spec.head_size, spec.head_size_v)};
}

/// Scratch memory: the list of blocks and, for the backward, delta [N, T], and kept pairs or parts
/// of sums.
class Scratch {
 public:
  Scratch(int64_t capacity, int64_t num_deltas, int64_t num_sequences = 0, PairRoom room = {},
          int64_t group_size = 1, PartRoom parts = {})
      : capacity_(capacity),
        room_(room),
        parts_(parts),
        num_items_(layout_.add<int>(1)),
        num_of_length_(layout_.add<int>(capacity + 1)),
        items_(layout_.add<device::Item>(capacity)),
        delta_(layout_.add<float>(num_deltas)),
        pairs_fit_(layout_.add<int>(1)),
        first_pairs_(layout_.add<int64_t>(room.kv_heads > 0 ? num_sequences : 0)),
        pairs_(layout_.add<std::byte>(room.kv_heads * group_size * room.tiles *
                                      device::kPairTileBytes)),
        sums_(layout_.add<float>(parts.num_sums)) {}

  int64_t num_bytes() const { return layout_.num_bytes(); }
  device::WorkList list(const KernelArgs& args) const {
    return {.num_items = workspace_part<int>(args.workspace, num_items_),
            .num_of_length = workspace_part<int>(args.workspace, num_of_length_),
            .items = workspace_part<device::Item>(args.workspace, items_),
            .capacity = static_cast<int>(capacity_),
            .first_pairs = room_.kv_heads > 0
                               ? workspace_part<int64_t>(args.workspace, first_pairs_)
                               : nullptr,
            .pairs_fit = workspace_part<int>(args.workspace, pairs_fit_),
            .pair_capacity = room_.tiles};
  }
  /// For all key-value heads where none are kept.
  device::KeptPairs pairs(const KernelArgs& args, const AttentionSpec& spec) const {
    const auto kv_heads = static_cast<int>(spec.num_kv_heads);
    if (room_.kv_heads == 0) return {.num_kv_heads = kv_heads};
    return {.tiles = workspace_part<std::byte>(args.workspace, pairs_),
            .capacity = room_.tiles,
            .fit = workspace_part<int>(args.workspace, pairs_fit_),
            .num_kv_heads = static_cast<int>(room_.kv_heads)};
  }
  void set_parts(large::Params& params, const KernelArgs& args) const {
    params.num_parts = parts_.num_parts;
    params.sums = workspace_part<float>(args.workspace, sums_);
  }
  float* delta(const KernelArgs& args) const {
    return workspace_part<float>(args.workspace, delta_);
  }

 private:
  WorkspaceLayout layout_;
  int64_t capacity_;
  PairRoom room_;
  PartRoom parts_;
  int64_t num_items_;
  int64_t num_of_length_;
  int64_t items_;
  int64_t delta_;
  int64_t pairs_fit_;
  int64_t first_pairs_;
  int64_t pairs_;
  int64_t sums_;
};

Scratch forward_scratch(const AttentionSpec& spec, DType dtype, int64_t num_tokens,
                        int64_t num_sequences) {
  return {device::max_items(num_tokens, num_sequences, device::block_size(spec, dtype)), 0};
}
Scratch backward_scratch(const AttentionSpec& spec, DType dtype, int64_t num_tokens,
                         int64_t num_sequences, const cuda::PairLimits& limits) {
  const int64_t num_items =
      device::max_items(num_tokens, num_sequences, device::block_size(spec, dtype));
  return {num_items,
          num_tokens * spec.num_heads,
          num_sequences,
          pair_room(spec, dtype, num_tokens, limits),
          spec.num_heads / spec.num_kv_heads,
          part_room(spec, dtype, num_tokens, num_items)};
}
Scratch cached_scratch(int64_t num_queries) {
  return {device::max_items(num_queries, 1, device::kExactBlock), 0};
}

device::SequenceList sequences_of(const AttentionSpec& spec, const KernelArgs& args,
                                  const Tensor& cu_seqlens, const device::WorkList& list) {
  const Tensor& q = args.in(Input::kQ);
  return {.list = list,
          .cu_seqlens = cu_seqlens.as<int32_t>(),
          .num_sequences = static_cast<int>(cu_seqlens.shape[0] - 1),
          .num_tokens = static_cast<int>(q.shape[0]),
          .block = device::block_size(spec, q.dtype)};
}

/// Whether cuDNN has run what `run` asks it for.
template <typename Run>
bool try_cudnn(const KernelArgs& args, bool wanted, const Run& run) {
  if (!wanted || args.in(Input::kQ).dtype != DType::kBF16) return false;
  cuda::CudaContext& context = cuda::context_of(args);
  auto& cudnn = context.get<cuda::CudnnAttention>();
  const bool done = run(cudnn);
  context.get<cuda::AttentionOptions>().why_not_cudnn = done ? "" : cudnn.why_not();
  return done;
}

void run_forward(const Attention& op, const KernelArgs& args) {
  const AttentionSpec& spec = op.spec();
  const Tensor& q = args.in(Input::kQ);
  const Tensor& cu_seqlens = args.in(Input::kForwardCuSeqlens);
  const int64_t num_tokens = q.shape[0];
  device::check_sizes(op, spec, num_tokens);
  if (num_tokens == 0 || cu_seqlens.shape[0] < 2) return;
  const auto& options = cuda::context_of(args).get<cuda::AttentionOptions>();
  if (try_cudnn(args, options.cudnn, [&](auto& cudnn) { return cudnn.run_forward(spec, args); }))
    return;
  const cudaStream_t stream = cuda::stream_of(args);
  const device::WorkList list =
      forward_scratch(spec, q.dtype, num_tokens, cu_seqlens.shape[0] - 1).list(args);
  const device::SequenceList sequences = sequences_of(spec, args, cu_seqlens, list);
  if (device::uses_tensor_cores(spec, q.dtype)) {
    device::TensorParams params = device::tensor_params(spec, args, list);
    params.o = args.out(Output::kO).data;
    params.lse = args.out(Output::kLse).as<float>();
    if (device::tensor_forward_lists(sequences)) {
      params.to_list = sequences;
    } else {
      device::launch_list_sequences(sequences, stream);
    }
    device::launch_tensor_forward(params, stream);
  } else if (has_large_heads(spec, q.dtype)) {
    large::Params params = device::large_params(spec, args, list);
    params.o = args.out(Output::kO).data;
    params.lse = args.out(Output::kLse).as<float>();
    device::launch_list_sequences(sequences, stream);
    large::launch_forward(params, stream);
  } else {
    device::ExactParams params = device::exact_params(spec, args, list);
    params.o = args.out(Output::kO).data;
    params.lse = args.out(Output::kLse).as<float>();
    device::launch_list_sequences(sequences, stream);
    device::launch_exact_forward(params, q.dtype, stream);
  }
}

/// By chunks of key-value heads for whose pairs there is room.
void launch_tensor_backward(device::TensorParams params, cudaStream_t stream) {
  if (device::tensor_gradients_share(params))
    return device::launch_tensor_gradients(params, stream);
  device::KeptPairs& pairs = params.pairs;
  const int chunk = pairs.num_kv_heads;
  for (int first = 0; first < params.heads.num_kv_heads; first += chunk) {
    pairs.first_kv_head = first;
    pairs.first_head = first * (params.heads.num_heads / params.heads.num_kv_heads);
    pairs.num_kv_heads = std::min(chunk, params.heads.num_kv_heads - first);
    device::launch_tensor_key_grads(params, stream);
    if (pairs.tiles != nullptr) device::launch_tensor_pair_sums(params, stream);
  }
  device::launch_tensor_query_grad(params, stream);
}

void run_backward(const AttentionBackward& op, const KernelArgs& args) {
  const AttentionSpec& spec = op.spec();
  const Tensor& q = args.in(Input::kQ);
  const Tensor& cu_seqlens = args.in(BackwardInput::kBackwardCuSeqlens);
  const int64_t num_tokens = q.shape[0];
  device::check_sizes(op, spec, num_tokens);
  if (num_tokens == 0 || cu_seqlens.shape[0] < 2) return;
  const auto& options = cuda::context_of(args).get<cuda::AttentionOptions>();
  if (try_cudnn(args, options.cudnn && !options.deterministic,
                [&](auto& cudnn) { return cudnn.run_backward(spec, args); }))
    return;
  const cudaStream_t stream = cuda::stream_of(args);
  const Scratch scratch =
      backward_scratch(spec, q.dtype, num_tokens, cu_seqlens.shape[0] - 1, options.pairs);
  const device::WorkList list = scratch.list(args);
  device::launch_delta_and_list(device::delta_params(spec, args, scratch.delta(args)),
                                sequences_of(spec, args, cu_seqlens, list), q.dtype, stream);
  if (device::uses_tensor_cores(spec, q.dtype)) {
    device::TensorParams params = device::tensor_params(spec, args, list);
    device::set_backward(params, spec, args, scratch.delta(args));
    params.pairs = scratch.pairs(args, spec);
    launch_tensor_backward(params, stream);
  } else if (has_large_heads(spec, q.dtype)) {
    large::Params params = device::large_params(spec, args, list);
    device::set_backward(params, args, scratch.delta(args));
    scratch.set_parts(params, args);
    large::launch_query_grad(params, stream);
    large::launch_key_grads(params, stream);
  } else {
    device::ExactParams params = device::exact_params(spec, args, list);
    device::set_backward(params, args, scratch.delta(args));
    device::launch_exact_query_grad(params, q.dtype, stream);
    device::launch_exact_key_grads(params, q.dtype, stream);
  }
}

void run_cached(const AttentionCached& op, const KernelArgs& args) {
  const AttentionSpec& spec = op.spec();
  const Tensor& q = args.in(Input::kQ);
  const int64_t num_queries = q.shape[0];
  const int64_t capacity = args.in(Input::kK).shape[0];
  device::check_sizes(op, spec, std::max(num_queries, capacity));
  if (num_queries == 0) return;
  const cudaStream_t stream = cuda::stream_of(args);
  const device::WorkList list = cached_scratch(num_queries).list(args);
  device::launch_list_cached(list, args.in(attention::kCacheLength).as<int32_t>(),
                             static_cast<int>(num_queries), static_cast<int>(capacity),
                             device::kExactBlock, stream);
  device::ExactParams params = device::exact_params(spec, args, list);
  params.o = args.out(Output::kO).data;
  if (op.gives_lse()) params.lse = args.out(Output::kLse).as<float>();
  device::launch_exact_forward(params, q.dtype, stream);
}

int64_t forward_workspace(const Attention& op, std::span<const ValueType> inputs) {
  return forward_scratch(op.spec(), inputs[Input::kQ].dtype, inputs[Input::kQ].shape[0],
                         inputs[Input::kForwardCuSeqlens].shape[0] - 1)
      .num_bytes();
}

int64_t backward_workspace(const AttentionBackward& op, std::span<const ValueType> inputs) {
  return backward_scratch(op.spec(), inputs[Input::kQ].dtype, inputs[Input::kQ].shape[0],
                          inputs[BackwardInput::kBackwardCuSeqlens].shape[0] - 1, {})
      .num_bytes();
}

int64_t cached_workspace(const AttentionCached& /*op*/, std::span<const ValueType> inputs) {
  return cached_scratch(inputs[Input::kQ].shape[0]).num_bytes();
}

}  // namespace

void add_attention_cuda(KernelTable& table) {
  add_kernel<Attention>(table, run_forward, {.workspace = forward_workspace});
  add_kernel<AttentionBackward>(table, run_backward, {.workspace = backward_workspace});
  add_kernel<AttentionCached>(table, run_cached, {.workspace = cached_workspace});
}

}  // namespace tessera

#include "ops/ring_attention/ring_attention.h"

#include "ops/attention/attention_cuda.h"
#include "ops/cuda/context.h"
#include "ops/ring_attention/ring_attention_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

namespace device = cuda::attention;
using attention::BackwardInput;
using attention::BackwardOutput;
using attention::Input;
using attention::Output;
using cuda::stream_of;

device::RingQueries queries_of(const RingAttentionOperator& op) {
  const Zigzag& tokens = op.tokens();
  const bool alone = tokens.ring == 1;
  const int64_t chunk = alone ? tokens.num_tokens() : tokens.row_length / (2 * tokens.ring);
  return {.num_runs = static_cast<int>(alone ? 1 : 2 * tokens.num_rows),
          .chunk = static_cast<int>(chunk),
          .row_length = static_cast<int>(tokens.row_length),
          .num_rows = static_cast<int>(tokens.num_rows),
          .rank = static_cast<int>(op.comm().rank()),
          .ring = static_cast<int>(tokens.ring)};
}

/// A list of blocks in scratch memory.
class ListScratch {
 public:
  ListScratch(WorkspaceLayout& layout, int64_t capacity, int64_t num_lengths)
      : capacity_(capacity),
        num_items_(layout.add<int>(1)),
        num_of_length_(layout.add<int>(num_lengths)),
        items_(layout.add<device::Item>(capacity)) {}

  device::WorkList list(std::span<std::byte> workspace) const {
    return {.num_items = workspace_part<int>(workspace, num_items_),
            .num_of_length = workspace_part<int>(workspace, num_of_length_),
            .items = workspace_part<device::Item>(workspace, items_),
            .capacity = static_cast<int>(capacity_)};
  }

 private:
  int64_t capacity_;
  int64_t num_items_;
  int64_t num_of_length_;
  int64_t items_;
};

/// What the sizes of scratch memory follow from.
struct RingSizes {
  RingSizes(const RingAttentionOperator& op, DType type, int64_t num_sequences)
      : dtype(type),
        num_sequences(num_sequences),
        own_tokens(op.tokens().tokens_per_rank()),
        all_tokens(op.tokens().num_tokens()),
        block(device::block_size(op.spec(), type)),
        k_width(op.spec().num_kv_heads * op.spec().head_size),
        v_width(op.spec().num_kv_heads * op.spec().head_size_v),
        max_items(device::max_ring_items(queries_of(op), num_sequences, block)) {}

  int64_t bytes(int64_t elements) const { return elements * dtype_size(dtype); }
  bool is_empty() const { return own_tokens == 0 || num_sequences < 1; }

  DType dtype;
  int64_t num_sequences;
  int64_t own_tokens;  ///< of one rank
  int64_t all_tokens;
  int block;
  int64_t k_width;
  int64_t v_width;
  int64_t max_items;
};

/// Scratch memory of both operators: the blocks of queries, and the keys and values of all ranks,
/// in the order of the ranks and then of the tokens.
struct ForwardScratch {
  ForwardScratch(const RingSizes& sizes, WorkspaceLayout& layout)
      : queries(layout, sizes.max_items, device::max_ring_lengths(sizes.all_tokens, sizes.block)),
        k(layout.add<std::byte>(sizes.bytes(sizes.all_tokens * sizes.k_width))),
        v(layout.add<std::byte>(sizes.bytes(sizes.all_tokens * sizes.v_width))) {}

  ListScratch queries;
  int64_t k;
  int64_t v;
};

/// The forward operator's.
struct ForwardMemory : ForwardScratch {
  ForwardMemory(const RingSizes& sizes, WorkspaceLayout& layout)
      : ForwardScratch(sizes, layout),
        gathered_k(layout.add<std::byte>(sizes.bytes(sizes.all_tokens * sizes.k_width))),
        gathered_v(layout.add<std::byte>(sizes.bytes(sizes.all_tokens * sizes.v_width))) {}

  int64_t gathered_k;
  int64_t gathered_v;
};

/// The backward operator's: the blocks of keys, delta, and F32 gradients of all ranks' keys and
/// values, which are made when what was gathered there is in its order; then those of this rank's.
struct BackwardMemory : ForwardScratch {
  BackwardMemory(const RingSizes& sizes, int64_t num_heads, WorkspaceLayout& layout)
      : BackwardMemory(sizes, num_heads, layout,
                       device::max_items(sizes.all_tokens, sizes.num_sequences, sizes.block)) {}

  ListScratch keys;
  int64_t delta;
  int64_t gathered_k;
  int64_t gathered_v;
  int64_t own_k;  ///< of F32 operators none: the sums are the results
  int64_t own_v;

 private:
  BackwardMemory(const RingSizes& sizes, int64_t num_heads, WorkspaceLayout& layout,
                 int64_t max_key_items)
      : ForwardScratch(sizes, layout),
        keys(layout, max_key_items, max_key_items + 1),
        delta(layout.add<float>(num_heads * sizes.own_tokens)),
        gathered_k(layout.add<float>(sizes.all_tokens * sizes.k_width)),
        gathered_v(layout.add<float>(sizes.all_tokens * sizes.v_width)),
        own_k(layout.add<float>(own_elements(sizes, sizes.k_width))),
        own_v(layout.add<float>(own_elements(sizes, sizes.v_width))) {}

  static int64_t own_elements(const RingSizes& sizes, int64_t width) {
    return sizes.dtype == DType::kF32 ? 0 : sizes.own_tokens * width;
  }
};

Tensor scratch_tensor(const KernelArgs& args, int64_t offset, DType dtype, const Shape& shape) {
  return {args.workspace.data() + offset, dtype, shape, args.in(Input::kQ).device};
}

/// One call's view: the operator, its sizes, and the inputs with all ranks' keys and values instead
/// of this rank's.
class RingCall {
 public:
  RingCall(const RingAttentionOperator& op, const KernelArgs& args, int cu_seqlens)
      : op_(op),
        args_(args),
        queries_(queries_of(op)),
        cu_seqlens_(args.in(cu_seqlens)),
        sizes_(op, args.in(Input::kQ).dtype, cu_seqlens_.shape[0] - 1) {
    device::check_sizes(op, op.spec(), sizes_.all_tokens);
  }

  const RingSizes& sizes() const { return sizes_; }
  const device::RingQueries& queries() const { return queries_; }

  /// Gathers keys and values at these places of the scratch memory and brings them into the order
  /// of the tokens.
  void gather(const ForwardScratch& scratch, int64_t gathered_k, int64_t gathered_v) {
    const auto tensor = [&](int64_t offset, int64_t width) {
      return scratch_tensor(args_, offset, sizes_.dtype, {sizes_.all_tokens, width});
    };
    inputs_.assign(args_.inputs.begin(), args_.inputs.end());
    inputs_[Input::kK] = tensor(scratch.k, sizes_.k_width);
    inputs_[Input::kV] = tensor(scratch.v, sizes_.v_width);
    const Tensor all_k = tensor(gathered_k, sizes_.k_width);
    const Tensor all_v = tensor(gathered_v, sizes_.v_width);
    Pending k = op_.comm().all_gather(args_.in(Input::kK), all_k);
    Pending v = op_.comm().all_gather(args_.in(Input::kV), all_v);
    k.wait();
    order(all_k, inputs_[Input::kK]);
    v.wait();
    order(all_v, inputs_[Input::kV]);
  }
  KernelArgs whole_args() const {
    KernelArgs args = args_;
    args.inputs = inputs_;
    return args;
  }

  device::WorkList list_queries(const ListScratch& scratch) const {
    const device::WorkList list = scratch.list(args_.workspace);
    device::launch_list_ring(list, queries_, cu_seqlens_.as<int32_t>(),
                             static_cast<int>(sizes_.num_sequences), sizes_.block,
                             stream_of(args_));
    return list;
  }
  device::WorkList list_keys(const ListScratch& scratch) const {
    const device::WorkList list = scratch.list(args_.workspace);
    device::launch_list_sequences({.list = list,
                                   .cu_seqlens = cu_seqlens_.as<int32_t>(),
                                   .num_sequences = static_cast<int>(sizes_.num_sequences),
                                   .num_tokens = static_cast<int>(sizes_.all_tokens),
                                   .block = sizes_.block},
                                  stream_of(args_));
    return list;
  }

 private:
  void order(const Tensor& from, const Tensor& to) const {
    cuda::launch_order_tokens(queries_, from.data, to.data, sizes_.bytes(from.shape[1]),
                              stream_of(args_));
  }

  const RingAttentionOperator& op_;
  const KernelArgs& args_;
  device::RingQueries queries_;
  Tensor cu_seqlens_;
  RingSizes sizes_;
  std::vector<Tensor> inputs_;
};

void run_forward(const RingAttention& ring, const KernelArgs& args) {
  RingCall call(ring, args, Input::kForwardCuSeqlens);
  if (call.sizes().is_empty()) return;
  WorkspaceLayout layout;
  const ForwardMemory memory(call.sizes(), layout);
  call.gather(memory, memory.gathered_k, memory.gathered_v);
  const device::WorkList list = call.list_queries(memory.queries);
  const auto launch = [&](auto params, const auto& run) {
    params.o = args.out(Output::kO).data;
    params.lse = args.out(Output::kLse).as<float>();
    run(params);
  };
  const AttentionSpec& spec = ring.spec();
  const KernelArgs whole = call.whole_args();
  const DType dtype = call.sizes().dtype;
  if (device::uses_tensor_cores(spec, dtype)) {
    launch(device::tensor_params(spec, whole, list),
           [&](const auto& params) { device::launch_tensor_forward(params, stream_of(args)); });
  } else {
    launch(device::exact_params(spec, whole, list), [&](const auto& params) {
      device::launch_exact_forward(params, dtype, stream_of(args));
    });
  }
}

/// The gradients of a call: of all ranks' keys and values in F32, then of this rank's queries.
class RingGradients {
 public:
  RingGradients(const RingAttentionBackward& op, const KernelArgs& args, const RingCall& call,
                const BackwardMemory& memory)
      : spec_(op.spec()),
        args_(args),
        call_(call),
        whole_(call.whole_args()),
        keys_(call.list_keys(memory.keys)),
        queries_(call.list_queries(memory.queries)),
        delta_(workspace_part<float>(args.workspace, memory.delta)) {
    device::launch_delta(device::delta_params(spec_, args, delta_), dtype(), stream_of(args));
  }

  void find_key_grads(const Tensor& grad_k, const Tensor& grad_v) const {
    const auto set = [&](auto params) {
      params.ring = call_.queries();
      params.grad_k = grad_k.data;
      params.grad_v = grad_v.data;
      return params;
    };
    if (uses_tensor_cores()) {
      device::launch_tensor_key_grads(set(tensor_params(keys_)), stream_of(args_));
    } else {
      device::launch_exact_key_grads(set(exact_params(keys_)), dtype(), stream_of(args_));
    }
  }
  void find_query_grads() const {
    if (uses_tensor_cores()) {
      device::launch_tensor_query_grad(tensor_params(queries_), stream_of(args_));
    } else {
      device::launch_exact_query_grad(exact_params(queries_), dtype(), stream_of(args_));
    }
  }

 private:
  DType dtype() const { return call_.sizes().dtype; }
  bool uses_tensor_cores() const { return device::uses_tensor_cores(spec_, call_.sizes().dtype); }
  device::TensorParams tensor_params(const device::WorkList& list) const {
    device::TensorParams params = device::tensor_params(spec_, whole_, list);
    device::set_backward(params, spec_, whole_, delta_);
    return params;
  }
  device::ExactParams exact_params(const device::WorkList& list) const {
    device::ExactParams params = device::exact_params(spec_, whole_, list);
    device::set_backward(params, whole_, delta_);
    return params;
  }

  const AttentionSpec& spec_;
  const KernelArgs& args_;
  const RingCall& call_;
  KernelArgs whole_;
  device::WorkList keys_;
  device::WorkList queries_;
  float* delta_;
};

/// Brings sums in F32 to the operator's output, where they are not there already.
void store_sums(const Tensor& sums, const Tensor& out, const KernelArgs& args) {
  if (sums.data != out.data)
    cuda::launch_round(sums.as<float>(), out.data, sums.num_elements(), stream_of(args));
}

void run_backward(const RingAttentionBackward& ring, const KernelArgs& args) {
  RingCall call(ring, args, BackwardInput::kBackwardCuSeqlens);
  const RingSizes& sizes = call.sizes();
  if (sizes.is_empty()) return;
  WorkspaceLayout layout;
  const BackwardMemory memory(sizes, ring.spec().num_heads, layout);
  call.gather(memory, memory.gathered_k, memory.gathered_v);
  const RingGradients gradients(ring, args, call, memory);

  const auto all_sums = [&](int64_t offset, int64_t width) {
    return scratch_tensor(args, offset, DType::kF32, {sizes.all_tokens, width});
  };
  const auto own_sums = [&](int64_t offset, const Tensor& out) {
    return sizes.dtype == DType::kF32 ? out : scratch_tensor(args, offset, DType::kF32, out.shape);
  };
  const Tensor all_k = all_sums(memory.gathered_k, sizes.k_width);
  const Tensor all_v = all_sums(memory.gathered_v, sizes.v_width);
  const Tensor& grad_k = args.out(BackwardOutput::kGradK);
  const Tensor& grad_v = args.out(BackwardOutput::kGradV);
  const Tensor own_k = own_sums(memory.own_k, grad_k);
  const Tensor own_v = own_sums(memory.own_v, grad_v);
  gradients.find_key_grads(all_k, all_v);
  Pending k = ring.comm().reduce_scatter(all_k, own_k);
  Pending v = ring.comm().reduce_scatter(all_v, own_v);
  gradients.find_query_grads();  // while the sums travel
  k.wait();
  store_sums(own_k, grad_k, args);
  v.wait();
  store_sums(own_v, grad_v, args);
}

int64_t forward_workspace(const RingAttention& ring, std::span<const ValueType> inputs) {
  WorkspaceLayout layout;
  const ForwardMemory memory(
      {ring, inputs[Input::kQ].dtype, inputs[Input::kForwardCuSeqlens].shape[0] - 1}, layout);
  return layout.num_bytes();
}

int64_t backward_workspace(const RingAttentionBackward& ring, std::span<const ValueType> inputs) {
  WorkspaceLayout layout;
  const BackwardMemory memory(
      {ring, inputs[Input::kQ].dtype, inputs[BackwardInput::kBackwardCuSeqlens].shape[0] - 1},
      ring.spec().num_heads, layout);
  return layout.num_bytes();
}

}  // namespace

void add_ring_attention_cuda(KernelTable& table) {
  add_kernel<RingAttention>(table, run_forward, {.workspace = forward_workspace});
  add_kernel<RingAttentionBackward>(table, run_backward, {.workspace = backward_workspace});
}

}  // namespace tessera

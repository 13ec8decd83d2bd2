#include <algorithm>

#include "ops/add_bias/add_bias_kernels.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/context.h"
#include "ops/cuda/device_buffer.h"
#include "ops/cuda/limits.h"
#include "ops/cuda/matrix_product.h"
#include "ops/cuda/row_args.h"
#include "ops/cuda/tensor_map.h"
#include "ops/router/router.h"
#include "ops/router/router_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using namespace cuda;

RouterRule rule_of(const RouterSpec& spec) {
  return {.num_experts = static_cast<int>(spec.num_experts),
          .top_k = static_cast<int>(spec.top_k),
          .score = spec.score,
          .after_top_k = spec.order == ScoreOrder::kAfterTopK,
          .normalize = spec.normalize_top_k,
          .force_balanced = spec.force_balanced,
          .scale = static_cast<float>(spec.scaling_factor),
          .num_groups = static_cast<int>(spec.num_groups),
          .top_groups = static_cast<int>(spec.top_groups),
          .top_two_groups = spec.group_score == GroupScore::kTopTwoSum};
}

/// `weight` is [E, H].
RouterShape shape_of(DType dtype, const Shape& x, const Shape& weight) {
  return {.num_tokens = x[0], .hidden_size = x[1], .num_experts = weight[0], .dtype = dtype};
}

int64_t num_weights(const RouterShape& shape) {
  return shape.num_experts * shape.hidden_size;
}

/// Scratch memory for the terms of the weight, where they are used.
int64_t weight_terms_bytes(const RouterShape& shape, bool used) {
  return used ? 3 * num_weights(shape) * 2 : 0;
}

/// Where the parts of the scratch memory start, in bytes; those of the forward kernel, then those
/// of the backward one. Both have the first two.
struct Workspace {
  int64_t fractions = 0;  ///< f32 [segments, E]
  int64_t weight_terms = 0;
  int64_t share_sums = 0;    ///< f32 [blocks, E]
  int64_t counts = 0;        ///< i32 [blocks, E]
  int64_t z_sums = 0;        ///< f64 [blocks]
  int64_t balance_sums = 0;  ///< f64 [blocks]
  int64_t share_parts = 0;   ///< f64 [kRouterTotalParts, E]
  int64_t count_parts = 0;   ///< i32 [kRouterTotalParts, E]
  int64_t grad_logits = 0;   ///< f32 [T, E], or of what is split, bf16 [T, 4E]
  int64_t partials = 0;      ///< f32 [splits or terms, E, H]
  int64_t bias_grads = 0;    ///< f32 [T, E], the logits' gradients where those are split
  int64_t bias_partials = 0;
  int64_t num_bytes = 0;

  static Workspace of_forward(const RouterShape& shape, int64_t num_segments) {
    WorkspaceLayout layout;
    Workspace result;
    const int64_t num_blocks = router_blocks(shape.num_tokens);
    result.fractions = layout.add<float>(num_segments * shape.num_experts);
    const int64_t copies = std::max(router_term_copies(shape), int64_t{1});
    result.weight_terms =
        layout.add<std::byte>(copies * weight_terms_bytes(shape, has_tensor_logits(shape)));
    result.share_sums = layout.add<float>(num_blocks * shape.num_experts);
    result.counts = layout.add<int32_t>(num_blocks * shape.num_experts);
    result.z_sums = layout.add<double>(num_blocks);
    result.balance_sums = layout.add<double>(num_blocks);
    result.share_parts = layout.add<double>(kRouterTotalParts * shape.num_experts);
    result.count_parts = layout.add<int32_t>(kRouterTotalParts * shape.num_experts);
    result.num_bytes = layout.num_bytes();
    return result;
  }
  static Workspace of_backward(const RouterShape& shape, int64_t num_segments, bool with_bias) {
    WorkspaceLayout layout;
    Workspace result;
    result.fractions = layout.add<float>(num_segments * shape.num_experts);
    const bool split = can_split_router(shape);
    result.weight_terms = layout.add<std::byte>(weight_terms_bytes(shape, split));
    const int64_t num_logits = shape.num_tokens * shape.num_experts;
    result.grad_logits = split ? layout.add<Bf16>(4 * num_logits) : layout.add<float>(num_logits);
    const int64_t num_partials = split ? 3 : router_weight_splits(shape);
    result.partials = layout.add<float>(num_partials * shape.num_experts * shape.hidden_size);
    if (with_bias && split) result.bias_grads = layout.add<float>(num_logits);
    if (with_bias)
      result.bias_partials = layout.add<std::byte>(column_sums_bytes(shape.num_experts));
    result.num_bytes = layout.num_bytes();
    return result;
  }
};

/// Of cu_seqlens [segments + 1]; one where there are none.
template <typename Input>
int64_t num_segments(const Input* cu_seqlens) {
  return cu_seqlens == nullptr ? 1 : cu_seqlens->shape[0] - 1;
}

/// cu_seqlens among the types of the inputs, or null.
template <typename Op>
const ValueType* find_bounds(const Op& op, std::span<const ValueType> inputs) {
  const auto operands = op.input_set();
  return operands.has(Op::kCuSeqlens) ? &inputs[operands.position(Op::kCuSeqlens)] : nullptr;
}

const float* floats(const Tensor* tensor) {
  return tensor == nullptr ? nullptr : tensor->as<float>();
}

/// What a context's forward calls, one after the other, count their last block by: see
/// RouterTokens::totals_counter. Of a context: CudaContext::get.
class RouterCounter {
 public:
  explicit RouterCounter(const CudaContext& context) : memory_(sizeof(unsigned), "the router") {
    check(cudaMemsetAsync(get(), 0, memory_.num_bytes(), context.stream()));
  }
  unsigned* get() const { return memory_.as<unsigned>(); }

 private:
  DeviceBuffer memory_;
};

/// One forward call.
struct Forward {
  const Router& op;
  const Args<Router>& args;
  RouterRule rule;
  RouterShape shape;
  const Tensor* bounds;  ///< cu_seqlens, where the balance loss goes by sequence
  Workspace layout;
  cudaStream_t stream;

  template <typename T>
  T* part(int64_t offset) const {
    return workspace_part<T>(args.workspace, offset);
  }
  template <typename T>
  T* out(Router::Output output) const {
    return args.out(output).as<T>();
  }

  void multiply() const {
    if (shape.num_tokens == 0) return;
    if (!has_tensor_logits(shape)) return launch_router_logits(logits(), stream);
    auto* terms = part<std::byte>(layout.weight_terms);
    const int64_t copies = router_term_copies(shape);
    const RouterWeight split{logits().weight, num_weights(shape), RouterTerms::kThree, terms};
    if (copies == 0) launch_split_weight(split, stream);
    const int num_sms = context_of(args).num_sms();
    launch_router_tensor_logits(
        {.x = make_tensor_map({args.in(Router::kX).data, shape.num_tokens, shape.hidden_size},
                              kRouterTileTokens),
         .terms = make_tensor_map(
             {terms, std::max(copies, int64_t{1}) * 3 * shape.num_experts, shape.hidden_size},
             router_tile_experts(shape.num_tokens, rule.num_experts, num_sms) / 2),
         .own = copies == 0 ? RouterWeight{} : split,
         .logits_TE = logits().logits_TE,
         .num_tokens = shape.num_tokens,
         .num_experts = rule.num_experts,
         .hidden_size = static_cast<int>(shape.hidden_size),
         .num_sms = num_sms},
        stream);
  }

  void add_bias() const {
    const Tensor* bias = args.find_in(Router::kBias);
    if (bias == nullptr) return;
    auto* logits = out<float>(Router::kLogits);
    launch_add_bias({.dtype = DType::kF32,
                     .rows = {.bound = shape.num_tokens},
                     .width = shape.num_experts,
                     .x = logits,
                     .bias = bias->as<float>(),
                     .y = logits},
                    stream);
  }

  RouterTokens tokens() const {
    const Tensor* replayed = args.find_in(Router::kReplayed);
    return {.rule = rule,
            .num_tokens = shape.num_tokens,
            .logits_TE = out<float>(Router::kLogits),
            .bias_E = floats(args.find_in(Router::kExpertBias)),
            .replayed_TK = replayed == nullptr ? nullptr : replayed->as<int32_t>(),
            .probs_TK = out<float>(Router::kProbs),
            .expert_idx_TK = out<int32_t>(Router::kExpertIdx),
            .share_sums = part<float>(layout.share_sums),
            .counts = part<int32_t>(layout.counts),
            .z_sums = part<double>(layout.z_sums),
            .totals = totals(),
            .totals_counter = context_of(args).get<RouterCounter>().get()};
  }

  RouterLogits logits() const {
    return {.shape = shape,
            .x = args.in(Router::kX).data,
            .weight = args.in(Router::kWeight).as<float>(),
            .logits_TE = out<float>(Router::kLogits)};
  }

  void route() const {
    if (is_router_one_block(shape) && args.find_in(Router::kBias) == nullptr)
      return launch_route_one_block(tokens(), logits(), stream);
    multiply();
    add_bias();
    launch_route_tokens(tokens(), stream);
    add_totals();
  }

  void add_totals() const {
    if (!is_router_few(shape.num_tokens, shape.num_experts)) launch_router_totals(totals(), stream);
  }

  RouterTotals totals() const {
    return {.num_experts = rule.num_experts,
            .group_size = static_cast<int>(op.spec().balance_group_size),
            .num_tokens = shape.num_tokens,
            .share_sums = part<float>(layout.share_sums),
            .counts = part<int32_t>(layout.counts),
            .z_sums = part<double>(layout.z_sums),
            .share_parts = part<double>(layout.share_parts),
            .count_parts = part<int32_t>(layout.count_parts),
            .score_means_E = out<float>(Router::kScoreMeans),
            .counts_E = out<float>(Router::kCounts),
            .z_loss = out<float>(Router::kZLoss),
            .balance_loss = bounds == nullptr ? out<float>(Router::kBalanceLoss) : nullptr};
  }

  void balance_segments() const {
    launch_segment_fractions({.num_experts = rule.num_experts,
                              .top_k = rule.top_k,
                              .group_size = static_cast<int>(op.spec().balance_group_size),
                              .num_segments = num_segments(bounds),
                              .num_tokens = shape.num_tokens,
                              .cu_seqlens = bounds->as<int32_t>(),
                              .expert_idx_TK = out<int32_t>(Router::kExpertIdx),
                              .fractions_SE = part<float>(layout.fractions)},
                             stream);
    launch_segment_balance({.num_experts = rule.num_experts,
                            .score = rule.score,
                            .num_segments = num_segments(bounds),
                            .num_tokens = shape.num_tokens,
                            .cu_seqlens = bounds->as<int32_t>(),
                            .logits_TE = out<float>(Router::kLogits),
                            .fractions_SE = part<float>(layout.fractions),
                            .balance_sums = part<double>(layout.balance_sums)},
                           stream);
    launch_segment_loss(
        {.num_groups = static_cast<int>(rule.num_experts / op.spec().balance_group_size),
         .num_tokens = shape.num_tokens,
         .balance_sums = part<double>(layout.balance_sums),
         .balance_loss = out<float>(Router::kBalanceLoss)},
        stream);
  }
};

void router(const Router& op, const Args<Router>& args) {
  const Tensor& x = args.in(Router::kX);
  const RouterShape shape = shape_of(x.dtype, x.shape, args.in(Router::kWeight).shape);
  const Tensor* bounds = args.find_in(Router::kCuSeqlens);
  const Forward forward{.op = op,
                        .args = args,
                        .rule = rule_of(op.spec()),
                        .shape = shape,
                        .bounds = bounds,
                        .layout = Workspace::of_forward(shape, num_segments(bounds)),
                        .stream = stream_of(args)};
  forward.route();
  if (bounds != nullptr) forward.balance_segments();
}

int64_t router_workspace(const Router& op, std::span<const ValueType> inputs) {
  check_limit(op, op.spec().num_experts, kRouterMaxExperts, "experts");
  const RouterShape shape =
      shape_of(inputs[Router::kX].dtype, inputs[Router::kX].shape, inputs[Router::kWeight].shape);
  return Workspace::of_forward(shape, num_segments(find_bounds(op, inputs))).num_bytes;
}

/// One backward call.
struct BackwardCall {
  using Op = RouterBackward;

  const Op& op;
  const Args<Op>& args;
  RouterRule rule;
  RouterShape shape;
  const Tensor* bounds;  ///< cu_seqlens, where the balance loss goes by sequence
  Workspace layout;
  cudaStream_t stream;

  template <typename T>
  T* part(int64_t offset) const {
    return workspace_part<T>(args.workspace, offset);
  }

  bool is_few() const { return is_router_few(shape.num_tokens, shape.num_experts); }
  bool makes_grad_x() const { return args.find_out(Op::kGradX) != nullptr; }
  /// What the weight's terms are made from, for the gradient of x.
  RouterWeight weight() const {
    return {.values_EH = args.in(Op::kWeight).as<float>(),
            .count = can_split_router(shape) && makes_grad_x() ? num_weights(shape) : 0,
            .which = RouterTerms::kTwoAndFirst,
            .terms_3EH = part<std::byte>(layout.weight_terms)};
  }
  /// The counts that the tokens' own kernel makes the fractions from, or null.
  const float* counts_for_tokens() const {
    return is_few() && bounds == nullptr ? floats(args.find_in(Op::kCounts)) : nullptr;
  }

  void make_fractions() const {
    const int group_size = static_cast<int>(op.spec().balance_group_size);
    auto* fractions = part<float>(layout.fractions);
    if (bounds == nullptr) {
      launch_router_fractions({.num_experts = rule.num_experts,
                               .group_size = group_size,
                               .counts_E = floats(args.find_in(Op::kCounts)),
                               .fractions_E = fractions},
                              stream);
      return;
    }
    launch_segment_fractions({.num_experts = rule.num_experts,
                              .top_k = rule.top_k,
                              .group_size = group_size,
                              .num_segments = num_segments(bounds),
                              .num_tokens = shape.num_tokens,
                              .cu_seqlens = bounds->as<int32_t>(),
                              .expert_idx_TK = args.in(Op::kExpertIdx).as<int32_t>(),
                              .fractions_SE = fractions},
                             stream);
  }

  void make_grad_logits() const {
    const float* counts = counts_for_tokens();
    if (op.gradients().balance_loss && counts == nullptr) make_fractions();
    const bool split = can_split_router(shape);
    auto* grad_logits = part<float>(layout.grad_logits);
    launch_router_backward_tokens(
        {.rule = rule,
         .group_size = static_cast<int>(op.spec().balance_group_size),
         .num_tokens = shape.num_tokens,
         .num_segments = num_segments(bounds),
         .cu_seqlens = bounds == nullptr ? nullptr : bounds->as<int32_t>(),
         .logits_TE = args.in(Op::kLogits).as<float>(),
         .expert_idx_TK = args.in(Op::kExpertIdx).as<int32_t>(),
         .fractions_SE = part<float>(layout.fractions),
         .grad_probs_TK = floats(args.find_in(Op::kGradProbs)),
         .grad_balance = floats(args.find_in(Op::kGradBalanceLoss)),
         .grad_z = floats(args.find_in(Op::kGradZLoss)),
         .grad_means_E = floats(args.find_in(Op::kGradScoreMeans)),
         .given_grad_logits_TE = floats(args.find_in(Op::kGradLogits)),
         .grad_logits_TE = grad_logits_TE(),
         .grad_terms_T4E = split ? grad_logits : nullptr,
         .counts_E = counts,
         .weight = is_few() ? weight() : RouterWeight{}},
        stream);
  }

  /// Where they are written in F32; null: nowhere.
  float* grad_logits_TE() const {
    if (!can_split_router(shape)) return part<float>(layout.grad_logits);
    return op.makes_grad_bias() ? part<float>(layout.bias_grads) : nullptr;
  }

  void add_bias_gradient() const {
    const Tensor* grad_bias = args.find_out(Op::kGradBias);
    if (grad_bias == nullptr || !*grad_bias) return;
    launch_column_sums({.dtype = DType::kF32,
                        .rows = {.bound = shape.num_tokens},
                        .cols = shape.num_experts,
                        .x = grad_logits_TE(),
                        .accumulator = accumulator_of(args, *grad_bias),
                        .partials = part<float>(layout.bias_partials),
                        .num_sms = context_of(args).num_sms()},
                       stream);
  }

  void multiply() const {
    const Tensor* grad_x = args.find_out(Op::kGradX);
    const Tensor* grad_weight = args.find_out(Op::kGradWeight);
    const bool weight_wanted = grad_weight != nullptr && *grad_weight;
    const RouterProductGrads grads{
        .shape = shape,
        .grad_logits_TE = part<float>(layout.grad_logits),
        .x = args.in(Op::kX).data,
        .weight = args.in(Op::kWeight).as<float>(),
        .partials = part<float>(layout.partials),
        .addend = op.gradients().addend ? args.in(Op::kAddend).data : nullptr,
        .grad_x = grad_x != nullptr ? grad_x->data : nullptr,
        .grad_weight_EH = weight_wanted ? accumulator_of(args, *grad_weight) : Accumulator{}};
    can_split_router(shape) ? multiply_terms(grads) : launch_router_product_grads(grads, stream);
  }

  /// grad_logits · weight = g1·w1 + g1·w2 + g2·w1 and gradᵀ · x = g1ᵀ·x + g2ᵀ·x + g3ᵀ·x of their
  /// terms, each by one product of the terms side by side.
  void multiply_terms(const RouterProductGrads& grads) const {
    const int64_t num_experts = shape.num_experts;
    const int64_t hidden_size = shape.hidden_size;
    const auto* grad_terms = part<Bf16>(layout.grad_logits);
    if (grads.grad_weight_EH.sums != nullptr) {
      cuda::multiply(args, {.transpose_a = true,
                            .m = 3 * num_experts,
                            .n = hidden_size,
                            .k = shape.num_tokens,
                            .a = grad_terms + num_experts,
                            .lda = 4 * num_experts,
                            .b = grads.x,
                            .ldb = hidden_size,
                            .c = grads.partials,
                            .ldc = hidden_size,
                            .input_type = DType::kBF16});
      launch_add_splits(shape, grads.partials, 3, grads.grad_weight_EH, stream);
    }
    if (grads.grad_x == nullptr) return;
    const RouterWeight terms = weight();
    if (!is_few()) launch_split_weight(terms, stream);
    cuda::multiply(args,
                   {.m = shape.num_tokens,
                    .n = hidden_size,
                    .k = 3 * num_experts,
                    .a = grad_terms,
                    .lda = 4 * num_experts,
                    .b = terms.terms_3EH,
                    .ldb = hidden_size,
                    .c = grads.grad_x,
                    .ldc = hidden_size,
                    .input_type = DType::kBF16,
                    .output_type = DType::kBF16},
                   grads.addend);
  }
};

void router_backward(const RouterBackward& op, const Args<RouterBackward>& args) {
  using Op = RouterBackward;
  const Tensor& x = args.in(Op::kX);
  const RouterShape shape = shape_of(x.dtype, x.shape, args.in(Op::kWeight).shape);
  const Tensor* bounds = args.find_in(Op::kCuSeqlens);
  const BackwardCall call{
      .op = op,
      .args = args,
      .rule = rule_of(op.spec()),
      .shape = shape,
      .bounds = bounds,
      .layout = Workspace::of_backward(shape, num_segments(bounds), op.makes_grad_bias()),
      .stream = stream_of(args)};
  call.make_grad_logits();
  call.add_bias_gradient();
  call.multiply();
}

int64_t router_backward_workspace(const RouterBackward& op, std::span<const ValueType> inputs) {
  using Op = RouterBackward;
  check_limit(op, op.spec().num_experts, kRouterMaxExperts, "experts");
  const ValueType& x = inputs[Op::kX];
  const RouterShape shape = shape_of(x.dtype, x.shape, inputs[Op::kWeight].shape);
  return Workspace::of_backward(shape, num_segments(find_bounds(op, inputs)), op.makes_grad_bias())
      .num_bytes;
}

}  // namespace

void add_router_cuda(KernelTable& table) {
  add_kernel<Router>(table, router, {.workspace = router_workspace});
  add_kernel<RouterBackward>(table, router_backward,
                             {.workspace = router_backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera

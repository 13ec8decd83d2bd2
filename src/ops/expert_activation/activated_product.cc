#include "ops/expert_activation/activated_product.h"

#include "ops/workspace.h"

namespace tessera {
namespace {

/// Inputs of the product that makes the activation's gradient; the others are the activation's.
constexpr int kGradInputs = ActivationGradProduct::kPre;

void check_widths(const Operator& op, int64_t made, int64_t taken) {
  require(made == taken, "{}: the product gives {} columns, the activation takes {}", op.name(),
          made, taken);
}

template <typename Op>
void check_count(const Op& op, std::span<const ValueType> inputs) {
  check_shape(op, std::ssize(inputs) == op.input_set().size(), "takes {} inputs, got {}",
              op.input_set().size(), inputs.size());
}

/// `first`, then what follows the product's inputs.
template <typename T>
std::vector<T> behind_product(const T& first, std::span<const T> inputs, int num_product) {
  std::vector<T> result{first};
  result.insert(result.end(), inputs.begin() + num_product, inputs.end());
  return result;
}

/// Where the product's scratch memory begins, behind that for what lies between the steps.
int64_t product_workspace_begin(int64_t bytes_between) {
  WorkspaceLayout layout;
  layout.add<std::byte>(bytes_between);
  return layout.num_bytes();
}

Cost fused_cost(const Operator& op, const GroupedMatmul& product, std::span<const ValueType> inputs,
                int num_product, std::span<const ValueType> outputs) {
  Cost cost = op.Operator::cost(inputs, outputs);
  const auto product_inputs = inputs.first(num_product);
  cost.flops = product.cost(product_inputs, product.infer(product_inputs)).flops;
  return cost;
}

void run(const KernelTable& kernels, const Operator& op, const KernelArgs& args,
         std::span<const Tensor> inputs, std::span<const Tensor> outputs,
         std::span<std::byte> workspace = {}) {
  kernels.find(op.name())->second(
      op, {.inputs = inputs, .outputs = outputs, .workspace = workspace, .context = args.context});
}

}  // namespace

ActivatedProduct::ActivatedProduct(const GroupedMatmul& product, const ExpertActivation& activation,
                                   bool keeps_pre)
    : product_(product), activation_(activation), keeps_pre_(keeps_pre) {
  check_widths(*this, product.sizes().largest(), activation.pre_width());
}

std::string ActivatedProduct::attributes() const {
  return fmt::format("{} {}{}", activation_.attributes(), product_.gather() ? "gather " : "",
                     keeps_pre_ ? "keeps_pre" : "");
}

std::vector<ValueType> ActivatedProduct::infer(std::span<const ValueType> inputs) const {
  const int num_product = num_product_inputs();
  check_count(*this, inputs);
  const ValueType pre = product_.infer(inputs.first(num_product))[GroupedMatmul::kY];
  std::vector<ValueType> outputs = activation_.infer(behind_product(pre, inputs, num_product));
  if (keeps_pre_) outputs.push_back(pre);
  return outputs;
}

Cost ActivatedProduct::cost(std::span<const ValueType> inputs,
                            std::span<const ValueType> outputs) const {
  return fused_cost(*this, product_, inputs, num_product_inputs(), outputs);
}

ActivationGradProduct::ActivationGradProduct(const GroupedMatmul& product,
                                             const ExpertActivation& activation, bool gives_act)
    : product_(product), activation_(activation), gives_act_(gives_act) {
  require(product.side() == GroupedSide::kOut && !product.gather(),
          "{}: the product must be on side out, without a gather", name());
  check_widths(*this, product.sizes().largest(), activation.sizes().largest());
}

std::string ActivationGradProduct::attributes() const {
  return fmt::format("{}{}", activation_.attributes(), gives_act_ ? " gives_act" : "");
}

std::vector<ValueType> ActivationGradProduct::infer(std::span<const ValueType> inputs) const {
  check_count(*this, inputs);
  const ValueType grad_act = product_.infer(inputs.first(kGradInputs))[GroupedMatmul::kY];
  std::vector<ValueType> outputs =
      ExpertActivationBackward(activation_).infer(behind_product(grad_act, inputs, kGradInputs));
  if (gives_act_)
    outputs.push_back(activation_.infer(inputs.subspan(kGradInputs))[ExpertActivation::kAct]);
  return outputs;
}

Cost ActivationGradProduct::cost(std::span<const ValueType> inputs,
                                 std::span<const ValueType> outputs) const {
  return fused_cost(*this, product_, inputs, kGradInputs, outputs);
}

OperatorPtr ActivationGradProduct::giving_also(std::span<const ValueId> inputs,
                                               const Operator& other,
                                               std::span<const ValueId> other_inputs) const {
  const auto* forward = dynamic_cast<const ExpertActivation*>(&other);
  const bool is_own = forward != nullptr && forward->attributes() == activation_.attributes() &&
                      std::ranges::equal(inputs.subspan(kGradInputs), other_inputs);
  if (gives_act_ || !is_own) return nullptr;
  return std::make_shared<ActivationGradProduct>(product_, activation_, true);
}

OperatorPtr ExpertActivation::joined_with(const Neighbours& nodes, bool keeps_product) const {
  const auto* product = dynamic_cast<const GroupedMatmul*>(&nodes.producer);
  if (product == nullptr || product->side() != GroupedSide::kOut ||
      nodes.producer_inputs[GroupedMatmul::kOffsets] !=
          nodes.reader_inputs[input_set().position(kOffsets)])
    return nullptr;
  return std::make_shared<ActivatedProduct>(*product, *this, keeps_product);
}

OperatorPtr ExpertActivationBackward::joined_with(const Neighbours& nodes,
                                                  bool keeps_product) const {
  const auto* product = dynamic_cast<const GroupedMatmul*>(&nodes.producer);
  if (product == nullptr || keeps_product || pre_format_ != RowFormat::kValues ||
      product->side() != GroupedSide::kOut || product->gather() ||
      nodes.producer_inputs[GroupedMatmul::kOffsets] !=
          nodes.reader_inputs[input_set().position(kOffsets)])
    return nullptr;
  return std::make_shared<ActivationGradProduct>(*product, forward_, gives_act_);
}

int64_t activated_product_bytes(const ActivatedProduct& op, std::span<const ValueType> inputs,
                                int64_t product_bytes) {
  const ValueType pre =
      op.product().infer(inputs.first(op.num_product_inputs()))[GroupedMatmul::kY];
  return product_workspace_begin(op.keeps_pre() ? 0 : pre.num_bytes()) + product_bytes;
}

void run_activated_product(const ActivatedProduct& op, const Args<ActivatedProduct>& args,
                           const KernelTable& kernels) {
  const int num_product = op.num_product_inputs();
  const Tensor& act = args.out(ActivatedProduct::kAct);
  Tensor pre{
      args.workspace.data(), act.dtype, {act.shape[0], op.activation().pre_width()}, act.device};
  const int64_t begin = product_workspace_begin(op.keeps_pre() ? 0 : pre.num_bytes());
  if (op.keeps_pre()) pre = args.out(ActivatedProduct::kPre);
  run(kernels, op.product(), args, args.inputs.first(num_product), {{pre}},
      args.workspace.subspan(begin));
  run(kernels, op.activation(), args, behind_product(pre, args.inputs, num_product), {{act}});
}

int64_t activation_grad_product_bytes(const ActivationGradProduct& op,
                                      std::span<const ValueType> inputs, int64_t product_bytes) {
  const ValueType grad_act = op.product().infer(inputs.first(kGradInputs))[GroupedMatmul::kY];
  return product_workspace_begin(grad_act.num_bytes()) + product_bytes;
}

void run_activation_grad_product(const ActivationGradProduct& op,
                                 const Args<ActivationGradProduct>& args,
                                 const KernelTable& kernels) {
  const Tensor& grad = args.in(ActivationGradProduct::kGrad);
  const Tensor grad_act{args.workspace.data(),
                        grad.dtype,
                        {grad.shape[0], op.product().sizes().largest()},
                        grad.device};
  const int64_t begin = product_workspace_begin(grad_act.num_bytes());
  run(kernels, op.product(), args, args.inputs.first(kGradInputs), {{grad_act}},
      args.workspace.subspan(begin));
  const int num_grads = ExpertActivationBackward(op.activation()).output_set().size();
  run(kernels, ExpertActivationBackward(op.activation()), args,
      behind_product(grad_act, args.inputs, kGradInputs), args.outputs.first(num_grads));
  if (op.gives_act())
    run(kernels, op.activation(), args, args.inputs.subspan(kGradInputs),
        args.outputs.subspan(num_grads));
}

}  // namespace tessera

#include "optim/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/host_tensor.h"
#include "ops/adamw/adamw.h"
#include "ops/add/add.h"
#include "ops/bf16_sum/bf16_sum.h"
#include "ops/grad_norm/grad_norm.h"

namespace tessera {
namespace {

/// Where a parameter's state lies in the flat buffer, from its own beginning.
struct StateLayout {
  int64_t m = 0;
  int64_t v = 0;
  int64_t master = -1;  // -1: the weight is the master
  int64_t num_bytes = 0;
};

StateLayout layout_state(const Tensor& weight) {
  const int64_t bytes = align_up(weight.num_elements() * dtype_size(DType::kF32));
  StateLayout layout = {.m = 0, .v = bytes, .num_bytes = 2 * bytes};
  if (weight.dtype == DType::kBF16) {
    layout.master = layout.num_bytes;
    layout.num_bytes += bytes;
  }
  return layout;
}

void check_parameter(const Parameter& p) {
  ensure(is_storage(p.weight.dtype), "optimizer: weight '{}' is {}", p.name,
         dtype_name(p.weight.dtype));
  ensure(p.grad.dtype == DType::kF32 && p.grad.shape == p.weight.shape,
         "optimizer: '{}' has weight {} but gradient {} {}", p.name, p.weight.shape.to_string(),
         dtype_name(p.grad.dtype), p.grad.shape.to_string());
  ensure(p.weight.num_elements() == 0 || (p.weight && p.grad), "optimizer: '{}' has no memory",
         p.name);
  require(std::isfinite(p.lr_multiplier) && p.lr_multiplier >= 0.0,
          "optimizer: the learning-rate multiplier of '{}' must be finite and at least 0, got {}",
          p.name, p.lr_multiplier);
}

bool is_decayed(const Parameter& p, const AdamWOptions& options) {
  return p.decay.value_or(options.decay_all || p.weight.shape.rank() >= 2);
}

Tensor flat(Tensor tensor) {
  tensor.shape = {tensor.num_elements()};
  return tensor;
}

ValueType type_of(const Tensor& tensor) {
  return {.dtype = tensor.dtype, .shape = tensor.shape};
}

double norm_of(double sum_of_squares, double grad_scale) {
  return std::sqrt(sum_of_squares) * std::abs(grad_scale);
}

/// torch.nn.utils.clip_grad_norm_'s coefficient.
double clip_factor(double norm, double max_norm) {
  return max_norm > 0.0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace

Backend optimizer_on_host() {
  KernelTable kernels;
  add_adamw_cpu(kernels);
  add_add_cpu(kernels);
  add_bf16_sum_cpu(kernels);
  add_grad_norm_cpu(kernels);
  return kernels;
}

AdamWOptimizer::AdamWOptimizer(const std::vector<Parameter>& parameters,
                               const AdamWOptions& options, const Backend& backend)
    : backend_(backend), sum_of_squares_(make_sum_of_squares()) {
  int64_t state_bytes = 0;
  std::vector<ValueType> grads;
  for (const Parameter& parameter : parameters) {
    check_parameter(parameter);
    state_bytes += layout_state(parameter.weight).num_bytes;
    grads.push_back(type_of(flat(parameter.grad)));
  }
  Device& device = backend_.device();
  state_ = Buffer(state_bytes, "optimizer state", device);
  workspace_ =
      Buffer(backend_.workspace_bytes(*sum_of_squares_, grads), "the gradient norm", device);
  sums_ = Buffer(std::ssize(parameters) * static_cast<int64_t>(sizeof(double)), "the gradient norm",
                 device, MemoryKind::kShared);
  int64_t offset = 0;
  for (const Parameter& parameter : parameters) {
    slots_.push_back(make_slot(parameter, find_kind(parameter, options), offset));
    offset += layout_state(parameter.weight).num_bytes;
  }
  reset_masters();
}

void AdamWOptimizer::run_kernel(const Operator& op, std::span<const Tensor> inputs,
                                std::span<const Tensor> outputs, std::span<std::byte> workspace,
                                const UpdateObserver& observer) const {
  const std::vector<const int64_t*> no_extents(inputs.size());
  Device& device = backend_.device();
  const Device::Mark begin = observer ? device.mark() : 0;
  backend_.kernel(op)(op, {.inputs = inputs,
                           .outputs = outputs,
                           .workspace = workspace,
                           .extents = no_extents,
                           .context = backend_.context()});
  if (!observer) return;
  device.when_known(begin, device.mark(),
                    [observer, &op](auto from, auto to) { observer(op.name(), from, to); });
}

size_t AdamWOptimizer::find_kind(const Parameter& parameter, const AdamWOptions& options) {
  const AdamWSpec spec = {
      .beta1 = options.beta1,
      .beta2 = options.beta2,
      .eps = options.eps,
      .weight_decay = is_decayed(parameter, options) ? options.weight_decay : 0.0,
      .bf16_weight = parameter.weight.dtype == DType::kBF16};
  const auto found = std::ranges::find_if(kinds_, [&](const Kind& kind) {
    const AdamWSpec& own = static_cast<const AdamW&>(*kind.op).spec();
    return own.weight_decay == spec.weight_decay && own.bf16_weight == spec.bf16_weight &&
           kind.lr_multiplier == parameter.lr_multiplier;
  });
  if (found != kinds_.end()) return found - kinds_.begin();
  kinds_.push_back({make_adamw(spec), parameter.lr_multiplier});
  return kinds_.size() - 1;
}

AdamWOptimizer::Slot AdamWOptimizer::make_slot(const Parameter& parameter, size_t kind,
                                               int64_t state_offset) const {
  const StateLayout layout = layout_state(parameter.weight);
  const auto state = [&](int64_t offset) {
    return state_.tensor(state_offset + offset, DType::kF32, parameter.weight.shape);
  };
  return {.parameter = parameter,
          .master = layout.master >= 0 ? state(layout.master) : parameter.weight,
          .m = state(layout.m),
          .v = state(layout.v),
          .kind = kind};
}

std::vector<double> AdamWOptimizer::sums_of_squares(std::span<const Tensor> grads,
                                                    const UpdateObserver& observer) {
  ensure(grads.size() <= slots_.size(), "{} gradients of {} parameters", grads.size(),
         slots_.size());
  if (grads.empty()) return {};
  std::vector<Tensor> inputs;
  for (const Tensor& grad : grads) inputs.push_back(flat(grad));
  const Tensor outputs[] = {sums_.tensor(0, DType::kF64, {std::ssize(grads)})};
  run_kernel(*sum_of_squares_, inputs, outputs, workspace_.bytes(), observer);
  backend_.device().synchronize();
  const auto* sums = reinterpret_cast<const double*>(sums_.data());
  return {sums, sums + grads.size()};
}

double AdamWOptimizer::global_sum_of_squares(const UpdateObserver& observer) {
  std::vector<Tensor> grads;
  for (const Slot& slot : slots_) grads.push_back(slot.parameter.grad);
  double total = 0;
  for (const double sum : sums_of_squares(grads, observer)) total += sum;
  return total;
}

double AdamWOptimizer::grad_norm(double grad_scale) {
  return norm_of(global_sum_of_squares(), grad_scale);
}

StepResult AdamWOptimizer::judge(double sum_of_squares, const StepInput& input) {
  StepResult result = {.grad_norm = norm_of(sum_of_squares, input.grad_scale)};
  result.updated = std::isfinite(result.grad_norm);
  if (result.updated) result.clip_factor = clip_factor(result.grad_norm, input.max_grad_norm);
  return result;
}

StepResult AdamWOptimizer::step(const StepInput& input) {
  const StepResult result = judge(global_sum_of_squares(input.observer), input);
  if (!result.updated) return result;
  std::vector<size_t> all(slots_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  update(all, input, result.clip_factor);
  return result;
}

void AdamWOptimizer::update(std::span<const size_t> parameters, const StepInput& input,
                            double clip_factor) const {
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    std::vector<const Slot*> slots;
    for (const size_t idx : parameters) {
      if (slots_[idx].kind == kind) slots.push_back(&slots_[idx]);
    }
    if (!slots.empty()) update_kind(kinds_[kind], slots, input, clip_factor);
  }
}

void AdamWOptimizer::update_kind(const Kind& kind, std::span<const Slot* const> slots,
                                 const StepInput& input, double clip_factor) const {
  const AdamWSpec& spec = static_cast<const AdamW&>(*kind.op).spec();
  std::array<float, 4> params = adamw_step_params(
      spec, input.lr * kind.lr_multiplier, input.step_idx + 1, input.grad_scale * clip_factor);
  std::vector<Tensor> inputs, outputs;
  for (const Slot* slot : slots) {
    inputs.push_back(flat(slot->parameter.grad));
    for (const Tensor& tensor : {slot->master, slot->m, slot->v}) outputs.push_back(flat(tensor));
    if (spec.bf16_weight) outputs.push_back(flat(slot->parameter.weight));
  }
  inputs.push_back(view(std::span<float>(params), {4}));
  run_kernel(*kind.op, inputs, outputs, {}, input.observer);
}

std::vector<NamedTensor> AdamWOptimizer::state() const {
  std::vector<NamedTensor> result;
  for (const Slot& slot : slots_) {
    const std::string& name = slot.parameter.name;
    result.push_back({name + ".m", slot.m});
    result.push_back({name + ".v", slot.v});
    if (slot.has_master()) result.push_back({name + ".master", slot.master});
  }
  return result;
}

std::vector<NamedTensor> AdamWOptimizer::masters() const {
  std::vector<NamedTensor> result;
  for (const Slot& slot : slots_) {
    if (slot.has_master()) result.push_back({slot.parameter.name, slot.master});
  }
  return result;
}

void AdamWOptimizer::round_masters() const {
  for (const Slot& slot : slots_) {
    if (!slot.has_master()) continue;
    const HostTensor master(slot.master, HostTensor::Access::kRead);
    const HostTensor weight(slot.parameter.weight, HostTensor::Access::kWrite);
    std::ranges::transform(master.get().span<float>(), weight.get().as<Bf16>(),
                           [](float value) { return Bf16(value); });
    weight.store();
  }
}

void AdamWOptimizer::reset_masters() const {
  for (const Slot& slot : slots_) {
    if (!slot.has_master()) continue;
    const HostTensor weight(slot.parameter.weight, HostTensor::Access::kRead);
    const HostTensor master(slot.master, HostTensor::Access::kWrite);
    std::ranges::copy(weight.get().span<Bf16>(), master.get().as<float>());
    master.store();
  }
}

int64_t AdamWOptimizer::state_bytes(std::span<const Tensor> weights) {
  int64_t total = 0;
  for (const Tensor& weight : weights) total += layout_state(weight).num_bytes;
  return total;
}

}  // namespace tessera

#include "optim/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "ops/adamw/adamw.h"
#include "ops/adamw/moment_blocks.h"
#include "ops/add/add.h"
#include "ops/bf16_sum/bf16_sum.h"
#include "ops/collective/collective.h"
#include "ops/grad_norm/grad_norm.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "ops/quantize/quantize_blocks.h"
#include "ops/scale_rows/scale_rows.h"
#include "optim/host_updates.h"
#include "optim/state_layout.h"

namespace tessera {
namespace {

/// All parameters are one group where none are given.
UpdateGroups complete(UpdateGroups groups, size_t num_parameters) {
  if (groups.groups.empty()) {
    groups.groups.emplace_back(num_parameters);
    std::iota(groups.groups.front().begin(), groups.groups.front().end(), size_t{0});
  }
  std::vector<int> count(num_parameters);
  for (const auto& group : groups.groups) {
    for (const size_t idx : group) ++count.at(idx);
  }
  ensure(std::ranges::all_of(count, [](int c) { return c == 1; }),
         "optimizer: a parameter is in no group of updates, or in several");
  return groups;
}

void check_parameter(const Parameter& p) {
  ensure(is_storage(p.weight.dtype) || p.is_fp8(), "optimizer: weight '{}' is {}", p.name,
         dtype_name(p.weight.dtype));
  ensure(!p.is_fp8() || p.scales.shape == shape_of_block_scales(p.weight.shape),
         "optimizer: weight '{}' is {} with scales {}", p.name, p.weight.shape.to_string(),
         p.scales.shape.to_string());
  const bool takes_grad =
      p.grad.dtype == DType::kF32 || (p.grad.dtype == DType::kBF16 && p.has_second_moment());
  ensure(takes_grad && p.grad.shape == p.weight.shape,
         "optimizer: '{}' has weight {} but gradient {} {}", p.name, p.weight.shape.to_string(),
         dtype_name(p.grad.dtype), p.grad.shape.to_string());
  ensure(p.weight.num_elements() == 0 || (p.weight && p.grad), "optimizer: '{}' has no memory",
         p.name);
  require(std::isfinite(p.lr_multiplier) && p.lr_multiplier >= 0.0,
          "optimizer: the learning-rate multiplier of '{}' must be finite and at least 0, got {}",
          p.name, p.lr_multiplier);
  const int64_t rows = std::accumulate(p.matrix_rows.begin(), p.matrix_rows.end(), int64_t{0});
  ensure(p.matrix_rows.empty() || (p.weight.shape.rank() == 2 && rows == p.weight.shape[0]),
         "optimizer: '{}' is {}, and its matrices have {} rows", p.name, p.weight.shape.to_string(),
         rows);
}

constexpr int64_t kNumFactors = sizeof(AdamWFactors) / sizeof(float);
static_assert(sizeof(MuonFactors) == sizeof(AdamWFactors));

ValueType type_of(const Tensor& tensor) {
  return {.dtype = tensor.dtype, .shape = tensor.shape};
}

}  // namespace

Backend optimizer_on_host() {
  KernelTable kernels;
  add_adamw_cpu(kernels);
  add_add_cpu(kernels);
  add_bf16_sum_cpu(kernels);
  add_collective_cpu(kernels);
  add_grad_norm_cpu(kernels);
  add_muon_cpu(kernels);
  add_newton_schulz_cpu(kernels);
  add_quantize_blocks_cpu(kernels);
  add_scale_rows_cpu(kernels);
  return kernels;
}

Optimizer::Optimizer(const std::vector<Parameter>& parameters, const OptimizerOptions& options,
                     const Backend& backend, UpdateGroups groups)
    : backend_(backend),
      host_backend_(optimizer_on_host()),
      options_(options),
      sum_of_squares_(make_sum_of_squares()),
      grad_clip_(make_grad_clip()),
      cast_(make_quantize_blocks()),
      widen_(make_sum_bf16_parts(1)),
      groups_(complete(std::move(groups), parameters.size())) {
  std::vector<ValueType> grads;
  for (const Parameter& parameter : parameters) {
    check_parameter(parameter);
    grads.push_back(type_of(flat(parameter.grad)));
  }
  Device& device = backend_.device();
  host_times_.resize(groups_.groups.size());
  if (groups_.updated_on_host) {
    host_ = std::make_unique<HostUpdates>(parameters, options_.formats, groups_, device);
  } else if (groups_.on_host) {
    windows_ = std::make_unique<StateWindows>(
        list_group_bytes(parameters, options_.formats, groups_), device);
  } else {
    state_ = Buffer(state_bytes(parameters, options_.formats), "optimizer state", device);
  }
  workspace_ =
      Buffer(backend_.workspace_bytes(*sum_of_squares_, grads), "the gradient norm", device);
  place_slots(parameters);
  place_row_factors();
  muon_workspace_ = Buffer(workspace_bytes(kinds_), "Muon's matrices", device);
  shared_ = make_step_tensors(MemoryKind::kShared);
  own_ = make_step_tensors(MemoryKind::kOwn);
  reset_masters();
}

Optimizer::~Optimizer() = default;

/// The state lies in the order of the groups, so that a group's is one run of bytes.
void Optimizer::place_slots(const std::vector<Parameter>& parameters) {
  std::vector<int64_t> offsets(parameters.size());
  std::vector<size_t> group_of(parameters.size());
  int64_t offset = 0;
  for (size_t group = 0; group < groups_.groups.size(); ++group) {
    for (const size_t idx : groups_.groups[group]) {
      group_of[idx] = group;
      offsets[idx] = offset;
      offset += layout_state(parameters[idx], options_.formats).num_bytes;
    }
  }
  for (size_t idx = 0; idx < parameters.size(); ++idx) {
    slots_.push_back(make_slot(parameters[idx], offsets[idx]));
    slots_.back().group = group_of[idx];
    find_kinds(slots_.back());
  }
}

Optimizer::StepTensors Optimizer::make_step_tensors(MemoryKind kind) const {
  const std::array<ValueType, 5> types = {{{DType::kF64, {std::ssize(slots_)}},
                                           {DType::kF64, {2}},
                                           {DType::kF64, {2}},
                                           {DType::kF32, {2}},
                                           {DType::kF32, {std::ssize(kinds_), kNumFactors}}}};
  int64_t bytes = 0;
  for (const ValueType& type : types) bytes += align_up(type.num_bytes());
  StepTensors tensors{.memory = Buffer(bytes, "an update's factors", backend_.device(), kind)};
  int64_t offset = 0;
  size_t next = 0;
  for (Tensor* tensor :
       {&tensors.sums, &tensors.limits, &tensors.norm, &tensors.grad_scale, &tensors.factors}) {
    const ValueType& type = types[next++];
    *tensor = tensors.memory.tensor(offset, type.dtype, type.shape);
    offset += align_up(type.num_bytes());
  }
  return tensors;
}

void Optimizer::run_kernel(const Backend& backend, const Operator& op,
                           std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                           std::span<std::byte> workspace, const UpdateObserver& observer) {
  const std::vector<const int64_t*> no_extents(inputs.size());
  Device& device = backend.device();
  const Device::Mark begin = observer ? device.mark() : 0;
  backend.kernel(op)(op, {.inputs = inputs,
                          .outputs = outputs,
                          .workspace = workspace,
                          .extents = no_extents,
                          .context = backend.context()});
  if (!observer) return;
  device.when_known(begin, device.mark(),
                    [observer, &op](auto from, auto to) { observer(op.name(), from, to); });
}

void Optimizer::find_kinds(Slot& slot) {
  slot.kinds = slot.parameter.has_second_moment()
                   ? std::vector{find_adamw(slot.parameter)}
                   : find_muon(slot.parameter, options_, backend_, kinds_);
}

size_t Optimizer::find_adamw(const Parameter& parameter) {
  const AdamWSpec spec = {
      .beta1 = options_.beta1,
      .beta2 = options_.beta2,
      .eps = options_.eps,
      .weight_decay = parameter.is_decayed(options_.decay_all) ? options_.weight_decay : 0.0,
      .bf16_weight = parameter.weight.dtype == DType::kBF16,
      .bf16_grad = parameter.grad.dtype == DType::kBF16,
      .formats = parameter.kept(options_.formats)};
  const auto found = std::ranges::find_if(kinds_, [&](const Kind& kind) {
    if (kind.muon) return false;
    const AdamWSpec& own = static_cast<const AdamW&>(*kind.adamw).spec();
    return own.weight_decay == spec.weight_decay && own.bf16_weight == spec.bf16_weight &&
           own.bf16_grad == spec.bf16_grad && own.formats == spec.formats &&
           kind.lr_multiplier == parameter.lr_multiplier;
  });
  if (found != kinds_.end()) return found - kinds_.begin();
  kinds_.push_back({make_adamw(spec), std::nullopt, parameter.lr_multiplier});
  return kinds_.size() - 1;
}

Optimizer::Slot Optimizer::make_slot(const Parameter& parameter, int64_t state_offset) const {
  const StateFormats formats = parameter.kept(options_.formats);
  const StateLayout layout = layout_state(parameter, formats);
  const Tensor& weight = parameter.weight;
  const auto state = [&](int64_t offset, DType dtype) {
    return offset < 0 ? Tensor()
                      : state_memory().tensor(state_offset + offset, dtype, weight.shape);
  };
  const auto scales = [&](int64_t offset) {
    if (offset < 0) return Tensor();
    return state_memory().tensor(state_offset + offset, DType::kU8, shape_of_scales(weight.shape));
  };
  const MasterKind beside = formats.master_of(weight.dtype);
  const DType master_type = parameter.is_fp8() ? DType::kF32 : master_dtype(beside);
  const Tensor master = layout.master >= 0 ? state(layout.master, master_type) : weight;
  Parameter seen = parameter;
  if (parameter.is_fp8()) seen.weight = master;
  return {.parameter = std::move(seen),
          .cast = parameter.is_fp8() ? weight : Tensor(),
          .cast_scales = parameter.is_fp8() ? parameter.scales : Tensor(),
          .master = master,
          .m = state(layout.m, moment_dtype(formats.first_moment)),
          .v = state(layout.v, moment_dtype(formats.second_moment)),
          .m_scale = scales(layout.m_scale),
          .v_scale = scales(layout.v_scale),
          .kinds = {},
          .beside = beside,
          .formats = formats};
}

/// A parameter with its state where update() finds it.
Optimizer::Slot Optimizer::at_work(size_t parameter) const {
  Slot slot = slots_[parameter];
  if (host_) return in_window(std::move(slot), parameter);
  if (!windows_) return slot;
  if (slot.beside != MasterKind::kNone || slot.cast)
    slot.master = windows_->in_window(slot.master, slot.group);
  if (slot.cast) slot.parameter.weight = slot.master;
  slot.m = windows_->in_window(slot.m, slot.group);
  for (Tensor* const own : {&slot.v, &slot.m_scale, &slot.v_scale}) {
    if (*own) *own = windows_->in_window(*own, slot.group);
  }
  return slot;
}

/// Gives the device the sums of squares, and returns where they will be, from place `first` on.
Tensor Optimizer::give_sums(std::span<const Tensor> grads, const UpdateObserver& observer,
                            int64_t first) {
  ensure(first + grads.size() <= slots_.size(), "{} gradients of {} parameters",
         first + grads.size(), slots_.size());
  Tensor sums = own_.sums;
  sums.data = sums.as<double>() + first;
  sums.shape = {std::ssize(grads)};
  if (grads.empty()) return sums;
  std::vector<Tensor> inputs;
  for (const Tensor& grad : grads) inputs.push_back(flat(grad));
  run_kernel(*sum_of_squares_, inputs, std::span(&sums, 1), workspace_.bytes(), observer);
  return sums;
}

std::vector<double> Optimizer::sums_of_squares(std::span<const Tensor> grads,
                                               const UpdateObserver& observer) {
  return read_sums(give_sums(grads, observer));
}

std::vector<double> Optimizer::read_sums(const Tensor& sums) {
  backend_.device().copy(shared_.sums.data, sums.data, sums.num_bytes());
  backend_.device().synchronize();
  const auto known = shared_.sums.span<double>().first(sums.num_elements());
  return {known.begin(), known.end()};
}

std::vector<Tensor> Optimizer::all_grads() const {
  std::vector<Tensor> grads;
  for (const Slot& slot : slots_) grads.push_back(slot.parameter.grad);
  return grads;
}

double Optimizer::grad_norm(double grad_scale) {
  double total = 0;
  for (const double sum : sums_of_squares(all_grads())) total += sum;
  return norm_of(total, grad_scale);
}

StepResult Optimizer::judge(double sum_of_squares, const StepInput& input) {
  StepResult result = {.grad_norm = norm_of(sum_of_squares, input.grad_scale)};
  result.updated = std::isfinite(result.grad_norm);
  if (result.updated) result.clip_factor = clip_factor(result.grad_norm, input.max_grad_norm);
  return result;
}

void Optimizer::prepare(const StepInput& input) {
  double* const limits = shared_.limits.as<double>();
  limits[0] = input.grad_scale;
  limits[1] = input.max_grad_norm;
  float* next = shared_.factors.as<float>();
  const auto put = [&](const auto& factors) {
    std::memcpy(next, &factors, sizeof(factors));
    next += kNumFactors;
  };
  for (const Kind& kind : kinds_) {
    const double lr = input.lr * kind.lr_multiplier;
    const int64_t update = input.step_idx + 1;
    if (kind.muon) {
      put(kind.muon->factors(lr, update));
    } else {
      put(make_adamw_factors(static_cast<const AdamW&>(*kind.adamw).spec(), lr, update));
    }
  }
}

void Optimizer::give_clip(std::span<const Tensor> grads, std::span<const Tensor> losses,
                          const UpdateObserver& observer) {
  std::vector<Tensor> inputs = {give_sums(grads, observer), shared_.limits};
  inputs.insert(inputs.end(), losses.begin(), losses.end());
  const Tensor outputs[] = {shared_.norm, own_.grad_scale};
  run_kernel(*grad_clip_, inputs, outputs, {}, observer);
  give_factors();
}

void Optimizer::give_factors() {
  backend_.device().copy(own_.factors.data, shared_.factors.data, own_.factors.num_bytes());
}

void Optimizer::give_group_clip(size_t group, const UpdateObserver& observer) {
  int64_t first = 0;
  for (size_t before = 0; before < group; ++before) first += std::ssize(groups_.groups[before]);
  std::vector<Tensor> grads;
  for (const size_t idx : groups_.groups.at(group)) grads.push_back(slots_[idx].parameter.grad);
  const Tensor inputs[] = {give_sums(grads, observer, first), shared_.limits};
  const Tensor outputs[] = {own_.norm, own_.grad_scale};
  run_kernel(*grad_clip_, inputs, outputs, {}, observer);
}

std::vector<double> Optimizer::group_sums() {
  return read_sums(own_.sums);
}

void Optimizer::give_norm(std::span<const Tensor> losses, const UpdateObserver& observer) {
  std::vector<Tensor> inputs = {own_.sums, shared_.limits};
  inputs.insert(inputs.end(), losses.begin(), losses.end());
  const Tensor outputs[] = {shared_.norm, own_.grad_scale};
  run_kernel(*grad_clip_, inputs, outputs, {}, observer);
}

StepResult Optimizer::clip_result() const {
  const double* const norm = shared_.norm.as<double>();
  return {.grad_norm = norm[0], .clip_factor = norm[1], .updated = std::isfinite(norm[0])};
}

void Optimizer::give_factors(double grad_scale, const StepResult& result) {
  float* const own = shared_.grad_scale.as<float>();
  own[0] = static_cast<float>(grad_scale * result.clip_factor);
  own[1] = result.updated ? 0.0F : 1.0F;
  Device& device = backend_.device();
  device.copy(own_.grad_scale.data, own, own_.grad_scale.num_bytes());
  give_factors();
}

StepResult Optimizer::step(const StepInput& input) {
  prepare(input);
  give_clip(all_grads(), {}, input.observer);
  backend_.device().synchronize();
  for (size_t group = 0; group < groups_.groups.size(); ++group)
    update_group(group, input.observer);
  if (windows_) backend_.device().synchronize();
  return clip_result();
}

void Optimizer::update(std::span<const size_t> parameters, const UpdateObserver& observer) const {
  ensure(!host_, "optimizer: the device is to update what the host does");
  update(on_device(), parameters, observer);
}

void Optimizer::update(const Updater& updater, std::span<const size_t> parameters,
                       const UpdateObserver& observer) const {
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    if (kinds_[kind].muon) {
      update_by_muon(kind, parameters, observer);
    } else {
      update_by_adamw(updater, kind, parameters, observer);
    }
  }
  for (const size_t idx : parameters) {
    if (slots_[idx].scales_now) scale_rows(idx, observer);
  }
  for (const size_t idx : parameters) cast_weight(idx, observer);
}

void Optimizer::cast_weight(size_t parameter, const UpdateObserver& observer) const {
  const Slot slot = at_work(parameter);
  if (!slot.cast) return;
  const Tensor outputs[] = {slot.cast, slot.cast_scales};
  run_kernel(worker(), *cast_, std::span(&slot.master, 1), outputs, {}, observer);
}

void Optimizer::place_row_factors() {
  const auto bytes_of = [](const Slot& slot) {
    const int64_t rows = slot.parameter.scales_rows ? slot.parameter.weight.shape[0] : 0;
    return align_up(rows * dtype_size(DType::kF32));
  };
  int64_t bytes = 0;
  for (const Slot& slot : slots_) bytes += bytes_of(slot);
  if (bytes == 0) return;
  row_factors_ = Buffer(bytes, "factors of rows", backend_.device(), MemoryKind::kShared);
  int64_t offset = 0;
  for (Slot& slot : slots_) {
    if (bytes_of(slot) == 0) continue;
    const Tensor& weight = slot.parameter.weight;
    slot.row_factors = row_factors_.tensor(offset, DType::kF32, {weight.shape[0]});
    slot.row_scaling =
        make_scale_rows(weight.dtype, slot.beside, weight.num_elements() / weight.shape[0]);
    offset += bytes_of(slot);
  }
}

void Optimizer::set_row_factors(
    const std::function<void(size_t parameter, std::span<float> factors)>& fill) {
  for (size_t idx = 0; idx < slots_.size(); ++idx) {
    Slot& slot = slots_[idx];
    if (!slot.row_factors) continue;
    const auto factors = slot.row_factors.span<float>();
    std::ranges::fill(factors, 1.0F);
    fill(idx, factors);
    slot.scales_now = std::ranges::any_of(factors, [](float factor) { return factor != 1.0F; });
  }
}

void Optimizer::scale_rows(size_t parameter, const UpdateObserver& observer) const {
  const Slot slot = at_work(parameter);
  const int64_t rows = slot.row_factors.num_elements();
  const int64_t columns = slot.parameter.weight.num_elements() / rows;
  const auto by_rows = [&](Tensor tensor) {
    tensor.shape = {rows, columns};
    return tensor;
  };
  std::vector<Tensor> outputs = {by_rows(slot.master)};
  if (slot.beside != MasterKind::kNone) outputs.push_back(by_rows(slot.parameter.weight));
  run_kernel(worker(), *slot.row_scaling, std::span(&slot.row_factors, 1), outputs, {}, observer);
}

Tensor Optimizer::factors_of(size_t kind, const Tensor& all) {
  Tensor factors = all;
  factors.data = factors.as<float>() + static_cast<int64_t>(kind) * kNumFactors;
  factors.shape = {kNumFactors};
  return factors;
}

void Optimizer::update_by_adamw(const Updater& updater, size_t kind,
                                std::span<const size_t> parameters,
                                const UpdateObserver& observer) const {
  std::vector<Tensor> inputs, outputs;
  for (const size_t idx : parameters) {
    const Slot slot = at_work(idx);
    if (!slot.parameter.has_second_moment() || slot.kinds.front() != kind) continue;
    const auto arranged = [&](const Tensor& tensor) {
      return slot.formats.have_scales() ? tensor : flat(tensor);
    };
    inputs.push_back(arranged(slot.parameter.grad));
    for (const Tensor& tensor : {slot.master, slot.m, slot.v}) outputs.push_back(arranged(tensor));
    if (slot.beside != MasterKind::kNone) outputs.push_back(arranged(slot.parameter.weight));
    if (has_scales(slot.formats.first_moment)) outputs.push_back(slot.m_scale);
    if (has_scales(slot.formats.second_moment)) outputs.push_back(slot.v_scale);
  }
  if (inputs.empty()) return;
  inputs.push_back(factors_of(kind, updater.factors));
  inputs.push_back(updater.grad_scale);
  run_kernel(updater.backend, *kinds_[kind].adamw, inputs, outputs, {}, observer);
}

int64_t Optimizer::state_bytes(std::span<const Parameter> parameters, const StateFormats& formats) {
  int64_t total = 0;
  for (const Parameter& parameter : parameters) total += layout_state(parameter, formats).num_bytes;
  return total;
}

int64_t Optimizer::window_bytes(std::span<const Parameter> parameters, const StateFormats& formats,
                                const UpdateGroups& groups) {
  if (!groups.on_host || groups.updated_on_host) return 0;
  return StateWindows::window_bytes(
      list_group_bytes(parameters, formats, complete(groups, parameters.size())));
}

}  // namespace tessera

#include "optim/sharded/fully_sharded.h"

#include <algorithm>
#include <numeric>

namespace tessera {
namespace {

std::vector<ReplicaPlace> places_of(const std::vector<ShardGroup>& groups) {
  std::vector<ReplicaPlace> places;
  for (const ShardGroup& group : groups)
    places.push_back({group.shard->size(), group.shard->rank()});
  return places;
}

std::vector<Shape> shapes_of(const std::vector<ReplicatedParameter>& parameters) {
  std::vector<Shape> shapes;
  for (const ReplicatedParameter& p : parameters) shapes.push_back(p.parameter.weight.shape);
  return shapes;
}

/// A parameter in the memory of its unit.
Tensor whole(std::byte* unit_memory, const ShardUnit& unit, size_t idx, DType dtype,
             const Shape& shape) {
  return {unit_memory + unit.bucket.offsets[idx] * dtype_size(dtype), dtype, shape};
}

/// Rows of a parameter in the memory of this rank's share of its unit.
Tensor rows_of_share(std::byte* share, const ShardUnit& unit, const Tensor& parameter, size_t idx,
                     IndexRange rows) {
  if (rows.count == 0) return take_rows({share, parameter.dtype, parameter.shape}, rows);
  const int64_t before = (unit.bucket.offsets[idx] - unit.own.begin) * dtype_size(parameter.dtype);
  return take_rows({share + before, parameter.dtype, parameter.shape}, rows);
}

/// What the names of parameters begin with alike, without a "." at its end.
std::string common_name(std::span<const ReplicatedParameter> parameters,
                        const std::vector<size_t>& module) {
  if (module.empty()) return "";
  std::string_view common = parameters[module.front()].parameter.name;
  for (const size_t idx : module) {
    const std::string& name = parameters[idx].parameter.name;
    const auto differs = std::ranges::mismatch(common, name).in1;
    common = common.substr(0, differs - common.begin());
  }
  if (module.size() > 1) common = common.substr(0, common.rfind('.'));
  return std::string(common);
}

/// What a rank's optimizer has of each parameter.
std::vector<Parameter> list_held(const std::vector<ShardGroup>& groups, const ShardPlan& plan,
                                 std::span<const ReplicatedParameter> parameters) {
  std::vector<Parameter> held;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i].parameter;
    const ShardUnit& unit = plan.unit_of(i);
    held.push_back(
        take_rows(parameter, share_rows(unit.bucket, plan.places[i].idx, parameter.weight.shape,
                                        groups[unit.group].shard->rank())));
  }
  return held;
}

BucketReduction make_reduction(const std::vector<ShardGroup>& groups, const ShardUnit& unit,
                               GradientCompression compression, const GradientMath& math) {
  return {{.outer = groups[unit.group].shard}, unit.bucket, compression, math};
}

/// The staging of the first `num_units` units of a module.
int64_t count_staging(const std::vector<ShardGroup>& groups, const ShardModule& module,
                      size_t num_units, GradientCompression compression, const GradientMath& math) {
  int64_t bytes = 0;
  for (const ShardUnit& unit : std::span(module.units).first(num_units)) {
    if (unit.is_sharded) bytes += make_reduction(groups, unit, compression, math).staging_bytes();
  }
  return bytes;
}

/// That of the module that needs most.
int64_t max_staging(const std::vector<ShardGroup>& groups, const ShardPlan& plan,
                    GradientCompression compression, const GradientMath& math) {
  int64_t bytes = 0;
  for (const ShardModule& module : plan.modules)
    bytes = std::max(bytes, count_staging(groups, module, module.units.size(), compression, math));
  return bytes;
}

}  // namespace

FullySharded::FullySharded(std::vector<ShardGroup> groups,
                           std::vector<ReplicatedParameter> parameters,
                           const std::vector<std::vector<size_t>>& modules, CommunicatorPtr world,
                           const OptimizerOptions& options, const FullShardingOptions& sharding,
                           const Backend& backend)
    : groups_(std::move(groups)),
      shapes_(shapes_of(parameters)),
      plan_(plan_shards(places_of(groups_), parameters, modules)),
      compression_(sharding.compression),
      math_(backend),
      weights_(plan_.weight_shard_bytes, "shares of weights", device()),
      gradients_(plan_.grad_shard_bytes, "shares of gradients", device()),
      weight_buffers_(sharding.weight_buffers * plan_.max_weight_bytes(), "gathered weights",
                      device()),
      gradient_buffers_(sharding.gradient_buffers * plan_.max_grad_bytes(), "gradients of modules",
                        device()) {
  ensure(sharding.weight_buffers > 0 && sharding.gradient_buffers > 0,
         "full sharding with {} and {} buffers", sharding.weight_buffers,
         sharding.gradient_buffers);
  make_slots(sharding);
  make_state(parameters, std::move(world), options, backend);
}

void FullySharded::make_slots(const FullShardingOptions& sharding) {
  const int64_t staging_bytes = max_staging(groups_, plan_, compression_, math_);
  staging_ =
      Buffer(sharding.gradient_buffers * staging_bytes, "the staging of gradients", device());
  for (int64_t i = 0; i < sharding.weight_buffers; ++i)
    weight_slots_.push_back({.memory = weight_buffers_.data() + i * plan_.max_weight_bytes()});
  for (int64_t i = 0; i < sharding.gradient_buffers; ++i) {
    gradient_slots_.push_back({.memory = gradient_buffers_.data() + i * plan_.max_grad_bytes(),
                               .staging = staging_.data() + i * staging_bytes});
  }
}

void FullySharded::make_state(const std::vector<ReplicatedParameter>& parameters,
                              CommunicatorPtr world, const OptimizerOptions& options,
                              const Backend& backend) {
  std::vector<HeldParameter> held;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ReplicatedParameter& p = parameters[i];
    const ShardUnit& unit = plan_.unit_of(i);
    const ShardGroup& group = groups_[unit.group];
    const size_t idx = plan_.places[i].idx;
    const IndexRange rows = share_rows(unit.bucket, idx, shapes_[i], group.shard->rank());
    const bool owns = !group.replicas || group.replicas->rank() == 0;
    const Tensor weight = {nullptr, unit.dtype, shapes_[i]};
    const Tensor grad = {nullptr, DType::kF32, shapes_[i]};
    held.push_back({.parameter = p.parameter,
                    .slice = p.slice.take_rows(rows.begin, rows.count),
                    .owned = {0, owns ? rows.count : 0},
                    .names_empty = owns && group.shard->rank() == 0});
    held.back().parameter.weight =
        on_device(rows_of_share(weights_.data() + unit.weight_shard, unit, weight, idx, rows));
    held.back().parameter.grad =
        on_device(rows_of_share(gradients_.data() + unit.grad_shard, unit, grad, idx, rows));
    held.back().parameter.matrix_rows = take_matrices(p.parameter.matrix_rows, rows);
  }
  state_ = std::make_unique<HeldState>(std::move(held), std::move(world), options, backend);
}

Tensor FullySharded::on_device(Tensor tensor) const {
  if (!math_.is_host()) tensor.device = &device();
  return tensor;
}

FullySharded::Slot* FullySharded::find_free(std::vector<Slot>& slots) {
  const auto slot = std::ranges::find_if(slots, [](const Slot& s) { return !s.module; });
  return slot == slots.end() ? nullptr : &*slot;
}

FullySharded::Slot* FullySharded::find_weights(size_t module) {
  const auto slot = std::ranges::find(weight_slots_, module, &Slot::module);
  return slot == weight_slots_.end() ? nullptr : &*slot;
}

void FullySharded::begin_step() {
  device().zero(gradients_.data(), gradients_.num_bytes());
  finished_ = false;
}

void FullySharded::gather(size_t module) {
  if (plan_.modules[module].weight_bytes == 0 || find_weights(module) != nullptr) return;
  Slot* const slot = find_free(weight_slots_);
  ensure(slot != nullptr, "module {} is gathered while all {} buffers are in use", module,
         weight_slots_.size());
  slot->module = module;
  for (const ShardUnit& unit : plan_.modules[module].units) {
    if (!unit.is_sharded) continue;
    std::vector<int64_t> rows;
    const CommunicatorPtr& shard = groups_[unit.group].shard;
    for (int64_t i = 0; i < shard->size(); ++i) rows.push_back(unit.bucket.elements(i).count);
    const Tensor own = weights_.tensor(unit.weight_shard, unit.dtype, {unit.own.count});
    const Tensor all = math_.elements(slot->memory + unit.weight_offset, unit.dtype,
                                      {0, unit.bucket.num_elements()});
    slot->pending.push_back(shard->all_gather_v(own, all, rows));
  }
}

Tensor FullySharded::weight(size_t parameter) {
  const ShardUnit& unit = plan_.unit_of(parameter);
  const ShardPlan::Place& place = plan_.places[parameter];
  std::byte* memory = weights_.data() + unit.weight_shard;
  if (unit.is_sharded) {
    gather(place.module);
    Slot& slot = *find_weights(place.module);
    for (Pending& pending : slot.pending) pending.wait();
    memory = slot.memory + unit.weight_offset;
  }
  return on_device(whole(memory, unit, place.idx, unit.dtype, shapes_[parameter]));
}

void FullySharded::wait_gathering(size_t module) {
  Slot* const slot = find_weights(module);
  if (slot == nullptr) return;
  for (Pending& pending : slot->pending) pending.wait();
}

void FullySharded::release(size_t module) {
  Slot* const slot = find_weights(module);
  if (slot == nullptr) return;
  for (Pending& pending : slot->pending) pending.wait();
  slot->pending.clear();
  slot->module.reset();
}

FullySharded::Slot* FullySharded::find_gradients(size_t module) {
  const auto slot = std::ranges::find_if(
      gradient_slots_, [&](const Slot& s) { return s.module == module && s.turn == 0; });
  return slot == gradient_slots_.end() ? nullptr : &*slot;
}

FullySharded::Slot* FullySharded::oldest_reduction() {
  Slot* oldest = nullptr;
  for (Slot& slot : gradient_slots_) {
    if (slot.turn > 0 && (oldest == nullptr || slot.turn < oldest->turn)) oldest = &slot;
  }
  return oldest;
}

FullySharded::Slot& FullySharded::take_gradients(size_t module) {
  if (Slot* const slot = find_gradients(module)) return *slot;
  ensure(!finished_, "a gradient of module {} after gradients were finished", module);
  Slot* free = find_free(gradient_slots_);
  if (free == nullptr) {
    free = oldest_reduction();
    ensure(free != nullptr, "gradients of module {} while all {} buffers are in use", module,
           gradient_slots_.size());
    complete(*free);
  }
  free->module = module;
  free->added.assign(plan_.modules[module].units.size(), false);
  device().zero(free->memory, plan_.modules[module].grad_bytes);
  return *free;
}

Tensor FullySharded::gradient(size_t parameter) {
  const ShardUnit& unit = plan_.unit_of(parameter);
  const ShardPlan::Place& place = plan_.places[parameter];
  std::byte* memory = gradients_.data() + unit.grad_shard;
  if (unit.is_sharded) {
    Slot& slot = take_gradients(place.module);
    slot.added[place.unit] = true;
    memory = slot.memory + unit.grad_offset;
  }
  return on_device(whole(memory, unit, place.idx, DType::kF32, shapes_[parameter]));
}

BucketReduction FullySharded::reduction_of(const ShardUnit& unit) const {
  return make_reduction(groups_, unit, compression_, math_);
}

int64_t FullySharded::staging_before(const ShardModule& module, size_t unit) const {
  return count_staging(groups_, module, unit, compression_, math_);
}

template <typename Visit>
void FullySharded::for_each_added(const Slot& slot, const Visit& visit) const {
  const ShardModule& plan = plan_.modules[*slot.module];
  for (size_t u = 0; u < plan.units.size(); ++u) {
    if (!slot.added[u]) continue;
    const ShardUnit& unit = plan.units[u];
    visit(unit, slot.memory + unit.grad_offset, slot.staging + staging_before(plan, u));
  }
}

void FullySharded::reduce(size_t module) {
  Slot* const slot = find_gradients(module);
  if (slot == nullptr) return;
  for_each_added(*slot, [&](const ShardUnit& unit, std::byte* memory, std::byte* staging) {
    slot->pending.push_back(reduction_of(unit).start_outer(memory, staging));
  });
  slot->turn = ++num_reductions_;
}

void FullySharded::wait_reduction(size_t module) {
  Slot* const oldest = oldest_reduction();
  ensure(oldest != nullptr && oldest->module == module,
         "module {} is not the first that is reduced", module);
  complete(*oldest);
}

// In the order of the reductions, so that sums do not depend on timing.
void FullySharded::complete(Slot& slot) {
  for (Pending& pending : slot.pending) pending.wait();
  for_each_added(slot, [&](const ShardUnit& unit, std::byte* memory, std::byte* staging) {
    reduction_of(unit).finish(memory, staging);
    const Tensor sum = gradients_.tensor(unit.grad_shard, DType::kF32, {unit.own.count});
    math_.add(math_.elements(memory, DType::kF32, unit.own), sum);
  });
  slot.pending.clear();
  slot.module.reset();
  slot.turn = 0;
}

void FullySharded::finish_gradients() {
  if (finished_) return;
  while (Slot* const slot = oldest_reduction()) complete(*slot);
  for (const Slot& slot : gradient_slots_)
    ensure(!slot.module, "gradients of module {} are not reduced", slot.module.value_or(0));
  std::vector<Pending> pending;
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].num_replicas() == 1) continue;
    const IndexRange bytes = plan_.group_gradients[g];
    const Tensor sum =
        gradients_.tensor(bytes.begin, DType::kF32, {bytes.count / dtype_size(DType::kF32)});
    pending.push_back(groups_[g].replicas->all_reduce(sum, sum));
  }
  for (Pending& p : pending) p.wait();
  finished_ = true;
}

StepResult FullySharded::judge(const StepInput& input) {
  ensure(finished_, "gradients are judged before they are finished");
  for (const Slot& slot : weight_slots_)
    ensure(!slot.module, "a step while module {} is gathered", slot.module.value_or(0));
  return state_->judge(input);
}

void FullySharded::update(const StepInput& input) {
  std::vector<size_t> all(shapes_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  state_->update(all, input.observer);
}

StepResult FullySharded::step(const StepInput& input) {
  finish_gradients();
  const StepResult result = judge(input);
  if (result.updated) update(input);
  return result;
}

FullySharded::Bytes FullySharded::count_bytes(const std::vector<ShardGroup>& groups,
                                              std::span<const ReplicatedParameter> parameters,
                                              const std::vector<std::vector<size_t>>& modules,
                                              const FullShardingOptions& sharding,
                                              const OptimizerOptions& options,
                                              const Backend& backend) {
  const ShardPlan plan = plan_shards(places_of(groups), parameters, modules);
  const std::vector<Parameter> held = list_held(groups, plan, parameters);
  return {.weights = plan.weight_shard_bytes,
          .gradients = plan.grad_shard_bytes,
          .state = Optimizer::state_bytes(held, options.formats),
          .weight_buffers = sharding.weight_buffers * plan.max_weight_bytes(),
          .gradient_buffers = sharding.gradient_buffers * plan.max_grad_bytes(),
          .staging = sharding.gradient_buffers *
                     max_staging(groups, plan, sharding.compression, GradientMath(backend)),
          .workspace = Optimizer::workspace_bytes(held, options, backend)};
}

ShardedExchanges FullySharded::list_exchanges(const std::vector<ShardGroup>& groups,
                                              std::span<const ReplicatedParameter> parameters,
                                              const std::vector<std::vector<size_t>>& modules,
                                              const FullShardingOptions& sharding,
                                              const OptimizerOptions& options) {
  const ShardPlan plan = plan_shards(places_of(groups), parameters, modules);
  const std::vector<Parameter> held = list_held(groups, plan, parameters);
  const Bytes bytes = count_bytes(groups, parameters, modules, sharding, options);
  ShardedExchanges exchanges{.modules = {},
                             .module_of = {},
                             .weight_buffers = sharding.weight_buffers,
                             .gradient_buffers = sharding.gradient_buffers,
                             .max_weight_bytes = plan.max_weight_bytes(),
                             .max_gradient_bytes = plan.max_grad_bytes(),
                             .state_bytes = bytes.weights + bytes.gradients + bytes.state,
                             .update_flops = Optimizer::update_flops(held, options),
                             .replicas = {}};
  for (const ShardPlan::Place& place : plan.places) exchanges.module_of.push_back(place.module);
  for (const ShardModule& module : plan.modules) {
    ModuleExchange& exchange = exchanges.modules.emplace_back();
    exchange.name = common_name(parameters, modules[exchanges.modules.size() - 1]);
    exchange.gathered_bytes = module.weight_bytes;
    for (const ShardUnit& unit : module.units) {
      const int64_t elements = unit.bucket.num_elements();
      const int64_t gradient_bytes = elements * dtype_size(DType::kF32);
      exchange.units.push_back(
          {.parameters = unit.parameters,
           .shard = groups[unit.group].shard,
           .is_sharded = unit.is_sharded,
           .weight_bytes = elements * dtype_size(unit.dtype),
           .gradient_bytes = gradient_bytes,
           .reduced_bytes = travelling_bytes(gradient_bytes, DType::kF32, sharding.compression)});
    }
  }
  for (const ShardGroup& group : groups) {
    if (group.num_replicas() > 1) exchanges.replicas.push_back(group.replicas);
  }
  return exchanges;
}

FullySharded::Bytes FullySharded::bytes() const {
  return {.weights = weights_.num_bytes(),
          .gradients = gradients_.num_bytes(),
          .state = state_->state_bytes(),
          .weight_buffers = weight_buffers_.num_bytes(),
          .gradient_buffers = gradient_buffers_.num_bytes(),
          .staging = staging_.num_bytes(),
          .workspace = state_->workspace_bytes()};
}

}  // namespace tessera

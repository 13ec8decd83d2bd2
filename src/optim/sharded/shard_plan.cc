#include "optim/sharded/shard_plan.h"

#include <algorithm>

#include "core/memory.h"

namespace tessera {
namespace {

// Elements: 64 bytes of BF16.
constexpr int64_t kParameterAlignment = kAlignment / 2;

/// Sorts a module's parameters into units, in the order in which groups and types first occur.
/// `loads` are those of each group.
std::vector<ShardUnit> make_units(std::span<const ReplicaPlace> groups,
                                  std::span<const ReplicatedParameter> parameters,
                                  const std::vector<size_t>& module,
                                  std::vector<ShareLoads>& loads) {
  std::vector<ShardUnit> units;
  for (const size_t idx : module) {
    const ReplicatedParameter& p = parameters[idx];
    auto unit = std::ranges::find_if(units, [&](const ShardUnit& u) {
      return u.group == p.group && u.dtype == p.parameter.weight.dtype;
    });
    if (unit == units.end()) {
      unit = units.emplace(units.end());
      unit->group = p.group;
      unit->dtype = p.parameter.weight.dtype;
    }
    unit->parameters.push_back(idx);
  }
  for (ShardUnit& unit : units) {
    std::vector<CutTensor> tensors;
    for (const size_t idx : unit.parameters)
      tensors.push_back(cut_tensor(parameters[idx].parameter));
    const ReplicaPlace& place = groups[unit.group];
    unit.bucket = make_bucket(tensors, place.size, kParameterAlignment, loads[unit.group]);
    unit.is_sharded = place.size > 1 && unit.bucket.num_elements() > 0;
    unit.own = unit.bucket.elements(place.rank);
  }
  return units;
}

void place_in_module(ShardModule& module) {
  for (ShardUnit& unit : module.units) {
    if (!unit.is_sharded) continue;
    unit.weight_offset = module.weight_bytes;
    unit.grad_offset = module.grad_bytes;
    const int64_t elements = unit.bucket.num_elements();
    module.weight_bytes += align_up(elements * dtype_size(unit.dtype));
    module.grad_bytes += align_up(elements * dtype_size(DType::kF32));
  }
}

/// Weights module by module; gradients group by group, so that those of a group are one range.
void place_shards(ShardPlan& plan, size_t num_groups) {
  for (ShardModule& module : plan.modules) {
    for (ShardUnit& unit : module.units) {
      unit.weight_shard = plan.weight_shard_bytes;
      plan.weight_shard_bytes += align_up(unit.own.count * dtype_size(unit.dtype));
    }
  }
  for (size_t group = 0; group < num_groups; ++group) {
    const int64_t begin = plan.grad_shard_bytes;
    for (ShardModule& module : plan.modules) {
      for (ShardUnit& unit : module.units) {
        if (unit.group != group) continue;
        unit.grad_shard = plan.grad_shard_bytes;
        plan.grad_shard_bytes += align_up(unit.own.count * dtype_size(DType::kF32));
      }
    }
    plan.group_gradients.push_back({begin, plan.grad_shard_bytes - begin});
  }
}

void find_places(ShardPlan& plan) {
  for (size_t m = 0; m < plan.modules.size(); ++m) {
    for (size_t u = 0; u < plan.modules[m].units.size(); ++u) {
      const std::vector<size_t>& parameters = plan.modules[m].units[u].parameters;
      for (size_t k = 0; k < parameters.size(); ++k) plan.places[parameters[k]] = {m, u, k};
    }
  }
}

void check(std::span<const ReplicaPlace> groups, std::span<const ReplicatedParameter> parameters,
           const std::vector<std::vector<size_t>>& modules) {
  std::vector<int> count(parameters.size());
  for (const auto& module : modules) {
    for (const size_t idx : module) ++count.at(idx);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ReplicatedParameter& p = parameters[i];
    ensure(count[i] == 1, "full sharding: '{}' is in {} modules", p.parameter.name, count[i]);
    ensure(p.group < groups.size(), "full sharding: '{}' is in group {} of {}", p.parameter.name,
           p.group, groups.size());
    ensure(p.parameter.weight.shape == p.slice.shape(), "full sharding: '{}' has weight {} but {}",
           p.parameter.name, p.parameter.weight.shape.to_string(), p.slice.to_string());
  }
}

}  // namespace

const ShardUnit& ShardPlan::unit_of(size_t parameter) const {
  const Place& place = places[parameter];
  return modules[place.module].units[place.unit];
}

int64_t ShardPlan::max_weight_bytes() const {
  int64_t bytes = 0;
  for (const ShardModule& module : modules) bytes = std::max(bytes, module.weight_bytes);
  return bytes;
}

int64_t ShardPlan::max_grad_bytes() const {
  int64_t bytes = 0;
  for (const ShardModule& module : modules) bytes = std::max(bytes, module.grad_bytes);
  return bytes;
}

ShardPlan plan_shards(std::span<const ReplicaPlace> groups,
                      std::span<const ReplicatedParameter> parameters,
                      const std::vector<std::vector<size_t>>& modules) {
  check(groups, parameters, modules);
  ShardPlan plan;
  plan.places.resize(parameters.size());
  std::vector<ShareLoads> loads(groups.size());
  for (const auto& module : modules) {
    plan.modules.push_back({.units = make_units(groups, parameters, module, loads)});
    place_in_module(plan.modules.back());
  }
  place_shards(plan, groups.size());
  find_places(plan);
  return plan;
}

}  // namespace tessera

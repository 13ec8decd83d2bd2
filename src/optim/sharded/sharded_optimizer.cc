#include "optim/sharded/sharded_optimizer.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "optim/host_updates.h"

namespace tessera {
namespace {

std::vector<ReplicaPlace> places_of(const std::vector<ReplicaGroup>& groups) {
  std::vector<ReplicaPlace> places;
  for (const ReplicaGroup& group : groups) places.push_back({group.size(), group.rank()});
  return places;
}

void check(const ReplicatedParameter& p, size_t num_groups) {
  ensure(p.parameter.weight.shape == p.slice.shape(), "optimizer: '{}' has weight {} but {}",
         p.parameter.name, p.parameter.weight.shape.to_string(), p.slice.to_string());
  ensure(p.group < num_groups, "optimizer: '{}' is in replica group {} of {}", p.parameter.name,
         p.group, num_groups);
}

/// How parameters are told apart of which no bucket has several kinds.
enum class Parting : uint8_t { kNone, kByLayer, kEndsApart };

bool rounds_gradient(const Parameter& parameter) {
  return parameter.grad.dtype != DType::kF32;
}

/// Where gradients are released, layers are parts of their own, and the ends between them; where
/// those of layers are rounded, all layers are a part. Where ranks have parts of the same matrices
/// and are to own the same of them, all of what shares a bucket with these must have equal parts;
/// those of the vocabulary may not, so the ends are apart.
Parting parting_of(std::span<const ReplicatedParameter> parameters,
                   const ShardingOptions& sharding) {
  if (sharding.release_gradients) return Parting::kByLayer;
  const bool apart = std::ranges::any_of(parameters, [](const ReplicatedParameter& p) {
    return p.parameter.cut.num_parts() > 1 || rounds_gradient(p.parameter);
  });
  return apart ? Parting::kEndsApart : Parting::kNone;
}

CutTensor cut_tensor(const ReplicatedParameter& p, Parting parting) {
  CutTensor tensor = cut_tensor(p.parameter);
  if (!p.layer || parting == Parting::kNone) return tensor;
  tensor.part = parting == Parting::kByLayer ? 1 + *p.layer : 1;
  return tensor;
}

/// Which of the places that layers' gradients have in turn each layer of the list has.
std::map<int64_t, int64_t> find_turns(std::span<const size_t> list,
                                      std::span<const ReplicatedParameter> parameters,
                                      const ShardingOptions& sharding) {
  std::set<int64_t> layers;
  for (const size_t idx : list) {
    if (parameters[idx].layer) layers.insert(*parameters[idx].layer);
  }
  std::map<int64_t, int64_t> turns;
  for (const int64_t layer : layers)
    turns.emplace(layer, std::ssize(turns) % sharding.layers_at_a_time);
  return turns;
}

int64_t bucket_bytes(const ShardingOptions& sharding) {
  return sharding.release_gradients ? std::numeric_limits<int64_t>::max() : sharding.bucket_bytes;
}

}  // namespace

std::vector<ShardedOptimizer::Group> ShardedOptimizer::cut(
    std::span<const ReplicaPlace> places, std::span<const ReplicatedParameter> parameters,
    const ShardingOptions& sharding) {
  std::vector<Group> groups(places.size());
  std::vector<std::vector<CutTensor>> tensors(places.size());
  const Parting parting = parting_of(parameters, sharding);
  for (size_t i = 0; i < parameters.size(); ++i) {
    check(parameters[i], places.size());
    groups[parameters[i].group].parameters.push_back(i);
    tensors[parameters[i].group].push_back(cut_tensor(parameters[i], parting));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].place = places[g];
    groups[g].buckets = make_buckets(tensors[g], bucket_bytes(sharding), places[g].size);
  }
  return groups;
}

std::vector<ShardedOptimizer::Rows> ShardedOptimizer::find_rows(
    const std::vector<Group>& groups, std::span<const ReplicatedParameter> parameters,
    const ShardingOptions& sharding) {
  std::vector<Rows> rows(parameters.size());
  for (const Group& group : groups) {
    for (const Bucket& bucket : group.buckets) {
      for (int64_t k = 0; k < bucket.parameters.count; ++k) {
        const size_t idx = group.parameters[bucket.parameters.begin + k];
        const Shape& shape = parameters[idx].parameter.weight.shape;
        const IndexRange owned = share_rows(bucket, k, shape, group.place.rank);
        rows[idx] = {owned, sharding.shard_state ? owned : IndexRange{0, shape[0]}};
      }
    }
  }
  return rows;
}

ShardedOptimizer::ShardedOptimizer(std::vector<ReplicaGroup> groups,
                                   std::vector<ReplicatedParameter> parameters,
                                   CommunicatorPtr world, const OptimizerOptions& options,
                                   const ShardingOptions& sharding, const Backend& backend)
    : parameters_(std::move(parameters)),
      sharding_(sharding),
      groups_(cut(places_of(groups), parameters_, sharding)),
      rows_(find_rows(groups_, parameters_, sharding)),
      in_group_(parameters_.size()) {
  make_state(std::move(world), options, backend);
  for (size_t g = 0; g < groups_.size(); ++g) connect(groups_[g], groups[g], backend);
  buckets_ = order_buckets(groups_);
  exchanges_ = list_exchanges(groups, parameters_, sharding, options);
  clipped_ = backend.device().make_event();
}

void ShardedOptimizer::make_state(CommunicatorPtr world, const OptimizerOptions& options,
                                  const Backend& backend) {
  std::vector<HeldParameter> held;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ReplicatedParameter& p = parameters_[i];
    const Rows& rows = rows_[i];
    held.push_back({.parameter = take_rows(p.parameter, rows.held),
                    .slice = p.slice.take_rows(rows.held.begin, rows.held.count),
                    .owned = {rows.owned.begin - rows.held.begin, rows.owned.count},
                    .names_empty = groups_[p.group].place.rank == 0});
  }
  state_ = std::make_unique<HeldState>(std::move(held), std::move(world), options, backend,
                                       list_updates(groups_, sharding_));
}

/// The parameters of each bucket, in the order of buckets_.
UpdateGroups ShardedOptimizer::list_updates(const std::vector<Group>& groups,
                                            const ShardingOptions& sharding) {
  UpdateGroups updates{
      .groups = {}, .on_host = sharding.state_on_host, .updated_on_host = sharding.updates_on_host};
  for (const BucketPlace& place : order_buckets(groups)) {
    const Group& group = groups[place.group];
    const IndexRange& range = group.buckets[place.bucket].parameters;
    const auto first = group.parameters.begin() + range.begin;
    updates.groups.emplace_back(first, first + range.count);
  }
  return updates;
}

StateWindows* ShardedOptimizer::windows() const {
  return state_->optimizer().streams_state() ? &state_->optimizer().windows() : nullptr;
}

ShardedOptimizer::Tensors ShardedOptimizer::list_tensors(
    const Group& group, std::span<const ReplicatedParameter> parameters) {
  Tensors tensors;
  for (const size_t idx : group.parameters) {
    const Parameter& parameter = parameters[idx].parameter;
    tensors.weights.push_back(parameter.weight);
    tensors.scales.push_back(parameter.is_fp8() ? parameter.scales
                                                : Tensor{.data = nullptr, .shape = {0}});
    tensors.grads.push_back(parameter.grad);
  }
  return tensors;
}

void ShardedOptimizer::connect(Group& group, const ReplicaGroup& replicas, const Backend& backend) {
  for (size_t k = 0; k < group.parameters.size(); ++k) in_group_[group.parameters[k]] = k;
  const Tensors tensors = list_tensors(group, parameters_);
  group.reducer = std::make_unique<GradientReducer>(replicas, group.buckets, tensors.grads,
                                                    sharding_.reduction, backend);
  group.gatherer =
      std::make_unique<ShareGatherer>(replicas, group.buckets, tensors.gathered(sharding_),
                                      sharding_.reduction.buckets_in_flight, backend.device());
}

std::vector<ShardedOptimizer::BucketPlace> ShardedOptimizer::order_buckets(
    const std::vector<Group>& groups) {
  std::vector<BucketPlace> buckets;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t b = 0; b < groups[g].buckets.size(); ++b) buckets.push_back({g, b});
  }
  std::ranges::sort(buckets, {}, [&](const BucketPlace& place) {
    const Group& group = groups[place.group];
    const IndexRange& parameters = group.buckets[place.bucket].parameters;
    return group.parameters[parameters.begin];
  });
  return buckets;
}

ReplicatedExchanges ShardedOptimizer::list_exchanges(
    const std::vector<ReplicaGroup>& groups, std::span<const ReplicatedParameter> parameters,
    const ShardingOptions& sharding, const OptimizerOptions& options) {
  const std::vector<Group> all = cut(places_of(groups), parameters, sharding);
  const std::vector<Rows> rows = find_rows(all, parameters, sharding);
  ReplicatedExchanges exchanges{
      .buckets = {}, .shard_state = sharding.shard_state, .releases = sharding.release_gradients};
  exchanges.updates_on_host = sharding.updates_on_host;
  const bool streams = sharding.state_on_host && !sharding.updates_on_host;
  if (streams) exchanges.windows = {0, 0};
  std::vector<std::map<int64_t, int64_t>> turns;
  for (const Group& group : all)
    turns.push_back(find_turns(group.parameters, parameters, sharding));
  for (const BucketPlace& place : order_buckets(all)) {
    const Group& group = all[place.group];
    BucketExchange bucket{.group = place.group,
                          .idx = static_cast<int64_t>(place.bucket),
                          .parameters = {},
                          .outer = groups[place.group].outer,
                          .inner = groups[place.group].inner};
    std::vector<Parameter> held;
    const IndexRange& range = group.buckets[place.bucket].parameters;
    for (int64_t k = range.begin; k < range.begin + range.count; ++k) {
      const size_t idx = group.parameters[k];
      const Parameter& parameter = parameters[idx].parameter;
      bucket.parameters.push_back(idx);
      bucket.shares_gradients = sharding.release_gradients && parameters[idx].layer;
      if (bucket.shares_gradients) bucket.turn = turns[place.group].at(*parameters[idx].layer);
      bucket.weight_bytes += parameter.weight_bytes();
      bucket.gradient_bytes += parameter.grad.num_bytes();
      bucket.reduced_bytes += travelling_bytes(parameter.grad.num_bytes(), parameter.grad.dtype,
                                               sharding.reduction.compression);
      bucket.rounds_gradients = rounds_gradient(parameter);
      held.push_back(take_rows(parameter, rows[idx].held));
      bucket.bytes_to_host += HostUpdates::bytes_in(held.back(), options.formats);
      bucket.bytes_from_host += HostUpdates::bytes_out(held.back());
    }
    bucket.state_bytes = Optimizer::state_bytes(held, options.formats);
    bucket.update_flops = Optimizer::update_flops(held, options);
    if (streams) {
      int64_t& window = exchanges.windows[StateWindows::window_of(exchanges.buckets.size())];
      window = std::max(window, bucket.state_bytes);
    }
    exchanges.buckets.push_back(std::move(bucket));
  }
  return exchanges;
}

void ShardedOptimizer::poll() {
  for (Group& group : groups_) {
    group.reducer->poll();
    group.gatherer->poll();
  }
}

// Operations on one communicator must start in the same order on all ranks, so the gathering of the
// last step must have come to its end.
void ShardedOptimizer::begin_reducing() {
  if (phase_ != Phase::kIdle) return;
  wait_all_weights();
  phase_ = Phase::kReducing;
}

void ShardedOptimizer::ready(size_t idx) {
  ensure(phase_ != Phase::kReduced, "optimizer: gradient of '{}' is ready after they were reduced",
         parameters_[idx].parameter.name);
  begin_reducing();
  group_of(idx).reducer->ready(in_group_[idx]);
  poll();
}

void ShardedOptimizer::finish_gradients() {
  if (phase_ == Phase::kReduced) return;
  begin_reducing();
  for (Group& group : groups_) group.reducer->finish();
  if (!sharding_.shard_state) gather_all();
  phase_ = Phase::kReduced;
}

void ShardedOptimizer::discard_gradients() {
  finish_gradients();
  phase_ = Phase::kIdle;
}

void ShardedOptimizer::gather_all() {
  for (const BucketPlace& place : buckets_) groups_[place.group].gatherer->start(place.bucket);
  for (Group& group : groups_) group.gatherer->wait_all();
}

void ShardedOptimizer::wait_reduction(size_t bucket) {
  const BucketPlace& place = buckets_.at(bucket);
  groups_[place.group].reducer->wait(place.bucket);
}

StepResult ShardedOptimizer::judge(const StepInput& input) {
  if (sharding_.release_gradients) {
    discard_gradients();
    return state_->judge_updated(input);
  }
  ensure(phase_ == Phase::kReduced, "optimizer: gradients are judged before they are reduced");
  phase_ = Phase::kIdle;
  return state_->judge(input);
}

void ShardedOptimizer::update(size_t bucket, const UpdateObserver& observer) {
  if (sharding_.release_gradients) state_->optimizer().give_group_clip(bucket, observer);
  state_->update(buckets().at(bucket).parameters, observer);
}

void ShardedOptimizer::store_gradients(size_t bucket, const UpdateObserver& observer) {
  if (sharding_.release_gradients) state_->optimizer().give_group_clip(bucket, observer);
  state_->optimizer().store_gradients(bucket);
}

void ShardedOptimizer::update_on_host(size_t bucket, const UpdateObserver& observer) {
  state_->optimizer().update_on_host(bucket, observer);
}

void ShardedOptimizer::load_weights(size_t bucket) {
  state_->optimizer().host_updates().load_weights(bucket);
}

void ShardedOptimizer::wait_stored(size_t bucket) {
  state_->optimizer().host_updates().wait_stored(bucket);
}

void ShardedOptimizer::wait_updated(size_t bucket) {
  state_->optimizer().wait_updated(bucket);
}

void ShardedOptimizer::wait_loaded(size_t bucket) {
  state_->optimizer().host_updates().wait_loaded(bucket);
}

void ShardedOptimizer::give_clip(std::span<const Tensor> losses, const UpdateObserver& observer) {
  if (sharding_.release_gradients) return state_->optimizer().give_norm(losses, observer);
  ensure(phase_ == Phase::kReduced, "optimizer: gradients are judged before they are reduced");
  phase_ = Phase::kIdle;
  state_->give_clip(losses, observer);
}

StepResult ShardedOptimizer::wait_clip() {
  clipped_->synchronize();
  return state_->clip_result();
}

void ShardedOptimizer::start_gathering(size_t bucket) {
  const BucketPlace& place = buckets_.at(bucket);
  if (sharding_.shard_state) groups_[place.group].gatherer->start(place.bucket);
  poll();
}

void ShardedOptimizer::wait_gathering(size_t bucket) {
  wait_weights(buckets().at(bucket).parameters.front());
}

StepResult ShardedOptimizer::step(const StepInput& input) {
  ensure(!sharding_.release_gradients, "optimizer: gradients that are released are no step's");
  finish_gradients();
  const StepResult result = judge(input);
  if (!result.updated) return result;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    state_->optimizer().update_group(bucket, input.observer);
    start_gathering(bucket);
  }
  return result;
}

void ShardedOptimizer::wait_weights(size_t idx) {
  poll();
  group_of(idx).gatherer->wait(in_group_[idx]);
}

void ShardedOptimizer::wait_all_weights() {
  for (Group& group : groups_) group.gatherer->wait_all();
  state_->optimizer().finish_updates();
}

std::vector<NamedSlice> ShardedOptimizer::weight_slices(HeldPart part) const {
  state_->optimizer().finish_updates();
  if (part == HeldPart::kOwned) return state_->weight_slices(HeldPart::kOwned);
  std::vector<NamedSlice> all;
  std::set<std::string> fp8;
  for (const ReplicatedParameter& p : parameters_) {
    if (p.parameter.is_fp8()) {
      fp8.insert(p.parameter.name);
    } else {
      all.push_back({p.parameter.name, p.parameter.weight, p.slice});
    }
  }
  for (NamedSlice& held : state_->weight_slices(HeldPart::kHeld)) {
    if (fp8.contains(held.name)) all.push_back(std::move(held));
  }
  return all;
}

void ShardedOptimizer::cast_weights() {
  wait_all_weights();
  state_->optimizer().cast_weights();
  if (sharding_.shard_state) gather_all();
}

void ShardedOptimizer::round_masters() {
  wait_all_weights();
  state_->round_masters();
  if (sharding_.shard_state) gather_all();
}

std::vector<Parameter> ShardedOptimizer::list_held(std::span<const ReplicaPlace> groups,
                                                   std::span<const ReplicatedParameter> parameters,
                                                   const ShardingOptions& sharding) {
  const std::vector<Rows> rows = find_rows(cut(groups, parameters, sharding), parameters, sharding);
  std::vector<Parameter> held;
  for (size_t i = 0; i < parameters.size(); ++i)
    held.push_back(take_rows(parameters[i].parameter, rows[i].held));
  return held;
}

int64_t ShardedOptimizer::state_bytes(std::span<const ReplicaPlace> groups,
                                      std::span<const ReplicatedParameter> parameters,
                                      const ShardingOptions& sharding,
                                      const StateFormats& formats) {
  return Optimizer::state_bytes(list_held(groups, parameters, sharding), formats);
}

int64_t ShardedOptimizer::window_bytes(std::span<const ReplicaPlace> groups,
                                       std::span<const ReplicatedParameter> parameters,
                                       const ShardingOptions& sharding,
                                       const StateFormats& formats) {
  return Optimizer::window_bytes(list_held(groups, parameters, sharding), formats,
                                 list_updates(cut(groups, parameters, sharding), sharding));
}

int64_t ShardedOptimizer::host_window_bytes(std::span<const ReplicaPlace> groups,
                                            std::span<const ReplicatedParameter> parameters,
                                            const ShardingOptions& sharding) {
  return Optimizer::host_window_bytes(list_held(groups, parameters, sharding),
                                      list_updates(cut(groups, parameters, sharding), sharding));
}

int64_t ShardedOptimizer::host_window_bytes() const {
  Optimizer& optimizer = state_->optimizer();
  return optimizer.updates_on_host() ? optimizer.host_updates().window_bytes() : 0;
}

int64_t ShardedOptimizer::workspace_bytes(std::span<const ReplicaPlace> groups,
                                          std::span<const ReplicatedParameter> parameters,
                                          const ShardingOptions& sharding,
                                          const OptimizerOptions& options, const Backend& backend) {
  return Optimizer::workspace_bytes(list_held(groups, parameters, sharding), options, backend);
}

int64_t ShardedOptimizer::count_staging(const std::vector<ReplicaGroup>& groups,
                                        std::span<const ReplicatedParameter> parameters,
                                        const ShardingOptions& sharding, const Backend& backend) {
  const std::vector<Group> cut_groups = cut(places_of(groups), parameters, sharding);
  int64_t total = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    const Group& group = cut_groups[g];
    const Tensors tensors = list_tensors(group, parameters);
    total += GradientReducer::count_staging(groups[g], group.buckets, tensors.grads,
                                            sharding.reduction, backend);
    total += ShareGatherer::count_staging(groups[g], group.buckets, tensors.gathered(sharding),
                                          sharding.reduction.buckets_in_flight);
  }
  return total;
}

int64_t ShardedOptimizer::staging_bytes() const {
  int64_t total = 0;
  for (const Group& group : groups_)
    total += group.reducer->staging_bytes() + group.gatherer->staging_bytes();
  return total;
}

}  // namespace tessera

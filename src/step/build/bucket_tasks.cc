#include <algorithm>
#include <deque>
#include <limits>
#include <optional>

#include "step/build/host_update_tasks.h"
#include "step/build/parameter_tasks.h"
#include "step/build/state_tasks.h"

namespace tessera {
namespace {

constexpr size_t kNoBucket = std::numeric_limits<size_t>::max();

/// What all but a rank's own share of `bytes` comes to.
int64_t others_share(int64_t bytes, int64_t num_ranks) {
  return bytes - bytes / num_ranks;
}

class BucketTasks final : public ParameterTasks {
 public:
  BucketTasks(PlanWriter& writer, const ReplicatedExchanges& exchanges,
              const std::vector<StepRun>& runs, size_t num_parameters,
              const BucketTaskOptions& options)
      : writer_(writer),
        exchanges_(exchanges),
        runs_(runs),
        options_(options),
        bucket_of_(num_parameters, kNoBucket),
        states_(writer, exchanges),
        on_host_(writer, exchanges) {
    for (size_t b = 0; b < exchanges.buckets.size(); ++b) {
      for (const size_t parameter : exchanges.buckets[b].parameters) bucket_of_[parameter] = b;
      order_.push_back(b);
    }
    weight_waits_.resize(exchanges.buckets.size());
    reductions_.resize(exchanges.buckets.size());
    weights_.resize(exchanges.buckets.size());
    gradients_.resize(exchanges.buckets.size());
    has_gradients_.resize(exchanges.buckets.size());
    updates_.resize(exchanges.buckets.size());
    std::ranges::sort(order_, {}, [&](size_t b) {
      return std::pair(exchanges.buckets[b].group, exchanges.buckets[b].idx);
    });
    if (options.trains) find_completions();
    states_.set_order(list_updates());
  }

  void before_run(size_t idx, Task& task) override {
    if (idx == 0 && releases()) begin_updates();
    const ProgramParameters& parameters = runs_[idx].parameters;
    make_room(parameters);
    for (const ProgramParameters::Place& place : parameters.weights) {
      const size_t bucket = bucket_of_[place.parameter];
      wait_weights(bucket);
      read(task, weights(bucket));
    }
    if (sum_bytes(idx) > 0) write(task, sums());
    wait_for_places(parameters);
    for (const ProgramParameters::Place& place : parameters.gradients) {
      if (!is_rounded(place)) add_to_gradients(task, bucket_of_[place.parameter]);
    }
    for (const ProgramParameters::Place& place : parameters.gradients) {
      if (bucket_of_[place.parameter] != kNoBucket) has_gradients_[bucket_of_[place.parameter]] = 1;
    }
  }

  void after_run(size_t idx) override {
    if (!options_.trains) return;
    if (sum_bytes(idx) > 0) round_gradients(idx);
    for (const size_t bucket : completed_by_[idx]) {
      start_reduction(bucket);
      if (releases()) complete_.push_back(bucket);
    }
    while (!complete_.empty() && !is_exchanged(complete_.front())) update_next();
  }

  void finish_gradients() override {
    if (releases()) return finish_updates();
    for (const size_t bucket : order_) start_reduction(bucket);
    for (const size_t bucket : order_) {
      if (reductions_[bucket]) writer_.wait_for(*reductions_[bucket]);
    }
    add_finish();
  }

  std::optional<TaskId> update(const Communicator& world,
                               const std::vector<BufferId>& results) override {
    add_judge(world, results);
    for (const size_t b : states_.order()) {
      if (!updates_[b]) update_bucket(b);
      if (is_gathered(b) && !on_host_.is_on()) start_gathering(b);
    }
    if (on_host_.is_on()) gather_from_host();
    states_.finish();
    if (!options_.device_judges) return std::nullopt;
    return writer_.wait_for(*judge_);
  }

 private:
  const BucketExchange& at(size_t bucket) const { return exchanges_.buckets[bucket]; }
  bool is_exchanged(size_t bucket) const {
    return bucket != kNoBucket && at(bucket).num_ranks() > 1;
  }
  bool is_gathered(size_t bucket) const { return exchanges_.shard_state && is_exchanged(bucket); }
  std::string name(size_t bucket) const { return bucket_name(at(bucket)); }
  BufferId weights(size_t bucket) {
    if (bucket == kNoBucket) return writer_.state("weights", 0);
    std::optional<BufferId>& known = weights_[bucket];
    if (!known) known = writer_.state("weights of " + name(bucket), at(bucket).weight_bytes);
    return *known;
  }
  BufferId gradients(size_t bucket) {
    if (bucket == kNoBucket) return writer_.state("gradients", 0);
    std::optional<BufferId>& known = gradients_[bucket];
    if (!known) known = make_gradients(bucket);
    return *known;
  }
  BufferId make_gradients(size_t bucket) {
    const std::string own = "gradients of " + name(bucket);
    if (!at(bucket).shares_gradients) return writer_.state(own, at(bucket).gradient_bytes);
    return writer_.buffer(own, at(bucket).gradient_bytes,
                          {.name = fmt::format("gradients of layers, {}, place {}",
                                               at(bucket).outer->name(), at(bucket).turn),
                           .bytes = most_shared(at(bucket).group)});
  }
  /// The bytes of gradients that the group's layers have in turn.
  int64_t most_shared(size_t group) const {
    int64_t bytes = 0;
    for (const BucketExchange& bucket : exchanges_.buckets) {
      if (bucket.group == group && bucket.shares_gradients)
        bytes = std::max(bytes, bucket.gradient_bytes);
    }
    return bytes;
  }
  /// Whether a program adds to a sum of its own.
  bool is_rounded(const ProgramParameters::Place& place) const {
    const size_t bucket = bucket_of_[place.parameter];
    return bucket != kNoBucket && at(bucket).rounds_gradients;
  }
  /// The bytes of such sums.
  int64_t sum_bytes(size_t run) const {
    int64_t bytes = 0;
    for (const ProgramParameters::Place& place : runs_[run].parameters.gradients) {
      if (is_rounded(place))
        bytes += runs_[run].executable->program().value(place.value).type.num_bytes();
    }
    return bytes;
  }
  BufferId sums() {
    if (most_sums_ == 0) {
      for (size_t run = 0; run < runs_.size(); ++run)
        most_sums_ = std::max(most_sums_, sum_bytes(run));
    }
    const std::string name = "sums of a layer's gradients";
    return writer_.buffer(name, most_sums_, {.name = name, .bytes = most_sums_});
  }
  /// Sums are read, and gradients of half of their bytes read and written.
  void round_gradients(size_t idx) {
    const StepRun& run = runs_[idx];
    Task task{.kind = TaskKind::kOptimizer,
              .action = TaskAction::kRoundGradients,
              .lane = writer_.lane(LaneKind::kCompute),
              .name = fmt::format("round gradients, layer {}, micro-batch {}", run.ref.idx,
                                  run.micro_batch),
              .bytes = 2 * sum_bytes(idx),
              .subject = {.program = run.ref,
                          .chunk = run.chunk,
                          .place = run.place,
                          .micro_batch = run.micro_batch}};
    read(task, sums());
    for (const ProgramParameters::Place& place : run.parameters.gradients) {
      const size_t bucket = bucket_of_[place.parameter];
      if (is_rounded(place)) tessera::update(task, gradients(bucket));
    }
    writer_.add(std::move(task));
  }

  /// What layers share holds nothing of this layer before the first sum.
  void add_to_gradients(Task& task, size_t bucket) {
    const bool holds_nothing =
        bucket != kNoBucket && at(bucket).shares_gradients && has_gradients_[bucket] == 0;
    holds_nothing ? write(task, gradients(bucket)) : tessera::update(task, gradients(bucket));
  }

  bool releases() const { return options_.trains && exchanges_.releases; }
  /// Where gradients are released, in the order in which they are complete.
  std::vector<size_t> list_updates() const {
    std::vector<size_t> updates;
    if (releases()) {
      for (const std::vector<size_t>& completed : completed_by_)
        updates.insert(updates.end(), completed.begin(), completed.end());
    }
    for (size_t b = 0; b < exchanges_.buckets.size(); ++b) {
      if (std::ranges::find(updates, b) == updates.end()) updates.push_back(b);
    }
    return updates;
  }

  void begin_updates() {
    prepared_ = writer_.add({.kind = TaskKind::kOptimizer,
                             .action = TaskAction::kPrepareUpdate,
                             .lane = writer_.lane(LaneKind::kOptimizer),
                             .name = "what the updates are to be"});
    states_.begin();
  }
  void update_bucket(size_t bucket) {
    if (on_host_.is_on()) return start_on_host(bucket);
    states_.before_update(bucket);
    add_update(bucket);
    states_.after_update(bucket);
  }
  HostUpdateTasks::Buffers touched(size_t bucket) {
    return {gradients(bucket), states_.at_work(bucket), weights(bucket)};
  }
  void start_on_host(size_t bucket) {
    wait_weights(bucket);
    Task store{.after = {releases() ? *prepared_ : *judge_},
               .only_on_update = !options_.device_judges && !releases()};
    releases() ? add_to_gradients(store, bucket) : read(store, gradients(bucket));
    updates_[bucket] = on_host_.start(bucket, touched(bucket), std::move(store));
  }
  /// All updates are started by now, so that none waits for an exchange.
  void gather_from_host() {
    for (const size_t bucket : states_.order()) {
      if (!is_gathered(bucket)) continue;
      on_host_.wait_loaded(bucket);
      start_gathering(bucket);
    }
  }
  /// Gradients that a run is the first to add to may lie where others leave for the host.
  void wait_for_places(const ProgramParameters& parameters) {
    if (!on_host_.is_on() || !releases()) return;
    for (const ProgramParameters::Place& place : parameters.gradients) {
      const size_t bucket = bucket_of_[place.parameter];
      if (bucket == kNoBucket || has_gradients_[bucket] != 0) continue;
      for (size_t other = 0; other < exchanges_.buckets.size(); ++other) {
        if (shares_place(other, bucket)) on_host_.wait_stored(other);
      }
    }
  }
  bool shares_place(size_t one, size_t other) const {
    return at(one).shares_gradients && at(other).shares_gradients &&
           at(one).group == at(other).group && at(one).turn == at(other).turn;
  }

  /// Of what is complete, the first. Sums over the ranks come first.
  void update_next() {
    const size_t bucket = complete_.front();
    complete_.pop_front();
    if (reductions_[bucket]) writer_.wait_for(*reductions_[bucket]);
    update_bucket(bucket);
  }
  /// Updates what has gradients where those of a run will come.
  void make_room(const ProgramParameters& parameters) {
    for (const ProgramParameters::Place& place : parameters.gradients) {
      const size_t bucket = bucket_of_[place.parameter];
      if (bucket == kNoBucket || !at(bucket).shares_gradients || has_gradients_[bucket] != 0)
        continue;
      const auto is_there = [&](size_t other) { return shares_place(other, bucket); };
      while (std::ranges::any_of(complete_, is_there)) update_next();
    }
  }
  void finish_updates() {
    for (const size_t bucket : order_) start_reduction(bucket);
    for (const size_t bucket : states_.order()) {
      const bool waits = std::ranges::find(complete_, bucket) != complete_.end();
      if (!updates_[bucket] && !waits) complete_.push_back(bucket);
    }
    while (!complete_.empty()) update_next();
    states_.finish();
    for (const size_t bucket : states_.order()) {
      if (at(bucket).shares_gradients) on_host_.wait_stored(bucket);
    }
  }

  /// After which run each bucket is complete. Buckets of a group start in their order.
  void find_completions() {
    completed_by_.resize(runs_.size());
    std::vector<std::optional<size_t>> last_run(bucket_of_.size());
    for (size_t run = 0; run < runs_.size(); ++run) {
      for (const ProgramParameters::Place& place : runs_[run].parameters.gradients)
        last_run[place.parameter] = run;
    }
    std::optional<size_t> group;
    size_t after = 0;
    for (const size_t bucket : order_) {
      if (group != at(bucket).group) after = 0;
      group = at(bucket).group;
      // What no run adds to is zero, and declared complete at the end.
      for (const size_t parameter : at(bucket).parameters)
        after = std::max(after, last_run[parameter].value_or(runs_.size()));
      if (after < runs_.size()) completed_by_[after].push_back(bucket);
    }
  }

  /// The task that a bucket's exchange begins as.
  Task exchange(size_t bucket, TaskAction action, const std::string& what, int64_t bytes) {
    Task task{.kind = TaskKind::kExchange,
              .action = action,
              .lane = writer_.group(*at(bucket).outer),
              .name = fmt::format("{}, {}", what, name(bucket)),
              .bytes = others_share(bytes, at(bucket).num_ranks()),
              .subject = {.unit = static_cast<int64_t>(bucket)}};
    const CommunicatorPtr& inner = at(bucket).inner;
    if (inner && inner->size() > 1) task.inside.push_back({writer_.group(*inner), 1, bytes});
    return task;
  }

  /// For the weights that the last step left behind.
  void wait_weights(size_t bucket) {
    if (!options_.trains || bucket == kNoBucket) return;
    if (!is_gathered(bucket)) {
      if (on_host_.is_on())
        on_host_.wait_for_last_step(bucket, touched(bucket), at(bucket).shares_gradients);
      return;
    }
    if (weight_waits_[bucket]) return;
    Task task = exchange(bucket, TaskAction::kGatherBucket, "wait: gather weights",
                         at(bucket).weight_bytes);
    task.phase = TaskPhase::kWait;
    task.bytes = 0;
    task.inside.clear();
    write(task, weights(bucket));
    weight_waits_[bucket] = writer_.add(std::move(task));
  }

  /// Gatherings and reductions of a group share communicators, so the former must have ended.
  void start_reduction(size_t bucket) {
    if (!is_exchanged(bucket) || reductions_[bucket]) return;
    for (size_t b = 0; b < exchanges_.buckets.size(); ++b) wait_weights(b);
    Task task =
        exchange(bucket, TaskAction::kReduceBucket, "reduce gradients", at(bucket).gradient_bytes);
    task.bytes = others_share(at(bucket).reduced_bytes, at(bucket).num_ranks());
    tessera::update(task, gradients(bucket));
    reductions_[bucket] = writer_.start(std::move(task));
  }

  void add_finish() {
    for (size_t b = 0; b < exchanges_.buckets.size(); ++b) wait_weights(b);
    Task task{.action = TaskAction::kFinishGradients,
              .lane = writer_.lane(LaneKind::kHost),
              .name = "gradients are complete"};
    for (const size_t bucket : order_) {
      tessera::update(task, gradients(bucket));
      if (exchanges_.shard_state || !is_exchanged(bucket)) continue;
      task.kind = TaskKind::kExchange;
      task.name = "gather gradients";
      task.bytes += others_share(at(bucket).gradient_bytes, at(bucket).num_ranks());
      task.inside.push_back({writer_.group(*at(bucket).outer), 1, at(bucket).gradient_bytes});
    }
    writer_.add(std::move(task));
  }

  void add_judge(const Communicator& world, const std::vector<BufferId>& results) {
    Task task{.kind = TaskKind::kOptimizer,
              .action = TaskAction::kJudge,
              .lane = writer_.lane(LaneKind::kOptimizer),
              .name = "gradient norm"};
    for (const std::optional<TaskId>& update : updates_) {
      if (update) task.after.push_back(*update);
    }
    for (const size_t bucket : order_) {
      if (releases()) break;  // their updates have judged them
      read(task, gradients(bucket));
      task.bytes +=
          at(bucket).gradient_bytes / (exchanges_.shard_state ? at(bucket).num_ranks() : 1);
    }
    if (world.size() > 1) task.inside.push_back({writer_.group(world), 1, sizeof(double)});
    if (!options_.device_judges) {
      judge_ = writer_.add(std::move(task));
      return;
    }
    for (const BufferId result : results) read(task, result);
    judge_ = writer_.start(std::move(task));
  }

  void add_update(size_t bucket) {
    Task task{.kind = TaskKind::kOptimizer,
              .action = TaskAction::kUpdate,
              .lane = writer_.lane(LaneKind::kOptimizer),
              .name = "update, " + name(bucket),
              .after = {releases() ? *prepared_ : *judge_},
              .flops = at(bucket).update_flops,
              .bytes = 2 * at(bucket).state_bytes,
              .subject = {.unit = static_cast<int64_t>(bucket)},
              .only_on_update = !options_.device_judges && !releases()};
    releases() ? add_to_gradients(task, bucket) : read(task, gradients(bucket));
    tessera::update(task, states_.at_work(bucket));
    tessera::update(task, weights(bucket));
    updates_[bucket] = writer_.add(std::move(task));
  }

  void start_gathering(size_t bucket) {
    Task task =
        exchange(bucket, TaskAction::kGatherBucket, "gather weights", at(bucket).weight_bytes);
    task.only_on_update = true;
    tessera::update(task, weights(bucket));
    const TaskId start = writer_.start(std::move(task));
    writer_.set_start(*weight_waits_[bucket], start);
  }

  PlanWriter& writer_;
  const ReplicatedExchanges& exchanges_;
  const std::vector<StepRun>& runs_;
  BucketTaskOptions options_;
  std::vector<size_t> bucket_of_;                  // by parameter
  std::vector<size_t> order_;                      // of the reductions
  std::vector<std::vector<size_t>> completed_by_;  // buckets by run
  std::vector<std::optional<TaskId>> weight_waits_, reductions_, updates_;
  std::vector<std::optional<BufferId>> weights_, gradients_;  // once they are named
  std::deque<size_t> complete_;         // where gradients are released: to be updated, in order
  std::vector<uint8_t> has_gradients_;  // of this step
  int64_t most_sums_ = 0;               // bytes of a run's, once known
  StateTasks states_;
  HostUpdateTasks on_host_;
  std::optional<TaskId> judge_, prepared_;
};

}  // namespace

std::unique_ptr<ParameterTasks> write_bucket_tasks(PlanWriter& writer,
                                                   const ReplicatedExchanges& exchanges,
                                                   const std::vector<StepRun>& runs,
                                                   size_t num_parameters,
                                                   const BucketTaskOptions& options) {
  return std::make_unique<BucketTasks>(writer, exchanges, runs, num_parameters, options);
}

}  // namespace tessera

#include "train/trainer/trainer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "checkpoint/together.h"
#include "core/limits.h"
#include "model/weights/qk_clip.h"
#include "step/build/place_saved.h"
#include "train/plan/simulated_step.h"
#include "train/setup/device_choice.h"
#include "train/setup/layout_proof.h"
#include "train/setup/loss_scales.h"
#include "train/setup/machine.h"
#include "train/setup/step_schedule.h"
#include "train/state/initial_weights.h"
#include "train/trainer/nonfinite_step.h"
#include "train/trainer/step_tallies.h"

namespace tessera {
namespace {

BatchShape batch_shape(const Settings& settings, const TrainingData& data) {
  BatchShape shape = batch_shape(settings);
  shape.max_sequences = data.max_sequences();
  if (settings.parallel.dynamic_cp) shape.max_sequences += kFillingSequences;
  return shape;
}

}  // namespace

Trainer::Trainer(Settings settings, TrainingData data, World& world, const DeviceChooser& choose)
    : Trainer(std::move(settings), std::move(data), nullptr, &world, choose) {}

Trainer::Trainer(Settings settings, TrainingData data)
    : Trainer(std::move(settings), std::move(data), make_single_world(), nullptr, choose_device) {}

Trainer::Trainer(Settings settings, TrainingData data, std::unique_ptr<World> own, World* world,
                 const DeviceChooser& choose)
    : own_world_(std::move(own)),
      host_(world != nullptr ? *world : *own_world_),
      settings_(std::move(settings)),
      data_(std::move(data)),
      device_(choose(settings_, host_)),
      layout_(lay_out()) {
  data_.train == nullptr ? validate_without_data(settings_) : tessera::validate(settings_);
  tessera::validate(settings_.model);
  const BatchShape shape = batch_shape(settings_, data_);
  const auto given = given_limit(settings_.train);
  if (given) choose_within_limit(shape, *given);
  plan_model(shape);
  if (device_.memory > 0) fit_device(shape);
  plan_peer_copies();
  plan_snapshot();
  check_limit();
  with_prediction(prediction_, [&] {
    state_ = std::make_unique<ModelState>(settings_, layout_, this->world(), backend());
    model_->bind(state_->parameters(), state_->experts(), state_->weights());
    make_snapshot();
  });
  const StepRequest request = request_step(settings_, layout_, *model_, state_->parameters());
  plan_ = build_step(request);
  evaluation_ = build_evaluation(request);
  runner_ = std::make_unique<StepRunner>(*model_, layout_.pipeline, state_->step_parameters());
  if (settings_.train.precision == Precision::kFp16)
    scaler_.emplace(settings_.precision.loss_scaling);
  feed_ = std::make_unique<BatchFeed>(settings_, data_, layout_, shape.max_sequences);
  steps_ = std::make_unique<RecordedSteps>(
      *runner_, plan_, records_whole_steps(settings_, layout_, *model_), feed_.get());
  num_batches_ = layout_.num_micro_batches;
  double flops = model_->model_flops();
  const Tensor sum = view(std::span(&flops, 1), {1});
  layout_.world->all_reduce(sum, sum).wait();
  batch_flops_ = flops;
}

/// With the schedule that rank 0 chooses for all, so that none can differ.
RunLayout Trainer::lay_out() {
  if (step_schedule(settings_.train) == StepSchedule::kAuto) {
    const CommunicatorPtr all = host_.make_world_group();
    on_first_rank(*all, [&](const std::function<void()>& alive) {
      alive();
      schedule_choice_ = apply_schedule(settings_, all->size(), backend());
    });
    settings_.train.schedule = broadcast_texts(*all, {settings_.train.schedule}).front();
  }
  return make_run_layout(settings_, world());
}

/// The model that the settings ask for, and what it will take; nothing is taken yet.
void Trainer::plan_model(const BatchShape& shape) {
  model_ = std::make_unique<TrainingModel>(settings_.model, shape, settings_.train.saved_policy(),
                                           backend(), layout_.part);
  require_proof(prove_rank(settings_, layout_, model_->programs()));
  model_->place(place_saved(model_->programs(), layout_.steps));
  prediction_ = predict_memory(settings_, layout_, *model_, backend(), device_.memory);
}

/// Where the model does not fit, and nobody says what to do about that, it is planned again with a
/// choice that fits.
void Trainer::fit_device(const BatchShape& shape) {
  Device& device = backend().device();
  if (chooses_for_device(settings_.train, backend())) {
    const int64_t room = find_room(settings_, layout_, *model_, backend(), device_.memory);
    const auto limit = find_lacking(prediction_.total() <= device_.memory, room, device,
                                    device_.memory, *layout_.world);
    if (limit) {
      choose_within_limit(shape, *limit);
      plan_model(shape);
    }
  }
  together(*layout_.world, [&] { require_memory(prediction_, device.name(), device_.memory); });
}

/// Rank 0 chooses for all, so that none can differ.
void Trainer::choose_within_limit(const BatchShape& shape, const MemoryLimit& limit) {
  Communicator& world = *layout_.world;
  on_first_rank(world, [&](const std::function<void()>& alive) {
    alive();
    policy_choice_ = choose_policy(settings_, world.size(), backend(), shape, limit);
    apply(*policy_choice_, settings_.train);
  });
  settings_.train.recompute = broadcast_texts(world, settings_.train.recompute);
  settings_.train.offload = broadcast_texts(world, settings_.train.offload);
}

/// The choice is made for the rank of each stage with the most state; one whose experts keep more
/// may be beyond the limit.
void Trainer::check_limit() {
  const std::optional<int64_t> limit = settings_.train.parse_memory_limit();
  if (!limit) return;
  together(*layout_.world, [&] {
    const int64_t own = prediction_.total() - prediction_.program;
    require(own <= *limit,
            "train.memory_limit is \"{}\", but this rank would take {} with what was chosen for a "
            "rank that holds more weights; raise the limit, or give the ranks experts of equal "
            "sizes",
            settings_.train.memory_limit, format_bytes(own));
  });
}

int64_t Trainer::unbalanced_bytes() const {
  const ActivationBytes& planned = prediction_.activations;
  return std::max<int64_t>(
      model_->elastic_bytes() - planned.saved - planned.transient - planned.stash, 0);
}

void Trainer::plan_peer_copies() {
  if (!settings_.peer.copy) return;
  const int64_t roundings = RoundingHistory::count_bytes(settings_.model, batch_shape(settings_));
  peers_ = std::make_unique<PeerCopies>(settings_, layout_, prediction_.state.held() + roundings);
  prediction_.peer_copies = peers_->num_bytes();
  initial_notes_.insert(initial_notes_.end(), peers_->notes().begin(), peers_->notes().end());
}

/// Where the machines have no room for the copy, training waits for saves instead.
void Trainer::plan_snapshot() {
  const int64_t wanted = snapshot_bytes(settings_, layout_);
  if (wanted == 0) return;
  prediction_.snapshot = wanted;
  const int64_t available =
      std::min(available_memory(), memory_limit_room().value_or(available_memory()));
  if (has_room_for_snapshot(prediction_, available, *layout_.world)) return;
  prediction_.snapshot = 0;
  initial_notes_.push_back(
      fmt::format("training will wait while checkpoints are written, piece by piece from where the "
                  "state is: the machine's memory has no room for the copy of {} that they would "
                  "be written from",
                  format_bytes(wanted)));
}

void Trainer::make_snapshot() {
  if (prediction_.snapshot == 0) return;
  const auto home =
      settings_.shard.state_on_host ? Snapshot::StateHome::kPinned : Snapshot::StateHome::kDevice;
  snapshot_ = std::make_unique<Snapshot>(prediction_.snapshot, backend().device(), home);
  if (backend().is_host() || snapshot_->copies_beside()) return;
  initial_notes_.push_back(fmt::format(
      "training will wait while the state is copied before it is saved: {} for the copy cannot be "
      "had as pinned memory of the host ({}), and is pageable",
      format_bytes(prediction_.snapshot), describe_lockable_memory()));
}

std::optional<ResumedRun> Trainer::resume(const std::string& config_toml) {
  data_identity_.num_tokens = data_.num_tokens();
  together(*layout_.world, [&] {
    if (layout_.rank() != 0) return;
    data_identity_.fingerprint = fmt::format("{:016x}", data_.fingerprint());
  });
  auto resumed = resume_run(settings_, config_toml, data_identity_, *state_, *layout_.world,
                            peers_ ? &peers_->open(*state_) : nullptr);
  if (resumed) {
    position_ = resumed->position;
    if (scaler_ && position_.loss_scale) scaler_->restore(*position_.loss_scale);
  } else {
    const auto notes = load_initial_weights(settings_, *state_, *layout_.world);
    initial_notes_.insert(initial_notes_.end(), notes.begin(), notes.end());
  }
  if (const auto note = peers_ ? peers_->describe_unused(position_.step) : std::nullopt)
    initial_notes_.push_back(*note);
  position_.loss_scale = saved_state(scaler_);
  set_scales(state_->roundings(), model_->roundings());
  return resumed;
}

void Trainer::give_batches(std::vector<Batch> batches) {
  check_given_batches(batches, fewest_batches(), layout_.num_micro_batches, model_->batch_shape());
  const int64_t num_experts = settings_.model.moe.router_outputs();
  for (const Batch& batch : batches) {
    for (const int32_t expert : batch.experts)
      require(expert >= -1 && expert < num_experts,
              "a micro-batch names expert {}; there are 0 to {}, and -1 for the router's choice",
              expert, num_experts - 1);
  }
  given_ = std::move(batches);
}

/// Reads this rank's micro-batches of the step. The loss is divided by the valid tokens of all
/// ranks' together.
LossScales Trainer::fetch(StepOutcome& outcome) {
  const StepBatches& step = feed_->begin(position_.step, std::exchange(given_, {}));
  // The model FLOPs of documents are those of the rows that they came in.
  if (!settings_.parallel.dynamic_cp) num_batches_ = std::ssize(step.batches);
  std::array<int64_t, 2> counts = {step.num_valid, step.num_mtp_labels};
  const Tensor sum = view(std::span<int64_t>(counts), {std::ssize(counts)});
  const StageGroups& groups = layout_.part.groups;
  (groups.contexts ? groups.contexts : groups.dp)->all_reduce(sum, sum).wait();
  outcome.num_tokens = step.num_tokens * layout_.data_ranks();
  outcome.mtp_labels = counts[1];
  outcome.loss_scale = loss_scale().value_or(1);
  feed_->expect_loss_scale(outcome.loss_scale);
  return loss_scales(settings_, num_batches_of_all(), counts[0]).times(outcome.loss_scale);
}

void Trainer::sum_over_ranks(StepOutcome& outcome) const {
  std::array<double, 5> parts = {outcome.loss, outcome.balance_loss, outcome.z_loss,
                                 static_cast<double>(outcome.dropped), outcome.mtp_loss};
  const Tensor sum = view(std::span<double>(parts), {std::ssize(parts)});
  layout_.world->all_reduce(sum, sum).wait();
  outcome.loss = parts[0];
  outcome.balance_loss = parts[1];
  outcome.z_loss = parts[2];
  outcome.dropped = std::llround(parts[3]);
  outcome.mtp_loss = parts[4];
}

/// Every rank counts its own tokens' assignments in its own layers; after this, all ranks have the
/// counts of all.
void Trainer::sum_expert_counts() {
  if (state_->experts().empty()) return;
  std::vector<float> counts;
  for (const ExpertState& expert : state_->experts()) {
    const auto one = expert.step_counts.get().span<float>();
    counts.insert(counts.end(), one.begin(), one.end());
  }
  const Tensor sum = view(std::span(counts), {std::ssize(counts)});
  layout_.world->all_reduce(sum, sum).wait();
  auto next = counts.cbegin();
  for (ExpertState& expert : state_->experts()) {
    const auto one = expert.step_counts.get().span<float>();
    std::copy_n(next, one.size(), one.begin());
    next += std::ssize(one);
  }
}

/// What the update is to do about heads whose logits are too large, the same on all ranks.
void Trainer::clip_heads(std::vector<float> max_logits, StepOutcome& outcome) {
  if (settings_.qk_clip == 0) return;
  const Tensor largest = view(std::span(max_logits), {std::ssize(max_logits)});
  layout_.world->all_reduce(largest, largest, ReduceOp::kMax).wait();
  const ModelConfig& config = settings_.model;
  const QkClip clip(config, settings_.qk_clip, max_logits);
  outcome.max_logit = clip.max_logit();
  outcome.clipped_heads = clip.num_clipped();
  state_->optimizer().set_row_factors(
      [&](const std::string& name, int64_t first_row, std::span<float> factors) {
        const ParameterSpec& spec = state_->parameters().find(name).spec;
        clip.fill_factors(*spec.layer, layer_weight_name(config, spec), first_row, factors);
      });
}

/// What the tasks of a step ask of the trainer, in their order.
class Trainer::Step final : public StepHost {
 public:
  Step(Trainer& trainer, const UpdateObserver& observer) : trainer_(trainer), observer_(observer) {}

  /// A step that is done again has the same micro-batches.
  void begin() override {
    if (!repeats_) scales_ = trainer_.fetch(outcome_);
    repeats_ = false;
  }
  const MicroBatch& micro_batch(int64_t idx) override {
    return trainer_.feed_->current().views.at(idx);
  }
  const LossScales& scales() override { return scales_; }

  bool share(const MicroBatchResult& own) override {
    if (lacks_room(own)) return false;
    const auto num_micro_batches = static_cast<double>(trainer_.num_batches_of_all());
    outcome_.loss = own.loss / outcome_.loss_scale;
    if (outcome_.mtp_labels > 0)
      outcome_.mtp_loss = own.mtp_loss / scales_.mtp / static_cast<double>(outcome_.mtp_labels);
    outcome_.balance_loss = own.balance_loss * (1.0 / num_micro_batches);
    outcome_.z_loss = own.z_loss * (1.0 / num_micro_batches);
    outcome_.dropped = own.dropped;
    trainer_.sum_over_ranks(outcome_);
    trainer_.sum_expert_counts();
    trainer_.clip_heads(own.max_logits, outcome_);
    const RoundingHistory& roundings = trainer_.state_->roundings();
    trainer_.tallies_ =
        collect_tallies(roundings, trainer_.model_->roundings(), *trainer_.layout_.world);
    outcome_.roundings = count_roundings(roundings, trainer_.tallies_);
    return std::isfinite(outcome_.loss);
  }

  StepInput update_input() override {
    const RunPosition& position = trainer_.position_;
    const Settings& settings = trainer_.settings_;
    return {.step_idx = position.step - position.skipped_steps,
            .lr = learning_rate(settings.schedule, position.step),
            .max_grad_norm = settings.train.max_grad_norm,
            .grad_scale = 1 / outcome_.loss_scale,
            .observer = observer_};
  }

  void before_update() override {
    if (trainer_.snapshot_) trainer_.snapshot_->before_change();
  }

  void end(const StepResult& update) override {
    if (repeats_) {
      ++outcome_.repeats;
      return trainer_.enlarge_stash(missing_pages_);
    }
    outcome_.update = update;
    if (outcome_.skipped()) outcome_.clipped_heads = 0;
    trainer_.finish_step(outcome_);
  }

  /// Whether it changed nothing, and is to be done again.
  bool repeats() const { return repeats_; }
  const StepOutcome& outcome() const { return outcome_; }

 private:
  /// Whether some rank's rows found no room, so that no gradient is right.
  bool lacks_room(const MicroBatchResult& own) {
    if (!trainer_.settings_.train.stashes()) return false;
    missing_pages_ = own.missing_pages;
    repeats_ = trainer_.agree(missing_pages_) > 0;
    return repeats_;
  }

  Trainer& trainer_;
  const UpdateObserver& observer_;
  LossScales scales_;
  StepOutcome outcome_;
  int64_t missing_pages_ = 0;  // on this rank
  bool repeats_ = false;
};

/// All ranks that came to a step's end do, whether they lack pages or not.
void Trainer::enlarge_stash(int64_t missing_pages) {
  ++num_repeats_;
  together(*layout_.world, [&] {
    if (missing_pages == 0) return;
    StashPool& pool = *model_->stash();
    const int64_t before = pool.num_pages();
    pool.grow(missing_pages);
    prediction_.activations.stash += (pool.num_pages() - before) * pool.page_bytes();
  });
}

void Trainer::finish_step(const StepOutcome& outcome) {
  refuse_nonfinite(settings_, position_.step, scaler_, outcome);
  if (outcome.skipped()) {
    ++position_.skipped_steps;
  } else if (settings_.model.moe.has_expert_bias() && !settings_.model.lora.is_on()) {
    update_expert_biases(state_->experts(), settings_.model.moe.bias_update_speed,
                         settings_.model.moe.zero_experts);
  }
  if (scaler_) scaler_->update(!outcome.skipped());
  position_.loss_scale = saved_state(scaler_);
  state_->roundings().add(tallies_, outcome.skipped());
  set_scales(state_->roundings(), model_->roundings());
  ++position_.step;
  position_.tokens_seen += outcome.num_tokens;
}

StepOutcome Trainer::step(const StepObservers& observers, const UpdateObserver& update_observer) {
  return with_prediction(prediction_, [&] {
    const int64_t count =
        given_.empty() ? feed_->count_batches(position_.step) : std::ssize(given_);
    const bool is_planned = count == layout_.num_micro_batches;
    RecordedSteps& steps = is_planned ? *steps_ : *plan_count(count).steps;
    Step step(*this, update_observer);
    do {
      steps.run(step, observers);
    } while (step.repeats());
    return step.outcome();
  });
}

int64_t Trainer::fewest_batches() const {
  // Elsewhere saved values lie as the passes of all micro-batches need them.
  const bool may_vary = settings_.packs_answers() && layout_.num_ranks() == 1 &&
                        step_schedule(settings_.train) == StepSchedule::kAsBuilt &&
                        settings_.train.offload.empty();
  return may_vary ? 1 : layout_.num_micro_batches;
}

/// Their steps are not recorded whole: the memory for recordings is foreseen for one plan.
Trainer::OtherCount& Trainer::plan_count(int64_t num_micro_batches) {
  auto& other = other_counts_[num_micro_batches];
  if (other) return *other;
  Settings settings = settings_;
  settings.train.global_batch =
      num_micro_batches * settings.train.micro_batch * layout_.layout.degree(Axis::kDp);
  RunLayout layout = layout_;
  schedule_micro_batches(layout, settings);
  other = std::make_unique<OtherCount>();
  other->plan = build_step(request_step(settings, layout, *model_, state_->parameters()));
  other->steps = std::make_unique<RecordedSteps>(*runner_, other->plan, /*records=*/false);
  return *other;
}

double Trainer::validate() {
  if (!data_.validation) return std::numeric_limits<double>::quiet_NaN();
  state_->wait_weights();
  model_->forget_copies();
  const int64_t per_batch = settings_.train.micro_batch;
  int64_t num_batches = (data_.validation->num_windows() + per_batch - 1) / per_batch;
  const int64_t limit = settings_.train.validation_batches;
  if (limit > 0) num_batches = std::min(num_batches, limit);
  std::array<double, 2> totals = {0, 0};  // loss, valid tokens
  Batch batch;
  const int64_t per_step = settings_.train.num_micro_batches();
  const StageGroups& groups = layout_.part.groups;
  const bool counts = groups.micro_batch->rank() == 0 && groups.pp->rank() == 0;
  // Data-parallel ranks may share experts, so all run equally often, the last ones perhaps for
  // nothing.
  for (int64_t first = 0; first < num_batches; first += layout_.data_ranks()) {
    const int64_t i = first + layout_.data_rank();
    data_.validation->fetch(i / per_step, i % per_step, batch);
    pad_sequences(batch, model_->batch_shape().max_sequences);
    GivenBatches given({view_batch(batch)}, {.loss = 1});
    runner_->run(evaluation_, given);
    const double loss = given.result().loss;
    if (i >= num_batches) continue;
    totals[0] += loss;
    totals[1] += counts ? static_cast<double>(batch.num_valid) : 0;
  }
  const Tensor sum = view(std::span<double>(totals), {std::ssize(totals)});
  layout_.world->all_reduce(sum, sum).wait();
  return totals[0] / std::max(totals[1], 1.0);
}

SavedRun Trainer::describe_run(const std::string& config_toml) const {
  return {.keep_last = settings_.run.keep_last,
          .config_toml = config_toml,
          .data = data_identity_,
          .position = position_};
}

SaveResult Trainer::save(const std::string& config_toml, const std::string& run_folder) {
  state_->wait_weights();
  return save_run(run_folder, describe_run(config_toml), *state_, *layout_.world);
}

std::unique_ptr<BackgroundSave> Trainer::begin_save(const std::string& config_toml) {
  ensure(snapshot_ != nullptr, "begin_save: the run has no memory for a copy of its state");
  state_->wait_weights();
  return begin_save_run(settings_.run.folder, describe_run(config_toml), *state_, *snapshot_,
                        *layout_.world);
}

int64_t Trainer::copy_to_peers(const std::string& config_toml) {
  ensure(peers_ != nullptr, "copy_to_peers: the run keeps no copies");
  state_->wait_weights();
  peers_->save(describe_run(config_toml), *state_);
  return peers_->num_bytes();
}

void Trainer::remove_peer_copies() {
  if (peers_) peers_->remove();
}

std::vector<std::vector<int64_t>> Trainer::expert_loads() const {
  return list_loads(state_->experts());
}

int64_t Trainer::agree(int64_t value) const {
  const Tensor most = view(std::span(&value, 1), {1});
  layout_.world->all_reduce(most, most, ReduceOp::kMax).wait();
  return value;
}

}  // namespace tessera

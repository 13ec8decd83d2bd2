#include "step/build/build_step.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "model/batch/model_balance.h"
#include "step/build/chunk_tasks.h"
#include "step/build/offload_tasks.h"
#include "step/build/parameter_tasks.h"

namespace tessera {
namespace {

/// Writes the tasks of a step in their order.
class StepBuilder {
 public:
  StepBuilder(const StepRequest& request, StepPasses passes, bool trains)
      : request_(request), passes_(std::move(passes)), trains_(trains), writer_(rank()) {
    for (int64_t c = 0; c < request.pipeline.num_chunks; ++c)
      chunks_.emplace_back(writer_, request.programs, request.placement, c);
    parameters_ = write_parameters();
    if (trains && request.placement != nullptr)
      offloads_.emplace(writer_, chunks_, request.placement->offloads);
  }

  /// The whole step.
  StepPlan build() && {
    begin();
    for (size_t i = 0; i < passes_.passes.size(); ++i) {
      const StepPass& pass = passes_.passes[i];
      if (pass.step.merged) {
        run_merged(pass, passes_.passes[++i]);
        continue;
      }
      take_place(pass);
      receive(pass);
      run(pass);
      send(pass);
      take_place_for_gradients(pass);
    }
    wait_all_sends();
    if (device_judges()) update();
    collect();
    share_results();
    if (updates() && !device_judges()) update();
    if (updates()) end();
    return std::move(writer_).take();
  }

 private:
  bool updates() const { return trains_ && request_.sharding.updates(); }
  /// One rank needs no other to know what comes of the step: its device updates, or skips the step,
  /// before the host has seen the losses. With QK clip the host sees the logits first.
  bool device_judges() const {
    const auto is_whole = [](const BucketExchange& bucket) { return bucket.num_ranks() == 1; };
    return updates() && request_.sharding.replicated && request_.world->size() == 1 &&
           request_.programs.shape.qk_clip == 0 &&
           std::ranges::all_of(request_.sharding.replicated->buckets, is_whole);
  }

  /// A chunk's place and the direction in which something is still being sent from it.
  using Place = std::tuple<int64_t, int64_t, PipelinePass>;

  int64_t rank() const { return request_.world->rank(); }
  const Communicator& stages() const { return *request_.pipeline.activations; }
  int64_t num_stages() const { return stages().size(); }
  int64_t next_stage() const { return (stages().rank() + 1) % num_stages(); }
  int64_t previous_stage() const { return (stages().rank() + num_stages() - 1) % num_stages(); }
  bool is_first(int64_t chunk) const { return stages().rank() == 0 && chunk == 0; }
  bool is_last(int64_t chunk) const {
    return stages().rank() == num_stages() - 1 && chunk == request_.pipeline.num_chunks - 1;
  }
  ChunkTasks& chunk(const StepPass& pass) { return chunks_[pass.step.chunk]; }
  static Place place_of(const StepPass& pass, PipelinePass direction) {
    return {pass.step.chunk, pass.place, direction};
  }

  std::unique_ptr<ParameterTasks> write_parameters() {
    const StepSharding& sharding = request_.sharding;
    if (sharding.sharded) return write_module_tasks(writer_, *sharding.sharded, passes_.runs);
    static const ReplicatedExchanges kNone;
    return write_bucket_tasks(writer_, sharding.replicated ? *sharding.replicated : kNone,
                              passes_.runs, request_.parameters.all().size(),
                              {.trains = trains_, .device_judges = device_judges()});
  }

  Task host_task(TaskAction action, std::string name) {
    return {.action = action, .lane = writer_.lane(LaneKind::kHost), .name = std::move(name)};
  }

  void begin() {
    if (!trains_) return;
    Task task = host_task(TaskAction::kBegin, "begin: read micro-batches");
    const Communicator& dp = *request_.programs.part.groups.dp;
    if (dp.size() > 1) task.inside.push_back({writer_.group(dp), 1, 2 * sizeof(int64_t)});
    writer_.add(std::move(task));
  }

  /// A forward pass writes hidden states alone. Were it to wait for gradients that are still being
  /// sent as well, two stages could wait for each other: each receives behind its own pass.
  void take_place(const StepPass& pass) {
    if (pass.begins) wait_sends(place_of(pass, PipelinePass::kForward));
  }

  /// Behind a forward pass: the place is to receive gradients, a run ahead of its backward pass.
  void take_place_for_gradients(const StepPass& pass) {
    if (pass.begins) wait_sends(place_of(pass, PipelinePass::kBackward));
  }

  void wait_sends(const Place& place) {
    for (const TaskId start : sends_[place]) writer_.wait_for(start);
    sends_[place].clear();
  }

  /// Hidden states go to the next stage and their gradients back, in groups of their own: the two
  /// kinds of messages between a pair of stages come in different orders.
  Task message(const StepPass& pass, const ChunkTasks::Message& message, size_t stream, bool in) {
    const bool forward = pass.step.pass == PipelinePass::kForward;
    const Communicator& group = forward ? stages() : *request_.pipeline.gradients;
    const bool to_next = forward != in;
    const int64_t peer = to_next ? next_stage() : previous_stage();
    return {.kind = in ? TaskKind::kReceive : TaskKind::kSend,
            .action = forward ? TaskAction::kForwardMessage : TaskAction::kBackwardMessage,
            .lane = writer_.group(group, LaneKind::kMessages),
            .name = fmt::format("{} {}, chunk {}, micro-batch {}", in ? "receive" : "send",
                                message.what, pass.step.chunk, pass.step.micro_batch),
            .bytes = in ? 0 : message.bytes,
            .subject = {.chunk = pass.step.chunk,
                        .place = pass.place,
                        .micro_batch = pass.step.micro_batch,
                        .stream = static_cast<int64_t>(stream),
                        .peer = peer}};
  }

  std::vector<ChunkTasks::Message> messages(const StepPass& pass, bool in) {
    if (pass.step.pass == PipelinePass::kWeight) return {};
    const bool forward = pass.step.pass == PipelinePass::kForward;
    const bool at_end = forward == in ? is_first(pass.step.chunk) : is_last(pass.step.chunk);
    if (at_end) return {};
    auto all = in ? chunk(pass).messages_in(pass) : chunk(pass).messages_out(pass);
    if (!trains_) all.resize(1);
    return all;
  }

  void receive(const StepPass& pass) {
    std::vector<TaskId> starts;
    for (const ChunkTasks::Message& one : messages(pass, true)) {
      Task task = message(pass, one, starts.size(), true);
      write(task, one.buffer);
      starts.push_back(writer_.start(std::move(task)));
    }
    for (const TaskId start : starts) writer_.wait_for(start);
  }

  void send(const StepPass& pass) {
    size_t stream = 0;
    for (const ChunkTasks::Message& one : messages(pass, false)) {
      Task task = message(pass, one, stream++, false);
      read(task, one.buffer);
      sends_[place_of(pass, pass.step.pass)].push_back(writer_.start(std::move(task)));
    }
  }

  /// A forward and a backward pass side by side. What came for either is there before both begin.
  void run_merged(const StepPass& forward, const StepPass& backward) {
    take_place(forward);
    receive(forward);
    receive(backward);
    writer_.add(chunk(forward).load(forward));
    add_runs(forward);
    finish_pass(forward);
    finish_pass(backward);
    // The stage before waits for gradients longer than the stage behind for hidden states.
    send(backward);
    send(forward);
    take_place_for_gradients(forward);
  }

  void run(const StepPass& pass) {
    if (pass.begins) writer_.add(chunk(pass).load(pass));
    add_runs(pass);
    finish_pass(pass);
  }

  void add_runs(const StepPass& pass) {
    for (size_t idx = pass.first_run; idx < pass.last_run; ++idx) {
      const StepRun& run = passes_.runs[idx];
      Task task = chunks_[run.chunk].run(run);
      parameters_->before_run(idx, task);
      if (offloads_) offloads_->before_run(static_cast<int>(idx));
      writer_.add(std::move(task));
      if (offloads_) offloads_->after_run(static_cast<int>(idx));
      parameters_->after_run(idx);
    }
  }

  void finish_pass(const StepPass& pass) {
    const bool forward = pass.step.pass == PipelinePass::kForward;
    if (trains_ && forward && balances_whole_model(request_.programs.config)) {
      if (is_last(pass.step.chunk)) take_place_for_gradients(pass);  // the sums' are among them
      writer_.add(chunk(pass).sum_balance(pass));
    }
    if (pass.ends) writer_.add(chunk(pass).publish(pass));
  }

  void wait_all_sends() {
    for (const auto& [place, starts] : sends_) {
      for (const TaskId start : starts) writer_.wait_for(start);
    }
  }

  std::vector<BufferId> results() {
    std::vector<BufferId> all;
    for (const StepPass& pass : passes_.passes) {
      if (pass.ends) all.push_back(chunk(pass).results(pass.step.micro_batch));
    }
    return all;
  }

  void update() {
    parameters_->finish_gradients();
    judged_ = parameters_->update(*request_.world, results());
  }

  void collect() {
    Task task = host_task(trains_ ? TaskAction::kCollect : TaskAction::kCollectLosses,
                          "results of all micro-batches");
    for (const BufferId result : results()) read(task, result);
    if (judged_) task.after.push_back(*judged_);
    collected_ = writer_.add(std::move(task));
  }

  void share_results() {
    Task task = host_task(TaskAction::kShareResults, "results of all ranks");
    task.after.push_back(*collected_);
    if (updates() && request_.world->size() > 1)
      task.inside.push_back({writer_.group(*request_.world), 1, 0});
    writer_.add(std::move(task));
  }

  void end() { writer_.add(host_task(TaskAction::kEnd, "end: expert biases, position")); }

  const StepRequest& request_;
  StepPasses passes_;
  bool trains_;
  PlanWriter writer_;
  std::vector<ChunkTasks> chunks_;
  std::unique_ptr<ParameterTasks> parameters_;
  std::optional<OffloadTasks> offloads_;
  std::map<Place, std::vector<TaskId>> sends_;
  std::optional<TaskId> collected_;
  std::optional<TaskId> judged_;  // where the device judges: the host learns of it
};

}  // namespace

StepPlan build_step(const StepRequest& request) {
  StepPasses passes = list_step_passes(request.programs, &request.parameters, request.steps);
  return post_receives_ahead(StepBuilder(request, std::move(passes), true).build());
}

StepPlan build_evaluation(const StepRequest& request) {
  StepPasses passes = list_evaluation_passes(request.programs, request.parameters);
  return StepBuilder(request, std::move(passes), false).build();
}

}  // namespace tessera

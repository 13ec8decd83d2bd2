#include "model/run/pipeline_executor.h"

#include <algorithm>
#include <set>

namespace tessera {
namespace {

/// Whether each step is the last pass of its micro-batch in its chunk.
std::vector<bool> find_last_passes(const std::vector<PipelineStep>& steps) {
  std::set<std::pair<int64_t, int64_t>> seen;
  std::vector<bool> last(steps.size());
  for (size_t i = steps.size(); i-- > 0;)
    last[i] = seen.emplace(steps[i].chunk, steps[i].micro_batch).second;
  return last;
}

/// Whether no later step of its chunk adds to its weights' gradients.
bool completes_chunk(const std::vector<PipelineStep>& steps, size_t idx) {
  const auto later = std::span(steps).subspan(idx + 1);
  return std::ranges::none_of(
      later, [&](const PipelineStep& step) { return step.chunk == steps[idx].chunk; });
}

}  // namespace

std::vector<int64_t> count_in_flight(const std::vector<PipelineStep>& steps, int64_t num_chunks) {
  std::vector<int64_t> now(static_cast<size_t>(num_chunks), 0);
  std::vector<int64_t> most(now.size(), 0);
  const std::vector<bool> last = find_last_passes(steps);
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto chunk = static_cast<size_t>(steps[i].chunk);
    if (steps[i].pass == PipelinePass::kForward) most[chunk] = std::max(most[chunk], ++now[chunk]);
    if (last[i]) --now[chunk];
  }
  return most;
}

PipelineExecutor::PipelineExecutor(TrainingModel& model, PipelinePlace place,
                                   std::vector<PipelineStep> steps)
    : model_(model), place_(std::move(place)), steps_(std::move(steps)) {
  for (const int64_t count : model.part().in_flight)
    places_.emplace_back(static_cast<size_t>(count));
  place_.activations->connect_neighbours();
  place_.gradients->connect_neighbours();
}

void PipelineExecutor::Place::wait_sends() {
  for (Pending& send : sends) send.wait();
  sends.clear();
}

PipelineExecutor::Place& PipelineExecutor::at(const RunSlot& slot) {
  return places_[static_cast<size_t>(slot.chunk)][static_cast<size_t>(slot.place)];
}

RunSlot PipelineExecutor::find_place(int64_t chunk, int64_t micro_batch) const {
  const auto& places = places_[static_cast<size_t>(chunk)];
  const auto found = std::ranges::find(places, micro_batch, &Place::micro_batch);
  ensure(found != places.end(), "micro-batch {} has no place in chunk {}", micro_batch, chunk);
  return {chunk, found - places.begin()};
}

RunSlot PipelineExecutor::take_place(int64_t chunk, int64_t micro_batch) {
  const RunSlot slot = find_place(chunk, -1);
  Place& place = at(slot);
  place.wait_sends();
  place.micro_batch = micro_batch;
  return slot;
}

void PipelineExecutor::forward(const PipelineStep& step, const MicroBatch& batch,
                               const LossScales& scales, const NodeObserver& observer,
                               const PassHooks& hooks) {
  const RunSlot slot = take_place(step.chunk, step.micro_batch);
  ChunkRun& run = model_.run_at(slot);
  const ChunkRun::Messages messages = run.forward_messages();
  if (!is_first(step.chunk)) {
    for (const Tensor& message : messages.in)
      place_.activations->receive(message, previous_stage()).wait();
  }
  run.load(batch, scales);
  loaded_.push_back({slot, step.micro_batch});
  run.forward(observer, hooks);
  if (is_last(step.chunk)) return;
  std::vector<Pending>& sends = at(slot).sends;
  for (const Tensor& message : messages.out)
    sends.push_back(place_.activations->send(message, next_stage()));
}

void PipelineExecutor::backward(const PipelineStep& step, const NodeObserver& observer,
                                const PassHooks& hooks) {
  const RunSlot slot = find_place(step.chunk, step.micro_batch);
  ChunkRun& run = model_.run_at(slot);
  const ChunkRun::Messages messages = run.backward_messages();
  if (!is_last(step.chunk)) {
    for (const Tensor& message : messages.in)
      place_.gradients->receive(message, next_stage()).wait();
  }
  run.backward(observer, hooks);
  if (is_first(step.chunk)) return;
  std::vector<Pending>& sends = at(slot).sends;
  for (const Tensor& message : messages.out)
    sends.push_back(place_.gradients->send(message, previous_stage()));
}

MicroBatchResult PipelineExecutor::run(const std::vector<MicroBatch>& batches,
                                       const LossScales& scales, const NodeObserver& observer,
                                       const PassHooks& hooks) {
  give(batches, scales, observer, hooks);
  model_.device().synchronize();
  return collect();
}

void PipelineExecutor::give(const std::vector<MicroBatch>& batches, const LossScales& scales,
                            const NodeObserver& observer, const PassHooks& hooks) {
  const std::vector<bool> last_passes = find_last_passes(steps_);
  loaded_.clear();
  finished_.clear();
  losses_.clear();
  for (size_t i = 0; i < steps_.size(); ++i) {
    const PipelineStep& step = steps_[i];
    if (step.pass == PipelinePass::kForward) {
      forward(step, batches.at(static_cast<size_t>(step.micro_batch)), scales, observer, hooks);
      continue;
    }
    const PassHooks& last = completes_chunk(steps_, i) ? hooks : PassHooks();
    if (step.pass == PipelinePass::kBackward) backward(step, observer, last);
    const RunSlot slot = find_place(step.chunk, step.micro_batch);
    if (last_passes[i]) {
      model_.run_at(slot).backward_weights(observer, last);
      model_.run_at(slot).finish();
      finished_.push_back(slot);
      if (const Tensor loss = model_.run_at(slot).finished_loss()) losses_.push_back(loss);
      at(slot).micro_batch = -1;
    }
  }
  finish_sends();
}

void PipelineExecutor::give_again(const std::vector<MicroBatch>& batches,
                                  const LossScales& scales) {
  for (const Loading& loading : loaded_) {
    model_.run_at(loading.slot).stage(batches.at(static_cast<size_t>(loading.micro_batch)), scales);
  }
  for (const RunSlot& slot : finished_) model_.run_at(slot).finish_again();
}

MicroBatchResult PipelineExecutor::collect() {
  MicroBatchResult result;
  for (const RunSlot& slot : finished_) result += model_.run_at(slot).collect();
  return result;
}

void PipelineExecutor::forget() {
  for (auto& places : places_) {
    for (Place& place : places) place.micro_batch = -1;
  }
}

double PipelineExecutor::evaluate(const MicroBatch& batch, const NodeObserver& observer) {
  double loss = 0;
  for (int64_t chunk = 0; chunk < place_.num_chunks; ++chunk) {
    ChunkRun& run = model_.run_at({chunk, 0});
    Place& place = at({chunk, 0});
    place.wait_sends();
    if (!is_first(chunk)) place_.activations->receive(run.hidden_in(), previous_stage()).wait();
    run.load(batch, {.loss = 1});
    loss += run.evaluate(observer);
    if (!is_last(chunk))
      place.sends.push_back(place_.activations->send(run.hidden_out(), next_stage()));
  }
  finish_sends();
  return loss;
}

void PipelineExecutor::finish_sends() {
  for (auto& places : places_) {
    for (Place& place : places) place.wait_sends();
  }
}

}  // namespace tessera

#include "train/memory/planned_rank.h"

#include "comm/planned_world.h"
#include "step/build/place_saved.h"
#include "train/setup/device_choice.h"
#include "train/setup/size_check.h"
#include "train/state/model_state.h"

namespace tessera {

void PlannedRank::set_micro_batches(const Settings& settings) {
  schedule_micro_batches(layout, settings);
  model.place(place_saved(model.programs(), layout.steps));
}

PlannedRank plan_rank(const Settings& settings, int64_t rank, int64_t num_ranks) {
  check_batch(settings.model, settings.train.micro_batch, settings.data.sequence_length);
  return plan_rank(settings, rank, num_ranks, plan_backend(settings, num_ranks),
                   batch_shape(settings));
}

PlannedRank plan_rank(const Settings& settings, int64_t rank, int64_t num_ranks, Backend backend,
                      const BatchShape& shape) {
  const auto world = make_planned_world(rank, num_ranks);
  RunLayout layout = make_run_layout(settings, *world);
  TrainingModel model(settings.model, shape, settings.train.saved_policy(), backend, layout.part);
  model.place(place_saved(model.programs(), layout.steps));
  return {std::move(backend), std::move(layout), std::move(model)};
}

StepPlan plan_step(const Settings& settings, const PlannedRank& rank) {
  const auto parameters = ParameterSet::without_memory(
      list_parameters(settings.model, settings.train.dtype(), rank.layout.part.groups,
                      rank.layout.part.chunks, batch_shape(settings).products));
  return build_step(request_step(settings, rank.layout, rank.model, parameters));
}

}  // namespace tessera

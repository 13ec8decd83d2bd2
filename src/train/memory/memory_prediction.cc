#include "train/memory/memory_prediction.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <vector>

#include "comm/scratch.h"
#include "core/memory.h"
#include "train/setup/machine.h"
#include "train/setup/replica_groups.h"

namespace tessera {
namespace {

constexpr int64_t kMebibyte = 1 << 20;

/// What oneDNN's packing buffers and compiled kernels grow by with the shapes of a model's
/// products, as measured; the rest came with the products that were made before (MatrixPeakMeter).
int64_t library_scratch() {
  return omp_get_max_threads() * kMebibyte;
}

/// What a rank's exchanges take as they go: the heap of MPI and of messages, and scratch memory of
/// the reductions of gradients that are under way (ScratchPool). How many there are at once depends
/// on which rank is ahead: of two and four ranks, 3 to 4 MiB were measured between pipeline stages,
/// and 5 to 14 with replicas, experts or full sharding. There is never more under way than
/// gradients.
int64_t exchange_scratch(const Settings& settings, const RunLayout& layout, int64_t gradients) {
  constexpr int64_t kOfMessages = 4 * kMebibyte;
  constexpr int64_t kOfReductions = 6 * ScratchPool::kBytes;
  if (layout.num_ranks() == 1) return 0;
  const auto replicas = list_replica_ranks(settings, layout.layout, layout.rank());
  const bool reduces = std::ranges::any_of(
      replicas, [](const ReplicaRanks& group) { return std::ssize(group.ranks) > 1; });
  return std::min(gradients, kOfMessages + (reduces ? kOfReductions : 0));
}

/// Host memory that a rank still wants, and where.
struct MachineNeed {
  std::array<char, 64> machine{};
  int64_t bytes = 0;
};

MachineNeed make_need(int64_t bytes) {
  MachineNeed need{.machine = {}, .bytes = bytes};
  machine_name().copy(need.machine.data(), need.machine.size() - 1);
  return need;
}

}  // namespace

std::string describe_overhead(const DeviceOverhead& overhead) {
  std::string text;
  if (overhead.kernels > 0) text += fmt::format(", {} kernels", format_bytes(overhead.kernels));
  if (overhead.communication > 0)
    text += fmt::format(", {} communication", format_bytes(overhead.communication));
  if (overhead.graphs > 0) text += fmt::format(", {} CUDA graphs", format_bytes(overhead.graphs));
  return text;
}

int64_t snapshot_bytes(const Settings& settings, const RunLayout& layout) {
  const RunSettings& run = settings.run;
  const bool saves_between_steps =
      run.save && run.checkpoint_interval > 0 && run.checkpoint_interval < settings.train.steps;
  if (!run.background_save || !saves_between_steps) return 0;
  return ModelState::count_saved_bytes(settings, layout);
}

bool has_room_for_snapshot(const MemoryPrediction& prediction, int64_t available,
                           Communicator& world) {
  const int64_t on_host =
      (prediction.on_host ? prediction.total() - prediction.program : prediction.beside()) +
      prediction.peer_copies;
  MachineNeed own = make_need(on_host);
  std::vector<MachineNeed> all(world.size());
  constexpr int64_t kBytes = sizeof(MachineNeed);
  world
      .all_gather({&own, DType::kU8, {1, kBytes}}, {all.data(), DType::kU8, {world.size(), kBytes}})
      .wait();
  int64_t wanted = 0;
  for (const MachineNeed& need : all) wanted += need.machine == own.machine ? need.bytes : 0;
  int64_t lacks = wanted > available ? 1 : 0;
  const Tensor most = view(std::span(&lacks, 1), {1});
  world.all_reduce(most, most, ReduceOp::kMax).wait();
  return lacks == 0;
}

std::string describe_snapshot(const MemoryPrediction& prediction) {
  std::string text;
  if (prediction.snapshot > 0) {
    text += fmt::format(", {} a copy to save{}", format_bytes(prediction.snapshot),
                        prediction.on_host ? "" : " (of the host's memory, not of the total)");
  }
  if (prediction.peer_copies > 0) {
    text += fmt::format(", {} copies of ranks' states (of the host's memory, not of the total)",
                        format_bytes(prediction.peer_copies));
  }
  return text;
}

std::string describe_offloaded(const MemoryPrediction& prediction) {
  std::string text;
  const auto add = [&](int64_t bytes, std::string_view what) {
    if (bytes == 0) return;
    text += fmt::format(", {} offloaded {}{}", format_bytes(bytes), what,
                        prediction.on_host ? "" : " (of the host's memory, not of the total)");
  };
  add(prediction.activations.offloaded, "activations");
  add(prediction.state.on_host, "optimizer state");
  return text;
}

std::string describe_worst(const MemoryPrediction& prediction) {
  const int64_t worst = prediction.activations.worst;
  if (worst == 0) return "";
  std::string text = fmt::format(", {} more where routing is the worst", format_bytes(worst));
  if (prediction.fitting_skew > 0) {
    text += fmt::format(
        ", which does not fit: experts of a rank may get {:.1f} times a balanced share of the rows",
        prediction.fitting_skew);
  }
  return text;
}

MemoryPrediction predict_memory(const Settings& settings, const RunLayout& layout,
                                const TrainingModel& model, const Backend& backend,
                                int64_t device_bytes) {
  MemoryPrediction prediction{.state = ModelState::count_bytes(settings, layout, backend),
                              .activations = model.activation_bytes(),
                              .overhead = predict_overhead(settings, layout, model, backend, true),
                              .on_host = backend.is_host()};
  if (backend.is_host()) {
    prediction.program = process_memory().held() + library_scratch() +
                         exchange_scratch(settings, layout, prediction.state.gradients);
  } else {
    prediction.program = backend.device().used_bytes();
    const int64_t free = device_bytes - prediction.total();
    if (device_bytes > 0 && free >= 0 && prediction.activations.worst > free)
      prediction.fitting_skew = model.find_skew(free);
  }
  return prediction;
}

MemoryPrediction predict_memory(const Settings& settings, const PlannedRank& rank) {
  return {.state = ModelState::count_bytes(settings, rank.layout, rank.backend),
          .activations = rank.model.activation_bytes(),
          .overhead = predict_overhead(settings, rank.layout, rank.model, rank.backend),
          .snapshot = snapshot_bytes(settings, rank.layout),
          .on_host = rank.backend.is_host()};
}

std::string describe(const MemoryPrediction& prediction) {
  const ModelState::Bytes& state = prediction.state;
  return fmt::format(
      "{} were predicted at the peak: {} weights, {} gradients, {} optimizer, {} activations{}{}{} "
      "and {} in use before",
      format_bytes(prediction.total()), format_bytes(state.weights), format_bytes(state.gradients),
      format_bytes(state.optimizer), format_bytes(prediction.activations.total()),
      describe_offloaded(prediction), describe_overhead(prediction.overhead),
      describe_snapshot(prediction), format_bytes(prediction.program));
}

void require_memory(const MemoryPrediction& prediction, const std::string& device,
                    int64_t device_bytes) {
  const ModelState::Bytes& state = prediction.state;
  require(prediction.total() <= device_bytes,
          "out of memory: training needs {} of {} at the peak: {} weights, {} gradients, {} "
          "optimizer, {} activations{} and {} that are in use already; it has {}, of which {} are "
          "free. Use a smaller model, train.micro_batch or data.sequence_length, or more "
          "train.recompute or train.offload, which a train.memory_limit chooses",
          format_bytes(prediction.total()), device, format_bytes(state.weights),
          format_bytes(state.gradients), format_bytes(state.optimizer),
          format_bytes(prediction.activations.total()), describe_overhead(prediction.overhead),
          format_bytes(prediction.program), format_bytes(device_bytes),
          format_bytes(std::max<int64_t>(device_bytes - prediction.program, 0)));
}

}  // namespace tessera

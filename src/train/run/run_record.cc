#include "train/run/run_record.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>
#include <set>

#include "comm/thread/thread_world.h"
#include "core/host_tensor.h"
#include "core/process/stopwatch.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<float> as_floats(const Tensor& anywhere) {
  const HostTensor host(anywhere, HostTensor::Access::kRead);
  const Tensor& tensor = host.get();
  std::vector<float> values(tensor.num_elements());
  if (tensor.dtype == DType::kBF16) {
    std::ranges::copy(tensor.span<Bf16>(), values.begin());
  } else {
    std::ranges::copy(tensor.span<float>(), values.begin());
  }
  return values;
}

std::vector<NamedSlice> list_biases(const Trainer& trainer,
                                    const std::vector<ExpertState>& experts) {
  std::vector<NamedSlice> slices;
  for (const NamedTensor& bias : name_expert_biases(trainer.settings().model, experts))
    slices.push_back({bias.name, bias.tensor, Slice::whole(bias.tensor.shape)});
  return slices;
}

bool is_copy(const NamedSlice& part, WholeTensor& whole) {
  std::vector<float> expected(part.tensor.num_elements());
  copy_slice_from(part.slice, view(std::span(whole.values), whole.shape),
                  view(std::span(expected), part.tensor.shape));
  if (part.tensor.dtype == DType::kBF16) {
    for (float& x : expected) x = static_cast<float>(Bf16(x));
  }
  return as_floats(part.tensor) == expected;
}

/// One rank's part in a record that all ranks, being threads, fill together.
class RankRecorder {
 public:
  RankRecorder(Trainer& trainer, RunRecord& record, std::mutex& mutex,
               std::set<std::string>& diverged)
      : trainer_(trainer), record_(record), mutex_(mutex), diverged_(diverged) {}

  void run(int64_t steps) {
    add(optimizer().weight_slices(HeldPart::kOwned), record_.start);
    for (int64_t step = 0; step < steps; ++step) {
      const StepOutcome outcome = trainer_.step();
      if (step == 0) add(optimizer().gradient_slices(), record_.gradients);
      if (!is_first()) continue;
      record_.outcomes.push_back(outcome);
      record_.loads.push_back(trainer_.expert_loads());
    }
    trainer_.state().wait_weights();
    const auto biases = list_biases(trainer_, trainer_.state().experts());
    add(optimizer().weight_slices(HeldPart::kOwned), record_.weights);
    if (is_first()) add(biases, record_.biases);
    trainer_.layout().world->barrier();
    find_diverged(optimizer().weight_slices(HeldPart::kHeld), record_.weights);
    find_diverged(biases, record_.biases);
    trainer_.layout().world->barrier();
  }

 private:
  bool is_first() const { return trainer_.layout().rank() == 0; }
  const DistributedOptimizer& optimizer() const { return trainer_.state().optimizer(); }

  void add(const std::vector<NamedSlice>& slices, WholeTensors& whole) {
    const std::scoped_lock lock(mutex_);
    gather_parts(slices, whole);
  }
  void find_diverged(const std::vector<NamedSlice>& held, WholeTensors& whole) {
    const std::scoped_lock lock(mutex_);
    for (std::string& name : list_diverged(held, whole)) diverged_.insert(std::move(name));
  }

  Trainer& trainer_;
  RunRecord& record_;
  std::mutex& mutex_;
  std::set<std::string>& diverged_;
};

}  // namespace

void gather_parts(const std::vector<NamedSlice>& slices, WholeTensors& whole) {
  for (const NamedSlice& slice : slices) {
    WholeTensor& tensor = whole[slice.name];
    tensor.shape = slice.slice.global;
    tensor.values.resize(tensor.shape.num_elements(), std::numeric_limits<float>::quiet_NaN());
    std::vector<float> part = as_floats(slice.tensor);
    copy_slice_into(slice.slice, view(std::span(part), slice.tensor.shape),
                    view(std::span(tensor.values), tensor.shape));
  }
}

std::vector<std::string> list_diverged(const std::vector<NamedSlice>& held, WholeTensors& whole) {
  std::vector<std::string> names;
  for (const NamedSlice& part : held) {
    if (!is_copy(part, whole.at(part.name))) names.push_back(part.name);
  }
  return names;
}

RunRecord record_run(const Settings& settings, int64_t num_ranks, int64_t steps,
                     const DeviceChooser& choose) {
  RunRecord record;
  std::mutex mutex;
  std::set<std::string> diverged;
  const auto start = std::chrono::steady_clock::now();
  run_thread_world(num_ranks, [&](World& world) {
    Settings own = settings;
    own.run.cuda_graphs = GraphMode::kAuto;
    own.train.precision = Precision::kF32;
    own.precision = {};
    own.peer.copy = false;
    TrainingData data = open_training_data(own);
    Trainer trainer(std::move(own), std::move(data), world, choose);
    trainer.resume("");
    RankRecorder(trainer, record, mutex, diverged).run(steps);
  });
  record.diverged.assign(diverged.begin(), diverged.end());
  record.seconds = seconds_since(start);
  return record;
}

}  // namespace tessera

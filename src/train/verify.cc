#include "train/verify.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>

#include "comm/thread_world.h"
#include "core/file.h"
#include "core/progress.h"
#include "core/random.h"
#include "data/token_file_writer.h"
#include "train/trainer.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

/// A tensor's magnitude counts as at least this share of the largest in the model: a gradient that
/// is small because large parts cancel has the rounding of those parts. Times the usual tolerance
/// of 1e-4 it is about ten of F32's roundings of the largest, as sums over tokens and layers have
/// them.
constexpr double kFloor = 1e-2;

/// A folder that goes away with it.
class ScratchFolder {
 public:
  ScratchFolder() : path_(std::filesystem::temp_directory_path() / unique_name("tessera-verify-")) {
    std::filesystem::create_directories(path_);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  std::string file(const char* name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

/// Documents of random tokens and random lengths, so that sequences are packed unevenly.
void write_random_tokens(const Settings& settings, int64_t num_tokens, const std::string& prefix) {
  TokenFileWriter writer(prefix, settings.model.vocab_size);
  Random random(static_cast<uint64_t>(settings.run.seed), 77);
  const auto vocabulary = static_cast<uint64_t>(settings.model.vocab_size);
  const auto longest = static_cast<uint64_t>(2 * settings.data.sequence_length);
  while (writer.num_tokens() < num_tokens) {
    std::vector<int32_t> document(1 + random.next_below(longest));
    for (int32_t& token : document) token = static_cast<int32_t>(random.next_below(vocabulary));
    writer.append(document);
    writer.end_document();
  }
  writer.finish();
}

/// What a run leaves to be compared.
struct RunRecord {
  std::map<std::string, std::vector<float>> gradients;  ///< of the first step
  std::map<std::string, std::vector<float>> weights;    ///< after the last
  std::map<std::string, Shape> shapes;
  std::vector<StepOutcome> outcomes;
  std::vector<std::vector<std::vector<int64_t>>> loads;  ///< by step
  double seconds = 0;
};

/// Gathers slices of all ranks into whole tensors. The ranks may be threads.
class Gatherer {
 public:
  Gatherer(std::map<std::string, std::vector<float>>& whole, std::map<std::string, Shape>& shapes,
           std::mutex& mutex)
      : whole_(whole), shapes_(shapes), mutex_(mutex) {}

  void add(const std::vector<NamedSlice>& slices) {
    const std::scoped_lock lock(mutex_);
    for (const NamedSlice& slice : slices) {
      const Shape& global = slice.slice.global;
      auto& values = whole_[slice.name];
      values.resize(static_cast<size_t>(global.num_elements()), kMissing);
      shapes_[slice.name] = global;
      std::vector<float> wide(static_cast<size_t>(slice.tensor.num_elements()));
      if (slice.tensor.dtype == DType::kBF16) {
        std::ranges::copy(slice.tensor.span<Bf16>(), wide.begin());
      } else {
        std::ranges::copy(slice.tensor.span<float>(), wide.begin());
      }
      copy_slice_into(slice.slice, view(std::span(wide), slice.tensor.shape),
                      view(std::span(values), global));
    }
  }

 private:
  static constexpr float kMissing = std::numeric_limits<float>::quiet_NaN();
  std::map<std::string, std::vector<float>>& whole_;
  std::map<std::string, Shape>& shapes_;
  std::mutex& mutex_;
};

void run_rank(const Settings& settings, int64_t steps, World& world, RunRecord& record,
              std::mutex& mutex) {
  Settings own = settings;
  TrainingData data = open_training_data(own);
  Trainer trainer(std::move(own), std::move(data), world);
  trainer.resume("");
  for (int64_t step = 0; step < steps; ++step) {
    const StepOutcome outcome = trainer.step();
    if (step == 0) {
      Gatherer(record.gradients, record.shapes, mutex)
          .add(trainer.state().optimizer().gradient_slices());
    }
    if (world.rank() != 0) continue;
    record.outcomes.push_back(outcome);
    record.loads.push_back(trainer.expert_loads());
  }
  trainer.state().wait_weights();
  Gatherer(record.weights, record.shapes, mutex)
      .add(trainer.state().optimizer().weight_slices(Extent::kOwned));
  trainer.layout().world->barrier();
}

RunRecord run_layout(const Settings& settings, int64_t num_ranks, int64_t steps,
                     const RankLauncher& launch) {
  RunRecord record;
  std::mutex mutex;
  const auto start = Clock::now();
  launch(num_ranks, [&](World& world) { run_rank(settings, steps, world, record, mutex); });
  record.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return record;
}

std::vector<int64_t> unravel(int64_t element, const Shape& shape) {
  std::vector<int64_t> index(static_cast<size_t>(shape.rank()));
  for (int dim = shape.rank() - 1; dim >= 0; --dim) {
    index[static_cast<size_t>(dim)] = element % shape[dim];
    element /= shape[dim];
  }
  return index;
}

/// A difference that is no number counts as infinite.
double distance(double a, double b) {
  const double difference = std::abs(a - b);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

double largest(const std::vector<float>& values) {
  double most = 0;
  for (const float x : values) most = std::max(most, std::abs(static_cast<double>(x)));
  return most;
}

double largest(const std::map<std::string, std::vector<float>>& tensors) {
  double most = 0;
  for (const auto& [name, values] : tensors) most = std::max(most, largest(values));
  return most;
}

/// `floor`: what a small tensor's error is measured against at least.
Difference compare(const std::vector<float>& layout, const std::vector<float>& reference,
                   const Shape& shape, double floor) {
  if (layout.size() != reference.size())
    return {.error = std::numeric_limits<double>::infinity(), .index = {}};
  const double magnitude = std::max({largest(reference), floor, 1e-30});
  Difference worst;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double error = distance(layout[i], reference[i]) / magnitude;
    if (error <= worst.error) continue;
    worst = {.error = error,
             .layout = layout[i],
             .reference = reference[i],
             .index = unravel(static_cast<int64_t>(i), shape)};
  }
  return worst;
}

Difference compare(double layout, double reference) {
  const double scale = std::max(std::abs(reference), 1e-12);
  return {.error = layout == reference ? 0 : distance(layout, reference) / scale,
          .layout = layout,
          .reference = reference,
          .index = {}};
}

void compare_steps(const RunRecord& layout, const RunRecord& reference, Verification& result) {
  for (size_t step = 0; step < reference.outcomes.size(); ++step) {
    const StepOutcome& a = layout.outcomes[step];
    const StepOutcome& b = reference.outcomes[step];
    const std::tuple<const char*, double, double> pairs[] = {
        {"loss", a.loss, b.loss},
        {"balance loss", a.balance_loss, b.balance_loss},
        {"z loss", a.z_loss, b.z_loss},
        {"gradient norm", a.update.grad_norm, b.update.grad_norm},
        {"dropped", static_cast<double>(a.dropped), static_cast<double>(b.dropped)}};
    const int64_t number = static_cast<int64_t>(step) + 1;
    for (const auto& [name, value, expected] : pairs)
      result.scalars.push_back({name, number, compare(value, expected)});
    if (b.mtp_labels > 0)
      result.scalars.push_back({"prediction loss", number, compare(a.mtp_loss, b.mtp_loss)});
    for (size_t layer = 0; layer < reference.loads[step].size(); ++layer) {
      for (size_t e = 0; e < reference.loads[step][layer].size(); ++e) {
        result.moved_assignments +=
            std::max<int64_t>(layout.loads[step][layer][e] - reference.loads[step][layer][e], 0);
      }
    }
  }
}

std::string format_index(const std::vector<int64_t>& index) {
  return fmt::format("[{}]", fmt::join(index, ", "));
}

std::string describe_disagreement(const ParameterDifference& parameter, double tolerance) {
  const bool gradient = parameter.gradient.error > tolerance;
  const Difference& difference = gradient ? parameter.gradient : parameter.weight;
  return fmt::format(
      "first to differ: the {} of {} at {}: {:.9g} in the layout, {:.9g} on one rank",
      gradient ? "gradient" : "weight", parameter.name, format_index(difference.index),
      difference.layout, difference.reference);
}

}  // namespace

bool Verification::agrees() const {
  return worst() <= tolerance;
}

double Verification::worst() const {
  double error = 0;
  for (const ScalarDifference& scalar : scalars) error = std::max(error, scalar.difference.error);
  for (const ParameterDifference& parameter : parameters)
    error = std::max(error, parameter.error());
  return error;
}

const ParameterDifference* Verification::first_disagreement() const {
  const auto found = std::ranges::find_if(
      parameters, [&](const ParameterDifference& p) { return p.error() > tolerance; });
  return found == parameters.end() ? nullptr : &*found;
}

Verification verify_layout(const VerifyRequest& request) {
  const ScratchFolder scratch;
  Settings settings = request.settings;
  settings.data.tokens = scratch.file("tokens");
  settings.run.folder = scratch.file("run");
  require(
      settings.run.device != DeviceChoice::kCuda,
      "run.device = \"cuda\": layouts are compared on the CPU, where several ranks compute; give "
      "--run.device=cpu");
  // Several ranks compute there, and so must the one that they are compared with.
  settings.run.device = DeviceChoice::kCpu;
  settings.train.steps = request.steps;
  settings.schedule.num_steps = request.steps;
  const int64_t rows = settings.train.global_batch * request.steps;
  write_random_tokens(settings, 2 * (rows + 1) * settings.data.sequence_length,
                      settings.data.tokens);
  Settings single = settings;
  single.parallel = {};
  single.shard = {};

  const RankLauncher threads = [](int64_t ranks, const std::function<void(World&)>& body) {
    run_thread_world(ranks, body);
  };
  const RunRecord reference = run_layout(single, 1, request.steps, threads);
  const RunRecord layout = run_layout(settings, request.num_ranks, request.steps,
                                      request.launch ? request.launch : threads);
  Verification result;
  result.tolerance = request.tolerance;
  result.seconds_layout = layout.seconds;
  result.seconds_reference = reference.seconds;
  compare_steps(layout, reference, result);
  const double gradient_floor = kFloor * largest(reference.gradients);
  const double weight_floor = kFloor * largest(reference.weights);
  for (const ParameterSpec& spec : list_parameters(settings.model, settings.train.dtype())) {
    const auto find = [&](const auto& whole) {
      const auto found = whole.find(spec.name);
      return found == whole.end() ? std::vector<float>() : found->second;
    };
    result.parameters.push_back(
        {.name = spec.name,
         .gradient =
             compare(find(layout.gradients), find(reference.gradients), spec.shape, gradient_floor),
         .weight =
             compare(find(layout.weights), find(reference.weights), spec.shape, weight_floor)});
  }
  return result;
}

std::string describe(const Verification& verification, bool all) {
  std::string text =
      fmt::format("{:<48} {:>12} {:>12}\n", "largest relative error of", "gradient", "weight");
  std::vector<ParameterDifference> parameters = verification.parameters;
  constexpr size_t kShown = 12;
  if (!all) {
    std::ranges::stable_sort(parameters, std::greater<>(), &ParameterDifference::error);
    parameters.resize(std::min(parameters.size(), kShown));
  }
  for (const ParameterDifference& p : parameters)
    text += fmt::format("{:<48} {:>12.1e} {:>12.1e}\n", p.name, p.gradient.error, p.weight.error);
  if (parameters.size() < verification.parameters.size())
    text += fmt::format("... and {} parameters with smaller errors\n",
                        verification.parameters.size() - parameters.size());
  std::map<std::string, Difference> worst;
  for (const ScalarDifference& scalar : verification.scalars) {
    Difference& entry = worst[scalar.name];
    if (scalar.difference.error >= entry.error) entry = scalar.difference;
  }
  for (const auto& [name, difference] : worst)
    text += fmt::format("{:<48} {:>12.1e}   ({:.9g}, one rank {:.9g})\n", name, difference.error,
                        difference.layout, difference.reference);
  if (verification.moved_assignments > 0)
    text += fmt::format(
        "{} assignments went to other experts: two scores nearly tied, or the routing differs\n",
        verification.moved_assignments);
  if (const ParameterDifference* first = verification.first_disagreement())
    text += describe_disagreement(*first, verification.tolerance) + "\n";
  text += fmt::format("{}: worst error {:.1e}, allowed {:.0e} ({:.1f} s, one rank {:.1f} s)\n",
                      verification.agrees() ? "agrees" : "DIFFERS", verification.worst(),
                      verification.tolerance, verification.seconds_layout,
                      verification.seconds_reference);
  return text;
}

}  // namespace tessera

#include "train/plan/balance_stages.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

namespace tessera {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
/// By which two sums of the same times may differ.
constexpr double kRounding = 1 + 1e-9;

double seconds_of(const TaskWork& work) {
  double sum = 0;
  for (const auto& [name, seconds] : work.program->by_operator) sum += seconds;
  return sum;
}

/// Where contiguous parts of a list begin whose times, each part's put through `cost`, come to the
/// least by `join`.
class Cuts {
 public:
  Cuts(const ModelTimes& times, int64_t num_parts)
      : times_(times), num_parts_(num_parts), before_(times.layers.size() + 1) {
    std::partial_sum(times.layers.begin(), times.layers.end(), before_.begin() + 1);
  }

  int64_t num_layers() const { return std::ssize(times_.layers); }

  /// Of a part with layers from `first` to before `end`.
  double part(int64_t number, int64_t first, int64_t end) const {
    return before_[end] - before_[first] + (number == 0 ? times_.first : 0) +
           (number == num_parts_ - 1 ? times_.last : 0);
  }

  /// The ends of all parts.
  template <typename Cost, typename Join>
  std::vector<int64_t> find(const Cost& cost, const Join& join) const {
    const int64_t layers = num_layers();
    // The least of the first parts up to each layer, and where the last of these parts begins.
    std::vector<double> least(layers + 1, kNever);
    std::vector<std::vector<int64_t>> begins(num_parts_, std::vector<int64_t>(layers + 1));
    least[0] = 0;
    for (int64_t p = 0; p < num_parts_; ++p) {
      const bool may_be_empty = p == num_parts_ - 1;
      std::vector<double> next(layers + 1, kNever);
      for (int64_t end = 0; end <= layers; ++end) {
        for (int64_t first = 0; first <= end - (may_be_empty ? 0 : 1); ++first) {
          if (least[first] == kNever) continue;
          const double all = join(least[first], cost(part(p, first, end)));
          if (all >= next[end]) continue;
          next[end] = all;
          begins[p][end] = first;
        }
      }
      least = std::move(next);
    }
    std::vector<int64_t> ends(num_parts_, layers);
    for (int64_t p = num_parts_ - 1; p > 0; --p) ends[p - 1] = begins[p][ends[p]];
    return ends;
  }

 private:
  const ModelTimes& times_;
  int64_t num_parts_;
  std::vector<double> before_;
};

}  // namespace

double ModelTimes::of(const PipelineChunk& chunk) const {
  const auto begin = layers.begin() + chunk.first_layer;
  return std::accumulate(begin, begin + chunk.num_layers, 0.0) + (chunk.embedding ? first : 0) +
         (chunk.loss ? last : 0);
}

ModelTimes sum_times(const ModelConfig& config, std::span<const RankTimes> ranks) {
  ModelTimes times{.layers = std::vector<double>(config.num_layers, 0)};
  for (const RankTimes& rank : ranks) {
    for (const TaskId id : rank.plan.tasks.ids()) {
      const Task& task = rank.plan.tasks[id];
      if (task.kind != TaskKind::kRun || rank.work[id].program == nullptr) continue;
      const ProgramRef& ref = task.subject.program;
      const PipelineChunk& chunk = rank.chunks[task.subject.chunk];
      const bool is_decoder = ref.part == ProgramPart::kLayer && ref.idx < chunk.num_layers;
      double& of = ref.part == ProgramPart::kEmbedding ? times.first
                   : is_decoder                        ? times.layers[chunk.first_layer + ref.idx]
                                                       : times.last;
      of += seconds_of(rank.work[id]);
    }
  }
  std::map<LayerKind, std::pair<double, double>> of_kinds;  // seconds, and of how many layers
  std::pair<double, double> of_all;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (times.layers[layer] == 0) continue;
    for (auto* of : {&of_kinds[config.layer_kind(layer)], &of_all}) {
      of->first += times.layers[layer];
      of->second += 1;
    }
  }
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (times.layers[layer] > 0) continue;
    const auto found = of_kinds.find(config.layer_kind(layer));
    const auto& [seconds, count] = found == of_kinds.end() ? of_all : found->second;
    times.layers[layer] = seconds / std::max(count, 1.0);
  }
  return times;
}

double busiest_stage(const ModelTimes& times, const PipelineLayout& layout) {
  std::vector<double> stages(layout.num_stages, 0);
  for (size_t c = 0; c < layout.chunks.size(); ++c)
    stages[c % stages.size()] += times.of(layout.chunks[c]);
  return std::ranges::max(stages);
}

PipelineLayout balance_stages(const ModelTimes& times, int64_t num_stages, int64_t chunks_per_stage,
                              const LayerCounts& layers) {
  const int64_t count = num_stages * chunks_per_stage;
  const Cuts cuts(times, count);
  ensure(layers.decoder == cuts.num_layers() && layers.decoder >= count,
         "{} layers are to be cut into {} chunks", layers.decoder, count);
  const auto longest = [](double a, double b) { return std::max(a, b); };
  const std::vector<int64_t> shortest = cuts.find([](double part) { return part; }, longest);
  double limit = 0;
  for (int64_t c = 0; c < count; ++c)
    limit = std::max(limit, cuts.part(c, c == 0 ? 0 : shortest[c - 1], shortest[c]));
  const auto square = [limit](double part) {
    return part > limit * kRounding ? kNever : part * part;
  };
  const std::vector<int64_t> ends = cuts.find(square, std::plus<>());
  PipelineLayout layout{.num_stages = num_stages};
  for (int64_t c = 0; c < count; ++c) {
    const int64_t first = c == 0 ? 0 : ends[c - 1];
    const bool last = c == count - 1;
    layout.chunks.push_back({.embedding = c == 0,
                             .first_layer = first,
                             .num_layers = ends[c] - first,
                             .num_mtp = last ? layers.mtp : 0,
                             .loss = last});
  }
  return layout;
}

}  // namespace tessera

#include "train/metrics/run_history.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/error.h"

namespace tessera {
namespace {

LoadWindow window_of(const StepRecord& record) {
  LoadWindow window{record.step, record.step, 1, {}};
  for (const ExpertLoad& load : record.expert_load) {
    window.layers.push_back(
        {load.layer, {load.tokens_per_expert.begin(), load.tokens_per_expert.end()}});
  }
  return window;
}

bool same_experts(const LoadWindow& a, const LoadWindow& b) {
  return std::equal(a.layers.begin(), a.layers.end(), b.layers.begin(), b.layers.end(),
                    [](const LoadWindow::Layer& x, const LoadWindow::Layer& y) {
                      return x.layer == y.layer && x.tokens.size() == y.tokens.size();
                    });
}

}  // namespace

double LoadWindow::relative_load(size_t layer_idx, size_t expert) const {
  const std::vector<double>& tokens = layers[layer_idx].tokens;
  const double total = std::accumulate(tokens.begin(), tokens.end(), 0.0);
  return total > 0.0 ? tokens[expert] / total * static_cast<double>(tokens.size()) : 0.0;
}

void LoadWindow::merge(const LoadWindow& later) {
  last_step = later.last_step;
  num_records += later.num_records;
  for (size_t i = 0; i < layers.size(); ++i) {
    std::transform(layers[i].tokens.begin(), layers[i].tokens.end(), later.layers[i].tokens.begin(),
                   layers[i].tokens.begin(), std::plus<>());
  }
}

void RunHistory::add(const StepRecord& record) {
  if (!record.expert_load.empty()) add_load(record);
  if (record.validation_loss)
    add(ValidationRecord{record.step, record.tokens_seen, *record.validation_loss, 0.0});
  add_roundings(record);
  StepRecord& kept = steps_.emplace_back(record);
  kept.expert_load = {};
  kept.roundings = {};
}

void RunHistory::add_roundings(const StepRecord& record) {
  for (const LayerRoundings& layer : record.roundings) {
    auto most = std::ranges::find(most_rounded_, layer.layer, &LayerRoundings::layer);
    if (most == most_rounded_.end())
      most = most_rounded_.insert(most, LayerRoundings{.layer = layer.layer});
    for (double LayerRoundings::*const kind :
         {&LayerRoundings::activations, &LayerRoundings::weights, &LayerRoundings::gradients,
          &LayerRoundings::nonfinite})
      (*most).*kind = std::max((*most).*kind, layer.*kind);
  }
}

void RunHistory::add_load(const StepRecord& record) {
  LoadWindow window = window_of(record);
  require(windows_.empty() || same_experts(windows_.front(), window),
          "the expert loads of step {} are of other layers or experts than those of step {}",
          record.step, windows_.empty() ? 0 : windows_.front().first_step);
  if (!windows_.empty() && windows_.back().num_records < records_per_window_) {
    windows_.back().merge(window);
    return;
  }
  if (windows_.size() == kMaxWindows) halve_windows();
  windows_.push_back(std::move(window));
}

void RunHistory::halve_windows() {
  for (size_t i = 0; i < kMaxWindows / 2; ++i) {
    LoadWindow merged = std::move(windows_[2 * i]);
    merged.merge(windows_[2 * i + 1]);
    windows_[i] = std::move(merged);
  }
  windows_.resize(kMaxWindows / 2);
  records_per_window_ *= 2;
}

std::optional<LoadWindow> RunHistory::recent_load() const {
  if (windows_.empty()) return std::nullopt;
  const LoadWindow& last = windows_.back();
  if (windows_.size() == 1 || 2 * last.num_records >= records_per_window_) return last;
  LoadWindow recent = windows_[windows_.size() - 2];
  recent.merge(last);
  return recent;
}

std::vector<double> RunHistory::elapsed_seconds() const {
  std::vector<double> elapsed;
  elapsed.reserve(steps_.size());
  double total = 0.0;
  for (const StepRecord& step : steps_) {
    if (std::isfinite(step.step_seconds)) total += step.step_seconds;
    elapsed.push_back(total);
  }
  return elapsed;
}

double RunHistory::total_dropped() const {
  return std::accumulate(steps_.begin(), steps_.end(), 0.0, [](double sum, const StepRecord& step) {
    return sum + static_cast<double>(step.dropped_tokens);
  });
}

int64_t RunHistory::peak_memory() const {
  int64_t peak = 0;
  for (const StepRecord& step : steps_) peak = std::max(peak, step.memory_used);
  return peak;
}

std::optional<ValidationRecord> RunHistory::best_validation() const {
  std::optional<ValidationRecord> best;
  for (const ValidationRecord& record : validations_) {
    if (std::isfinite(record.loss) && (!best || record.loss < best->loss)) best = record;
  }
  return best;
}

}  // namespace tessera

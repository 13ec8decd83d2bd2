#include "train/metrics/findings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "core/memory.h"
#include "core/process/progress.h"

namespace tessera {
namespace {

constexpr double kStarvedShare = 0.1;
constexpr double kOverloadedShare = 3.0;
constexpr double kMemoryTolerance = 0.03;
constexpr double kOverfitRise = 1.02;
constexpr size_t kMaxNamed = 8;

std::string plural(double count, std::string_view word) {
  return fmt::format("{:.0f} {}{}", count, word, count == 1.0 ? "" : "s");
}

/// "a, b and 3 more".
std::string named(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kMaxNamed);
  std::string text =
      fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<long>(shown), ", "));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

/// The mean loss of the last finite steps: at most 50 of them, at most a tenth of the run.
double recent_loss(const RunHistory& history) {
  const auto& steps = history.steps();
  const size_t wanted = std::clamp<size_t>(steps.size() / 10, 1, 50);
  double sum = 0.0;
  size_t count = 0;
  for (auto step = steps.rbegin(); step != steps.rend() && count < wanted; ++step) {
    if (!std::isfinite(step->loss)) continue;
    sum += step->loss;
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : std::nan("");
}

void loss_findings(const RunHistory& history, std::vector<Finding>& findings) {
  const auto& steps = history.steps();
  const double now = recent_loss(history);
  if (steps.size() > 1 && std::isfinite(steps.front().loss) && std::isfinite(now)) {
    const bool fell = now < steps.front().loss;
    findings.push_back(
        {fell ? Severity::kGood : Severity::kBad,
         fmt::format("Training loss {} from {:.4f} at step {} to {:.4f} (mean of the last steps).",
                     fell ? "fell" : "did not fall: it went", steps.front().loss,
                     steps.front().step, now)});
  }
  const auto best = history.best_validation();
  if (!best) return;
  const ValidationRecord& last = history.validations().back();
  findings.push_back(
      {Severity::kGood, fmt::format("Best validation loss {:.4f} (perplexity {:.4g}) at step {}.",
                                    best->loss, std::exp(best->loss), best->step)});
  if (last.step > best->step && last.loss > best->loss * kOverfitRise) {
    findings.push_back(
        {Severity::kWarning,
         fmt::format(
             "Validation loss has risen since, to {:.4f} at step {}: the model may be overfitting.",
             last.loss, last.step)});
  }
}

int64_t count_overflows(const RunHistory& history) {
  return std::ranges::count_if(history.steps(), &StepRecord::overflowed);
}

/// A scale that grows until gradients overflow leaves out a step each time: that is how it works.
void loss_scale_finding(const RunHistory& history, std::vector<Finding>& findings) {
  const int64_t count = count_overflows(history);
  if (count == 0) return;
  constexpr double kMuch = 0.05;
  const auto num_steps = static_cast<double>(std::ssize(history.steps()));
  const bool much = num_steps >= 200 && static_cast<double>(count) > kMuch * num_steps;
  findings.push_back(
      {much ? Severity::kWarning : Severity::kInfo,
       fmt::format("Gradients overflowed F16 in {}, whose updates were left out; the "
                   "loss scale was {} at last.",
                   plural(static_cast<double>(count), "step"),
                   history.steps().back().loss_scale.value_or(1))});
}

void nonfinite_findings(const RunHistory& history, std::vector<Finding>& findings) {
  std::vector<std::string> steps;
  for (const StepRecord& step : history.steps()) {
    if (!step.is_finite() && !step.overflowed()) steps.push_back(fmt::format("{}", step.step));
  }
  if (!steps.empty()) {
    findings.push_back(
        {Severity::kBad,
         fmt::format("Loss or gradient norm was not finite in {}: step {}.",
                     plural(static_cast<double>(steps.size()), "step"), named(steps))});
  }
  loss_scale_finding(history, findings);
  const int64_t skipped = history.steps().back().skipped_steps - count_overflows(history);
  if (skipped > 0) {
    findings.push_back(
        {Severity::kWarning, fmt::format("{} skipped because of numbers that were not finite.",
                                         plural(static_cast<double>(skipped), "update"))});
  }
  const int64_t repeated = history.steps().back().repeated_steps.value_or(0);
  if (repeated > 0) {
    findings.push_back(
        {Severity::kWarning,
         fmt::format("{} done again since more rows came to a rank's experts than train.stash had "
                     "room for; a larger train.stash_factor avoids that.",
                     plural(static_cast<double>(repeated), "step"))});
  }
}

void zero_gradient_finding(const RunHistory& history, std::vector<Finding>& findings) {
  std::vector<std::string> steps;
  for (const StepRecord& step : history.steps()) {
    if (step.grad_norm == 0.0) steps.push_back(fmt::format("{}", step.step));
  }
  if (steps.empty()) return;
  findings.push_back(
      {Severity::kBad,
       fmt::format("The gradient norm was exactly 0 in {}, which learnt nothing: step {}.",
                   plural(static_cast<double>(steps.size()), "step"), named(steps))});
}

/// The experts whose relative load `matches`, as "layer 3 expert 5 (0.02×)".
template <typename Predicate>
std::vector<std::string> experts_where(const LoadWindow& window, const Predicate& matches) {
  std::vector<std::string> names;
  for (size_t layer = 0; layer < window.layers.size(); ++layer) {
    for (size_t expert = 0; expert < window.layers[layer].tokens.size(); ++expert) {
      const double load = window.relative_load(layer, expert);
      if (!matches(load)) continue;
      const std::string share = load > 0.0 ? fmt::format(" ({:.2g}×)", load) : "";
      names.push_back(
          fmt::format("layer {} expert {}{}", window.layers[layer].layer, expert, share));
    }
  }
  return names;
}

void expert_findings(const RunHistory& history, std::vector<Finding>& findings) {
  const auto window = history.recent_load();
  if (!window) return;
  const std::string when =
      window->first_step == window->last_step
          ? fmt::format("in step {}", window->last_step)
          : fmt::format("in steps {} to {}", window->first_step, window->last_step);
  const auto report = [&](Severity severity, const std::vector<std::string>& names,
                          const std::string& what) {
    if (names.empty()) return;
    findings.push_back(
        {severity, fmt::format("{} {} {}: {}.", plural(static_cast<double>(names.size()), "expert"),
                               what, when, named(names))});
  };
  const auto dead = experts_where(*window, [](double load) { return load == 0.0; });
  const auto starved =
      experts_where(*window, [](double load) { return load > 0.0 && load < kStarvedShare; });
  const auto overloaded =
      experts_where(*window, [](double load) { return load > kOverloadedShare; });
  report(Severity::kBad, dead, "dead, without a single token,");
  report(Severity::kWarning, starved, "starved, below a tenth of a perfect share,");
  report(Severity::kWarning, overloaded, "overloaded, above three times a perfect share,");
  if (dead.empty() && starved.empty()) {
    findings.push_back(
        {Severity::kGood, fmt::format("Every expert of every layer is in use {}.", when)});
  }
}

void drop_findings(const RunHistory& history, std::vector<Finding>& findings) {
  if (!history.is_moe()) return;
  const double dropped = history.total_dropped();
  if (dropped == 0.0) {
    findings.push_back({Severity::kGood, "No token was dropped by an expert's capacity."});
    return;
  }
  const auto num_steps =
      std::count_if(history.steps().begin(), history.steps().end(),
                    [](const StepRecord& step) { return step.dropped_tokens > 0; });
  findings.push_back(
      {Severity::kWarning,
       fmt::format("{} dropped by the experts' capacity, in {} of {} steps; {} in the last step.",
                   plural(dropped, "assignment"), num_steps, history.steps().size(),
                   history.steps().back().dropped_tokens)});
}

/// "gradients of layer 3 (0.1%)".
std::string name_most(const LayerRoundings& layer) {
  const double most = layer.saturated();
  const char* const kind = most == layer.gradients     ? "gradients"
                           : most == layer.activations ? "activations"
                                                       : "weights";
  return fmt::format("{} of layer {} ({:.2g}%)", kind, layer.layer, 100.0 * most);
}

/// Of delayed scales.
void saturation_finding(const RunHistory& history, std::vector<Finding>& findings) {
  const std::vector<StepRecord>& steps = history.steps();
  if (!std::any_of(steps.begin(), steps.end(), [](const auto& s) { return s.saturated; })) return;
  const auto num_steps = std::count_if(steps.begin(), steps.end(), [](const StepRecord& step) {
    return step.saturated.value_or(0.0) > 0.0;
  });
  if (num_steps == 0) {
    findings.push_back({Severity::kGood, "No value was beyond the scale that FP8 rounded it by."});
    return;
  }
  std::vector<LayerRoundings> layers = history.most_rounded();
  std::ranges::sort(layers, std::ranges::greater(), &LayerRoundings::saturated);
  std::vector<std::string> names;
  for (const LayerRoundings& layer : layers)
    if (layer.saturated() > 0.0) names.push_back(name_most(layer));
  constexpr double kMuch = 0.01;
  findings.push_back(
      {!layers.empty() && layers.front().saturated() > kMuch ? Severity::kWarning : Severity::kInfo,
       fmt::format("Values were beyond the scales that FP8 rounded them by in {} of {} steps; at "
                   "most {}.",
                   num_steps, steps.size(), named(names))});
}

void clip_finding(const RunHistory& history, std::vector<Finding>& findings) {
  const auto clipped = std::count_if(history.steps().begin(), history.steps().end(),
                                     [](const StepRecord& step) { return step.clip_factor < 1.0; });
  if (clipped == 0) return;
  findings.push_back(
      {Severity::kInfo,
       fmt::format(
           "Gradients were clipped in {} of {} steps ({:.0f}%).", clipped, history.steps().size(),
           100.0 * static_cast<double>(clipped) / static_cast<double>(history.steps().size()))});
}

double memory_deviation(const RunHistory& history) {
  const auto predicted = static_cast<double>(history.steps().back().memory_predicted);
  return predicted > 0.0 ? static_cast<double>(history.peak_memory()) / predicted - 1.0 : 0.0;
}

std::string memory_remark(const RunHistory& history) {
  const int64_t predicted = history.steps().back().memory_predicted;
  if (predicted <= 0) return "";
  return fmt::format("predicted {} ({:+.1f}%)", format_bytes(predicted),
                     100.0 * memory_deviation(history));
}

void memory_finding(const RunHistory& history, std::vector<Finding>& findings) {
  if (memory_deviation(history) <= kMemoryTolerance) return;
  findings.push_back({Severity::kWarning,
                      fmt::format("Memory rose to {}, above what was {}.",
                                  format_bytes(history.peak_memory()), memory_remark(history))});
}

/// The median of a measure over the last half of the run, which leaves warming up and outliers out.
template <typename Measure>
double typical(const RunHistory& history, const Measure& measure) {
  std::vector<double> values;
  for (size_t i = history.steps().size() / 2; i < history.steps().size(); ++i) {
    const double value = measure(history.steps()[i]);
    if (std::isfinite(value)) values.push_back(value);
  }
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<long>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string speed_remark(const RunHistory& history) {
  const double tflops = typical(history, [](const StepRecord& step) { return step.tflops(); });
  const double peak =
      typical(history, [](const StepRecord& step) { return step.utilisation.value_or(0.0); });
  if (tflops <= 0.0) return "tokens per second";
  const std::string speed = fmt::format("{:.3g} TFLOPS", tflops);
  return peak > 0.0 ? fmt::format("{}, {:.0f}% of matrix peak", speed, 100.0 * peak) : speed;
}

/// Of the newest trace.
void wait_finding(const RunHistory& history, std::vector<Finding>& findings) {
  constexpr double kMuch = 0.1;
  const auto traced = std::find_if(history.steps().rbegin(), history.steps().rend(),
                                   [](const StepRecord& step) { return step.waits.has_value(); });
  if (traced == history.steps().rend()) return;
  const TracedWaits& waits = *traced->waits;
  const double all = traced->step_seconds * static_cast<double>(waits.num_steps * waits.num_ranks);
  const auto share = [&](double seconds) { return all > 0.0 ? 100.0 * seconds / all : 0.0; };
  std::string text = fmt::format("In {} up to step {}, {:.0f}% of the time of {} ranks was waiting",
                                 plural(static_cast<double>(waits.num_steps), "traced step"),
                                 traced->step, share(waits.seconds), waits.num_ranks);
  Severity severity = Severity::kInfo;
  if (!waits.for_ranks.empty()) {
    const TracedWaits::ForRank& most = waits.for_ranks.front();
    if (all > 0.0 && most.seconds > kMuch * all) severity = Severity::kWarning;
    text += fmt::format(": most of it that a late rank caused was for rank {} ({:.0f}%)", most.rank,
                        share(most.seconds));
    if (!waits.why.empty()) text += ": " + waits.why;
  }
  findings.push_back({severity, text + "."});
}

}  // namespace

std::vector<Finding> find_findings(const RunHistory& history) {
  std::vector<Finding> findings;
  if (history.steps().empty()) return {{Severity::kInfo, "No step has been recorded yet."}};
  nonfinite_findings(history, findings);
  zero_gradient_finding(history, findings);
  loss_findings(history, findings);
  expert_findings(history, findings);
  drop_findings(history, findings);
  saturation_finding(history, findings);
  clip_finding(history, findings);
  memory_finding(history, findings);
  wait_finding(history, findings);
  std::stable_sort(findings.begin(), findings.end(),
                   [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
  return findings;
}

std::vector<SummaryItem> summarise(const RunHistory& history) {
  if (history.steps().empty()) return {};
  const StepRecord& last = history.steps().back();
  std::vector<SummaryItem> items = {
      {"Steps", fmt::format("{}", last.step),
       last.total_steps > 0 ? fmt::format("of {}", last.total_steps) : ""},
      {"Training loss", fmt::format("{:.4f}", recent_loss(history)), "mean of the last steps"}};
  if (const auto best = history.best_validation()) {
    items.push_back({"Best validation", fmt::format("{:.4f}", best->loss),
                     fmt::format("step {}, perplexity {:.4g}", best->step, std::exp(best->loss))});
  }
  items.push_back(
      {"Tokens", format_count(static_cast<double>(last.tokens_seen)), "seen in training"});
  items.push_back({"Time in steps", format_duration(history.elapsed_seconds().back()),
                   last.step < last.total_steps
                       ? fmt::format("{} to go", format_duration(last.eta_seconds))
                       : "without validation and saving"});
  items.push_back({"Tokens per second",
                   format_count(typical(
                       history, [](const StepRecord& step) { return step.tokens_per_second; })),
                   speed_remark(history)});
  items.push_back({"Peak memory", format_bytes(history.peak_memory()), memory_remark(history)});
  return items;
}

}  // namespace tessera

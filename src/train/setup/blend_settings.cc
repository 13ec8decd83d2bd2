#include "train/setup/blend_settings.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "core/error.h"
#include "data/token_file.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

std::string_view trim(std::string_view text) {
  const size_t begin = std::min(text.find_first_not_of(' '), text.size());
  return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

/// A number at the begin of `text`, which loses it.
template <typename T>
bool take_number(std::string_view& text, T& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  text.remove_prefix(end - text.data());
  return error == std::errc();
}

/// Fills a plan entry by entry.
class PlanBuilder {
 public:
  /// `entry` as the user wrote it, for messages; `text` the "WEIGHT PREFIX" in it.
  void add(int64_t first_step, std::string_view text, const std::string& entry) {
    double weight = 0;
    std::string_view rest = trim(text);
    const bool is_number = take_number(rest, weight) && rest.starts_with(' ');
    const std::string prefix = token_prefix(std::string(trim(rest)));
    require(is_number && !prefix.empty(),
            "data.blend: '{}' is not a weight and a path; expected for example \"0.7 data/a\"",
            entry);
    require(std::isfinite(weight) && weight >= 0,
            "data.blend: '{}': the weight is {}; expected at least 0", entry, weight);
    if (plan_.changes.empty() || plan_.changes.back().first_step != first_step) {
      plan_.changes.push_back({first_step, {}});
      named_.clear();
    }
    const size_t dataset = find(prefix);
    require(std::ranges::find(named_, dataset) == named_.end(),
            "data.blend: '{}': the dataset is in this blend already", entry);
    named_.push_back(dataset);
    auto& weights = plan_.changes.back().weights;
    weights.resize(plan_.prefixes.size(), 0.0);
    weights[dataset] = weight;
  }

  BlendPlan finish() {
    for (BlendPlan::Change& change : plan_.changes) {
      change.weights.resize(plan_.prefixes.size(), 0.0);
      require(std::ranges::any_of(change.weights, [](double weight) { return weight > 0; }),
              "data.blend: all weights from step {} on are 0", change.first_step);
    }
    return std::move(plan_);
  }

 private:
  size_t find(const std::string& prefix) {
    const auto at = std::ranges::find(plan_.prefixes, prefix);
    const size_t index = at - plan_.prefixes.begin();
    if (at == plan_.prefixes.end()) plan_.prefixes.push_back(prefix);
    return index;
  }

  BlendPlan plan_;
  std::vector<size_t> named_;  // datasets of the change being read
};

}  // namespace

Blend BlendPlan::make_blend(int64_t samples_per_step) const {
  std::vector<BlendPhase> phases;
  for (const Change& change : changes) {
    phases.push_back({change.first_step * samples_per_step, change.weights});
  }
  return Blend(phases);
}

BlendPlan parse_blend(const std::vector<std::string>& blend,
                      const std::vector<std::string>& changes) {
  require(!blend.empty(), "data.blend_changes is set, but data.blend, which it changes, is not");
  PlanBuilder builder;
  for (const std::string& entry : blend) builder.add(0, entry, entry);
  int64_t last_step = 0;
  for (const std::string& entry : changes) {
    int64_t step = 0;
    std::string_view rest = trim(entry);
    const bool is_change = take_number(rest, step) && trim(rest).starts_with(':');
    require(is_change,
            "data.blend_changes: '{}' has no first step; expected for example \"2000: 0.5 data/a\"",
            entry);
    require(step <= kMaxSteps, "data.blend_changes: '{}': steps end at {}", entry, kMaxSteps);
    require(step >= 1 && step >= last_step,
            "data.blend_changes: '{}': steps begin at 1 and ascend; the one before is {}", entry,
            last_step);
    last_step = step;
    builder.add(step, trim(rest).substr(1), entry);
  }
  return builder.finish();
}

}  // namespace tessera

#include "train/verify/run_comparison.h"

#include <cmath>
#include <limits>

namespace tessera {
namespace {

/// Nothing is measured by less: zeros differ from zeros by nothing.
constexpr double kLeast = 1e-30;

std::vector<int64_t> unravel(int64_t element, const Shape& shape) {
  std::vector<int64_t> index(shape.rank());
  for (int dim = shape.rank() - 1; dim >= 0; --dim) {
    index[dim] = element % shape[dim];
    element /= shape[dim];
  }
  return index;
}

/// A difference that is no number counts as infinite.
double distance(double a, double b) {
  const double difference = std::abs(a - b);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

double largest(const WholeTensor& tensor) {
  double most = 0;
  for (const float x : tensor.values) most = std::max(most, std::abs(static_cast<double>(x)));
  return most;
}

double largest(const WholeTensors& tensors) {
  double most = 0;
  for (const auto& [name, tensor] : tensors) most = std::max(most, largest(tensor));
  return most;
}

/// What the steps changed.
WholeTensors updates(const RunRecord& run) {
  WholeTensors result = run.weights;
  for (auto& [name, tensor] : result) {
    const std::vector<float>& start = run.start.at(name).values;
    for (size_t i = 0; i < start.size(); ++i) tensor.values[i] -= start[i];
  }
  return result;
}

/// Differences over `magnitude`, those of up to `rounding` times an element left out.
Difference compare(const WholeTensor& layout, const WholeTensor& reference, double magnitude,
                   double rounding = 0) {
  if (layout.values.size() != reference.values.size())
    return {.error = std::numeric_limits<double>::infinity(), .index = {}};
  Difference worst;
  for (size_t i = 0; i < reference.values.size(); ++i) {
    const double expected = reference.values[i];
    const double beyond = distance(layout.values[i], expected) - rounding * std::abs(expected);
    const double error = beyond / std::max(magnitude, kLeast);
    if (error <= worst.error) continue;
    worst = {.error = error,
             .layout = layout.values[i],
             .reference = expected,
             .index = unravel(static_cast<int64_t>(i), reference.shape)};
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

const WholeTensor& find(const WholeTensors& tensors, const std::string& name) {
  static const WholeTensor kNone;
  const auto found = tensors.find(name);
  return found == tensors.end() ? kNone : found->second;
}

void compare_step(const StepOutcome& layout, const StepOutcome& reference, int64_t number,
                  Verification& result) {
  const auto add = [&](const char* name, double value, double expected) {
    result.scalars.push_back({name, number, compare(value, expected)});
  };
  add("loss", layout.loss, reference.loss);
  add("balance loss", layout.balance_loss, reference.balance_loss);
  add("z loss", layout.z_loss, reference.z_loss);
  add("dropped", static_cast<double>(layout.dropped), static_cast<double>(reference.dropped));
  if (reference.max_logit != 0) {
    add("largest logit", layout.max_logit, reference.max_logit);
    add("clipped heads", static_cast<double>(layout.clipped_heads),
        static_cast<double>(reference.clipped_heads));
  }
  if (reference.mtp_labels > 0) add("prediction loss", layout.mtp_loss, reference.mtp_loss);
  result.scalars.push_back(
      {.name = "gradient norm",
       .step = number,
       .difference = compare(layout.update.grad_norm, reference.update.grad_norm),
       .of_gradients = true});
}

/// Each assignment that moved is one more for an expert and one less for another.
int64_t count_moved(const std::vector<std::vector<int64_t>>& layout,
                    const std::vector<std::vector<int64_t>>& reference) {
  int64_t apart = 0;
  for (size_t layer = 0; layer < reference.size(); ++layer) {
    for (size_t e = 0; e < reference[layer].size(); ++e)
      apart += std::abs(layout[layer][e] - reference[layer][e]);
  }
  return (apart + 1) / 2;
}

void compare_parameters(const RunRecord& layout, const RunRecord& reference,
                        const std::vector<std::string>& names, Verification& result) {
  const WholeTensors changes = updates(reference);
  const double gradient_floor = result.tolerances.floor * largest(reference.gradients);
  const double update_floor = result.tolerances.floor * largest(changes);
  // Each run rounds each weight to F32 once a step.
  const double rounding = static_cast<double>(reference.outcomes.size()) * 0x1.0p-23;
  for (const std::string& name : names) {
    const WholeTensor& gradient = find(reference.gradients, name);
    const double gradient_scale = std::max(largest(gradient), gradient_floor);
    double update_scale = std::max(largest(find(changes, name)), update_floor);
    if (result.tolerances.gradients_made_unit && largest(gradient) > 0)
      update_scale *= gradient_scale / largest(gradient);
    result.parameters.push_back(
        {.name = name,
         .gradient = compare(find(layout.gradients, name), gradient, gradient_scale),
         .weight = compare(find(layout.weights, name), find(reference.weights, name), update_scale,
                           rounding)});
  }
  for (const auto& [name, bias] : reference.biases) {
    result.parameters.push_back(
        {.name = name,
         .gradient = {},
         .weight = compare(find(layout.biases, name), bias, largest(bias))});
  }
}

std::string format_index(const std::vector<int64_t>& index) {
  return fmt::format("[{}]", fmt::join(index, ", "));
}

std::string describe_disagreement(const ParameterDifference& parameter, double tolerance) {
  const bool gradient = parameter.gradient.error > tolerance;
  const Difference& difference = gradient ? parameter.gradient : parameter.weight;
  return fmt::format(
      "first to differ: the {} of {} at {}: {:.9g} in the layout, {:.9g} in the reference\n",
      gradient ? "gradient" : "weight", parameter.name, format_index(difference.index),
      difference.layout, difference.reference);
}

std::string describe_parameters(const Verification& verification, bool all) {
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
  return text;
}

/// Of every scalar the step where its error is largest.
std::string describe_scalars(const Verification& verification) {
  std::map<std::string, Difference> worst;
  for (const ScalarDifference& scalar : verification.scalars) {
    Difference& entry = worst[scalar.name];
    if (scalar.difference.error >= entry.error) entry = scalar.difference;
  }
  std::string text;
  for (const auto& [name, difference] : worst)
    text += fmt::format("{:<48} {:>12.1e}   ({:.9g}, reference {:.9g})\n", name, difference.error,
                        difference.layout, difference.reference);
  return text;
}

/// Why it does not agree; empty where it does.
std::string describe_faults(const Verification& verification) {
  std::string text;
  if (verification.moved_assignments > 0)
    text += fmt::format(
        "{} assignments went to other experts: two scores that nearly tie, decided by rounding, or "
        "the routing differs; if other values of run.seed agree, it was a tie\n",
        verification.moved_assignments);
  if (!verification.diverged.empty())
    text +=
        fmt::format("ranks have different copies of {}\n", fmt::join(verification.diverged, ", "));
  const auto scalar = std::ranges::find_if(verification.scalars, [&](const ScalarDifference& s) {
    return s.difference.error > verification.allowed(s);
  });
  if (scalar != verification.scalars.end())
    text += fmt::format("step {}: {} {:.9g} in the layout, {:.9g} in the reference\n", scalar->step,
                        scalar->name, scalar->difference.layout, scalar->difference.reference);
  if (const ParameterDifference* first = verification.first_disagreement())
    text += describe_disagreement(*first, verification.tolerances.gradients);
  return text;
}

std::string summarize(const Verification& verification) {
  const Tolerances& allowed = verification.tolerances;
  const std::string reference =
      verification.reference_ranks == 1
          ? "one rank"
          : fmt::format("reference of {} ranks", verification.reference_ranks);
  return fmt::format(
      "{}: worst error of gradients {:.1e} (allowed {:.0e}), weights {:.1e} ({:.0e}), losses and "
      "counts {:.1e} ({:.0e}); {:.1f} s, {} {:.1f} s\n",
      verification.agrees() ? "agrees" : "DIFFERS", verification.worst_gradient(),
      allowed.gradients, verification.worst_weight(), allowed.weights, verification.worst_scalar(),
      allowed.scalars, verification.seconds_layout, reference, verification.seconds_reference);
}

double worst_of(const std::vector<ScalarDifference>& scalars, bool of_gradients) {
  double error = 0;
  for (const ScalarDifference& scalar : scalars) {
    if (scalar.of_gradients == of_gradients) error = std::max(error, scalar.difference.error);
  }
  return error;
}

}  // namespace

bool Verification::agrees() const {
  return moved_assignments == 0 && diverged.empty() && first_disagreement() == nullptr &&
         std::ranges::all_of(scalars, [&](const ScalarDifference& scalar) {
           return scalar.difference.error <= allowed(scalar);
         });
}

double Verification::worst_gradient() const {
  double error = worst_of(scalars, true);
  for (const ParameterDifference& p : parameters) error = std::max(error, p.gradient.error);
  return error;
}

double Verification::worst_weight() const {
  double error = 0;
  for (const ParameterDifference& p : parameters) error = std::max(error, p.weight.error);
  return error;
}

double Verification::worst_scalar() const {
  return worst_of(scalars, false);
}

const ParameterDifference* Verification::first_disagreement() const {
  const auto found = std::ranges::find_if(
      parameters, [&](const ParameterDifference& p) { return !p.is_within(tolerances); });
  return found == parameters.end() ? nullptr : &*found;
}

Verification compare_runs(const RunRecord& layout, const RunRecord& reference,
                          const std::vector<std::string>& parameter_names,
                          const Tolerances& tolerances) {
  Verification result;
  result.tolerances = tolerances;
  result.diverged = layout.diverged;
  result.seconds_layout = layout.seconds;
  result.seconds_reference = reference.seconds;
  for (size_t step = 0; step < reference.outcomes.size(); ++step) {
    compare_step(layout.outcomes[step], reference.outcomes[step], static_cast<int64_t>(step) + 1,
                 result);
    result.moved_assignments += count_moved(layout.loads[step], reference.loads[step]);
  }
  compare_parameters(layout, reference, parameter_names, result);
  return result;
}

std::string describe(const Verification& verification, bool all) {
  std::string text = describe_parameters(verification, all) + describe_scalars(verification);
  for (const std::string& note : verification.notes) text += "note: " + note + "\n";
  text += describe_faults(verification);
  return text + summarize(verification);
}

}  // namespace tessera

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "core/file/file.h"
#include "core/file/output_path.h"
#include "core/process/progress.h"
#include "ops/registry/operator_names.h"
#include "train/memory/choose_policy.h"
#include "train/metrics/step_page.h"
#include "train/plan/chakra_trace.h"
#include "train/plan/choose_schedule.h"
#include "train/plan/plan_trace.h"
#include "train/plan/read_routing.h"
#include "train/plan/search.h"
#include "train/plan/what_if.h"
#include "train/setup/step_schedule.h"
#include "train/setup/training_data.h"
#include "train/state/load_settings.h"

namespace tessera {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// A configuration whose searched keys may be open.
struct PlanRequest {
  SearchSpace space;
  Hardware hardware;
  bool chooses_schedule = false;  ///< train.schedule = "auto"
};

std::set<std::string> find_fixed(const ConfigSchema& schema) {
  std::set<std::string> fixed;
  for (const std::string& key : searched_keys()) {
    if (schema.is_set(key)) fixed.insert(key);
  }
  return fixed;
}

PlanRequest make_request(const PlanArguments& arguments) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, arguments.config.file, arguments.config.overrides);
  settings.model.vocab_size = resolve_vocab_size(settings.model.vocab_size,
                                                 *make_tokenizer(settings.data.tokenizer_spec()));
  validate(settings.model);
  require(!settings.parallel.dynamic_cp,
          "parallel.dynamic_cp: a plan is of micro-batches that are all alike; `tessera inspect "
          "--contexts` times the steps of given documents. Leave parallel.dynamic_cp out");
  Hardware hardware = load_hardware(arguments.hardware);
  const DeviceChoice device = hardware.on_host ? DeviceChoice::kCpu : DeviceChoice::kCuda;
  require(settings.run.device == DeviceChoice::kAuto || settings.run.device == device,
          "run.device is \"{}\", but {} has {}; leave run.device out",
          settings.run.device == DeviceChoice::kCpu ? "cpu" : "cuda", hardware.name,
          hardware.on_host ? "processors alone" : "GPUs");
  settings.run.device = device;
  std::set<std::string> fixed = find_fixed(schema);
  const bool chooses = step_schedule(settings.train) == StepSchedule::kAuto;
  if (chooses) {
    fixed.erase("train.schedule");
    settings.train.schedule = kAsBuilt;
  }
  return {{.base = settings,
           .num_ranks = arguments.gpus,
           .node_devices = hardware.node_devices,
           .fixed = std::move(fixed)},
          std::move(hardware),
          chooses};
}

/// "5=1.3" of an option.
std::pair<int64_t, double> parse_slow(const std::string& text, std::string_view option,
                                      int64_t num_ranks) {
  int64_t rank = 0;
  double factor = 1;
  ConfigSchema schema;
  schema.add("rank", &rank, "", between(0, num_ranks - 1));
  schema.add("factor", &factor, "", between(1, 1e6));
  const size_t sign = text.find('=');
  require(sign != std::string::npos,
          "{}: found \"{}\", expected a rank and how many times longer it takes, such as 5=1.3",
          option, text);
  schema.override_value("rank", text.substr(0, sign), fmt::format("{} {}", option, text));
  schema.override_value("factor", text.substr(sign + 1), fmt::format("{} {}", option, text));
  return {rank, factor};
}

/// "attention=0.35" of --operator-share.
std::pair<std::string, double> parse_share(const std::string& text) {
  const size_t sign = text.find('=');
  require(sign != std::string::npos && sign > 0,
          "--operator-share: found \"{}\", expected an operator and the share of the rates that it "
          "reaches, such as attention=0.35",
          text);
  const std::string name = text.substr(0, sign);
  const std::string judged = judge_operator_name(name);
  require(judged.empty(),
          "--operator-share: found \"{}\"{}; tessera inspect --program shows a model's", name,
          judged);
  double share = 1;
  constexpr double kMost = 4;  // above 1: what multiplies in a smaller format than here
  ConfigSchema schema;
  schema.add("share", &share, "", between(0, kMost));
  schema.override_value("share", text.substr(sign + 1), fmt::format("--operator-share {}", text));
  return {name, share};
}

/// What --graphs says; without it what the configuration has the device record.
LaunchGraphs find_graphs(const PlanArguments& arguments, GraphMode run) {
  if (arguments.graphs.empty())
    return run == GraphMode::kOff ? LaunchGraphs::kNone : LaunchGraphs::kAll;
  const std::map<std::string, LaunchGraphs> known = {{"all", LaunchGraphs::kAll},
                                                     {"static", LaunchGraphs::kStatic},
                                                     {"none", LaunchGraphs::kNone}};
  const auto found = known.find(arguments.graphs);
  require(found != known.end(), "--graphs: found \"{}\", expected all, static or none",
          arguments.graphs);
  return found->second;
}

SimulationOptions make_options(const PlanArguments& arguments, const ModelConfig& model,
                               GraphMode run) {
  SimulationOptions options{.skew = arguments.skew};
  if (!arguments.routing.empty()) options.routing = read_routing(arguments.routing, model);
  for (const std::string& text : arguments.slow_ranks) {
    const auto [rank, factor] = parse_slow(text, "--slow-rank", arguments.gpus);
    options.slow_ranks[rank].computing = factor;
  }
  for (const std::string& text : arguments.slow_links) {
    const auto [rank, factor] = parse_slow(text, "--slow-link", arguments.gpus);
    options.slow_ranks[rank].links = factor;
  }
  const auto groups = exposable_groups();
  for (const auto& [option, names] : {std::pair("--exposed", &arguments.exposed),
                                      std::pair("--pipelined", &arguments.pipelined)}) {
    for (const std::string& name : *names) {
      require(std::ranges::find(groups, name) != groups.end(),
              "{}: found \"{}\", which is no group of ranks that exchange beside computation; "
              "take some of {}",
              option, name, fmt::join(groups, ", "));
    }
  }
  options.exposed = arguments.exposed;
  options.software = {.graphs = find_graphs(arguments, run),
                      .stores_scores = arguments.stored_scores,
                      .pipelined = arguments.pipelined};
  options.software.expert_microseconds = arguments.launch_expert_us;
  if (arguments.launch_us > 0) options.software.launch_microseconds = arguments.launch_us;
  for (const std::string& text : arguments.operator_shares)
    options.software.operator_shares.insert(parse_share(text));
  return options;
}

double mfu(const SimulatedStep& step, const Hardware& hardware) {
  return step.flops_per_second() / (1e12 * hardware.bf16_tflops);
}

std::string percent(double part, double whole) {
  return fmt::format("{:.1f} %", 100 * part / whole);
}

/// ", of which ep 3.1 %, dp 0.4 %": those that take at least such a share of the step.
std::string describe_parts(const std::map<std::string, double>& by_name, double least,
                           const StepShares& shares) {
  std::vector<std::pair<double, std::string>> parts;
  for (const auto& [name, seconds] : by_name) parts.emplace_back(seconds, name);
  std::ranges::sort(parts, std::greater<>());
  std::string text;
  for (const auto& [seconds, name] : parts) {
    if (seconds < least * shares.total()) continue;
    text += fmt::format("{}{} {}", text.empty() ? ", of which " : ", ", name,
                        percent(seconds, shares.total()));
  }
  return text;
}

/// What of the slowest stage's step is not computation, the most first.
std::string describe_limit(const SimulatedStep& step, const Hardware& hardware) {
  const StepShares& shares = step.slowest().shares;
  const double whole = shares.total();
  std::string text = fmt::format(
      "of the slowest stage's step {} is computation{}, {} exposed communication{}, {} waiting for "
      "other ranks",
      percent(shares.computed, whole), describe_parts(shares.computed_by, 0.05, shares),
      percent(shares.exposed, whole), describe_parts(shares.exposed_by, 1e-3, shares),
      percent(shares.idle, whole));
  if (shares.host > 0)
    text += fmt::format(", {} waiting for the host", percent(shares.host, whole));
  if (shares.copies > 0)
    text += fmt::format(", {} waiting for copies", percent(shares.copies, whole));
  const double hidden = shares.exchanged - shares.exposed;
  if (shares.exchanged > 0)
    text += fmt::format("; {} of the time of exchanges is hidden",
                        percent(std::max(hidden, 0.0), shares.exchanged));
  const int64_t free = hardware.memory_bytes() - step.fullest().memory.total();
  return text + fmt::format("; {} of memory are free", format_bytes(std::max<int64_t>(free, 0)));
}

/// What a slower layout has more of than the best, the largest part.
std::string describe_lack(const SimulatedStep& step, const SimulatedStep& best) {
  const StepShares& own = step.slowest().shares;
  const StepShares& other = best.slowest().shares;
  const std::vector<std::pair<double, std::string>> parts = {
      {own.computed - other.computed, "computation"},
      {own.exposed - other.exposed, "exposed communication"},
      {own.idle - other.idle, "waiting for other ranks"},
      {own.copies - other.copies, "waiting for copies"},
      {own.host - other.host, "waiting for the host"}};
  const auto& most = *std::ranges::max_element(parts);
  return fmt::format("{} more a step, {} of it {}",
                     percent(step.seconds - best.seconds, best.seconds),
                     format_estimate(std::max(most.first, 0.0)), most.second);
}

std::string describe_policy(const Settings& settings) {
  std::string text;
  if (!settings.train.recompute.empty())
    text += fmt::format("recompute {}", fmt::join(settings.train.recompute, ", "));
  if (!settings.train.offload.empty())
    text += fmt::format("{}offload {}", text.empty() ? "" : "; ",
                        fmt::join(settings.train.offload, ", "));
  return text;
}

void print_head(std::ostream& out) {
  out << fmt::format("{:>3}  {:<52} {:>10} {:>10} {:>9} {:>7} {:>12} {:>7} {:>6}\n", "", "layout",
                     "memory", "step", "exposed", "idle", "tokens/s", "TFLOPS", "MFU");
}

void print_row(std::ostream& out, size_t number, const PlannedLayout& layout,
               const Hardware& hardware) {
  const SimulatedStep& step = layout.step;
  const StepShares& shares = step.slowest().shares;
  out << fmt::format("{:>3}  {:<52} {:>10} {:>10} {:>9} {:>7} {:>12.0f} {:>7.1f} {:>5.1f}%\n",
                     number, describe_candidate(layout.settings),
                     format_bytes(step.fullest().memory.total()), format_estimate(step.seconds),
                     percent(shares.exposed, shares.total()), percent(shares.idle, shares.total()),
                     step.tokens_per_second(), step.flops_per_second() / 1e12,
                     100 * mfu(step, hardware));
}

void print_memory(std::ostream& out, const MemoryPrediction& memory) {
  const ActivationBytes& activations = memory.activations;
  const std::vector<std::pair<const char*, int64_t>> parts = {
      {"weights", memory.state.weights},     {"gradients", memory.state.gradients},
      {"optimizer", memory.state.optimizer}, {"saved activations", activations.saved},
      {"hidden states", activations.hidden}, {"working memory", activations.transient},
      {"inputs", activations.inputs},        {"weights in FP8", activations.copies},
      {"stashed rows", activations.stash},   {"beside them", memory.overhead.total()}};
  std::string text;
  for (const auto& [name, bytes] : parts) {
    if (bytes > 0)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", format_bytes(bytes), name);
  }
  out << "memory of the fullest rank: " << text << "\n";
  if (memory.beside() > 0)
    out << fmt::format("memory of the host for each rank: {}\n", format_bytes(memory.beside()));
}

void print_best(std::ostream& out, const PlannedLayout& best, const PlanRequest& request) {
  out << "\n"
      << describe_candidate(best.settings) << ": " << describe_limit(best.step, request.hardware)
      << "\n";
  print_memory(out, best.step.fullest().memory);
  if (const std::string policy = describe_policy(best.settings); !policy.empty())
    out << "chosen for the memory: " << policy << "\n";
  out << fmt::format("as options: {}\n", fmt::join(list_overrides(best.settings), " "));
}

OrderedJson to_json(const PlannedLayout& layout, const Hardware& hardware) {
  const SimulatedStep& step = layout.step;
  OrderedJson stages = OrderedJson::array();
  for (const SimulatedStage& stage : step.stages) {
    stages.push_back({{"rank", stage.rank},
                      {"memory_bytes", stage.memory.total()},
                      {"host_bytes", stage.memory.beside()},
                      {"computed_seconds", stage.shares.computed},
                      {"computed_by", stage.shares.computed_by},
                      {"exposed_seconds", stage.shares.exposed},
                      {"exposed_by", stage.shares.exposed_by},
                      {"idle_seconds", stage.shares.idle},
                      {"copy_seconds", stage.shares.copies},
                      {"host_seconds", stage.shares.host},
                      {"exchange_seconds", stage.shares.exchanged}});
  }
  return {{"layout", describe_candidate(layout.settings)},
          {"overrides", list_overrides(layout.settings)},
          {"fits", layout.fits},
          {"memory_bytes", step.fullest().memory.total()},
          {"step_seconds", step.seconds},
          {"tokens_per_second", step.tokens_per_second()},
          {"tflops", step.flops_per_second() / 1e12},
          {"mfu", mfu(step, hardware)},
          {"stages", stages}};
}

OrderedJson to_json(const PlanResult& result, const PlanRequest& request, size_t most,
                    double even_seconds) {
  OrderedJson layouts = OrderedJson::array();
  for (size_t i = 0; i < std::min(most, result.layouts.size()); ++i)
    layouts.push_back(to_json(result.layouts[i], request.hardware));
  return {{"hardware", request.hardware.name},
          {"gpus", request.space.num_ranks},
          {"judged", result.num_judged},
          {"refused", result.num_refused},
          {"flops_of_sequence", result.model_flops},
          {"even_step_seconds", even_seconds},
          {"layouts", layouts}};
}

void write_toml(std::ostream& out, const PlanArguments& arguments, const PlannedLayout& best) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  std::vector<std::string> overrides = arguments.config.overrides;
  for (const std::string& one : list_overrides(best.settings)) overrides.push_back(one);
  load_settings(schema, settings, arguments.config.file, overrides);
  replace_file(arguments.write, schema.to_toml());
  out << arguments.write << "\n";
}

constexpr int64_t kMicroBatches = 4;
/// Each rank's plan is built for the traces.
constexpr int64_t kMostTraces = 256;

/// Every rank's trace of a few micro-batches.
void write_chakra(std::ostream& out, const PlanArguments& arguments, const PlanRequest& request,
                  const StepWork& work, const PlannedLayout& best) {
  const ChakraTraces traces = make_chakra_traces(
      simulate_all_plans(best.settings, request.space.num_ranks, work, kMicroBatches));
  for (size_t rank = 0; rank < traces.ranks.size(); ++rank)
    replace_file(fmt::format("{}.{}.et", arguments.chakra, rank), traces.ranks[rank]);
  replace_file(arguments.chakra + ".groups.json", traces.groups + "\n");
  out << fmt::format("{}.*.et\n", arguments.chakra);
}

/// Drawings of a few micro-batches.
void write_drawings(std::ostream& out, const PlanArguments& arguments, const PlanRequest& request,
                    const StepWork& work, const PlannedLayout& best) {
  if (!arguments.chakra.empty()) write_chakra(out, arguments, request, work, best);
  if (arguments.html.empty() && arguments.trace.empty()) return;
  const SimulatedPlans plans =
      simulate_plans(best.settings, request.space.num_ranks, work, kMicroBatches);
  if (!arguments.html.empty()) {
    std::vector<PlanTimes> times;
    for (const RankClock& clock : plans.clocks) times.push_back(clock.times);
    const std::string page =
        make_step_page(plans.plans, times,
                       {.title = fmt::format("A training step on {} x {}", request.space.num_ranks,
                                             request.hardware.name),
                        .status = fmt::format("{}: {}", describe_candidate(best.settings),
                                              describe_limit(best.step, request.hardware)),
                        .speeds = simulate_what_if(best.settings, request.space.num_ranks,
                                                   request.hardware, work.options())});
    replace_file(arguments.html, page);
    out << arguments.html << "\n";
  }
  if (!arguments.trace.empty()) {
    replace_file(arguments.trace, make_plan_trace(plans));
    out << arguments.trace << "\n";
  }
}

[[noreturn]] void refuse_memory(const PlannedLayout& least, const PlanRequest& request) {
  const int64_t need = least.step.fullest().memory.total();
  user_error(
      "no layout of {} ranks keeps to {} of {}: the least found takes {} on a rank ({}); more "
      "GPUs, "
      "fewer tokens (train.global_batch, data.sequence_length) or optim's smaller formats take "
      "less",
      request.space.num_ranks, format_bytes(memory_of(request.space.base, request.hardware)),
      request.hardware.name, format_bytes(need), describe_candidate(least.settings));
}

PlanResult find_layouts(const PlanArguments& arguments, const PlanRequest& request,
                        const StepWork& work) {
  if (!arguments.explain) {
    ProgressBar bar(std::cerr, detect_terminal(STDERR_FILENO), "planning");
    const auto show = [&](double share) { bar.update(share, ""); };
    return search_plan(request.space, work, show, arguments.pause);
  }
  PlanResult result{.model_flops = flops_of(request.space.base)};
  const bool may_choose = request.space.may_set("train.recompute") &&
                          request.space.may_set("train.offload") &&
                          !request.space.base.train.stashes();
  validate_without_data(request.space.base);
  Settings settings = request.space.base;
  if (request.chooses_schedule) {
    settings.train.schedule =
        choose_schedule(settings, request.space.num_ranks, request.hardware).schedule;
  }
  PlannedLayout layout = plan_layout(settings, request.space.num_ranks, work, result.model_flops,
                                     may_choose, arguments.pause);
  result.num_judged = 1;
  if (layout.fits || !arguments.must_fit) {
    result.layouts.push_back(std::move(layout));
  } else {
    result.least = std::move(layout);
  }
  return result;
}

/// Seconds of the same step where no rank is slower than another.
double simulate_even(const PlannedLayout& layout, const PlanRequest& request, const StepWork& work,
                     double flops) {
  if (work.options().slow_ranks.empty()) return layout.step.seconds;
  SimulationOptions options = work.options();
  options.slow_ranks.clear();
  return simulate_step(layout.settings, request.space.num_ranks,
                       StepWork(request.hardware, options), flops)
      .seconds;
}

/// A search may take minutes: what cannot be written is refused before it.
void check_outputs(const PlanArguments& arguments) {
  const std::string chakra = arguments.chakra.empty() ? "" : arguments.chakra + ".groups.json";
  for (const auto& [option, path] :
       {std::pair("--write", arguments.write), std::pair("--html", arguments.html),
        std::pair("--trace", arguments.trace), std::pair("--chakra", chakra)}) {
    if (!path.empty()) check_output_path(option, path);
  }
}

}  // namespace

int run_plan(const PlanArguments& arguments, std::ostream& out) {
  require(arguments.chakra.empty() || arguments.gpus <= kMostTraces,
          "--chakra writes a file for each rank, at most {}, but --gpus is {}", kMostTraces,
          arguments.gpus);
  check_outputs(arguments);
  const PlanRequest request = make_request(arguments);
  const StepWork work(request.hardware, make_options(arguments, request.space.base.model,
                                                     request.space.base.run.cuda_graphs));
  const PlanResult result = find_layouts(arguments, request, work);
  if (result.layouts.empty()) refuse_memory(*result.least, request);
  const PlannedLayout& best = result.layouts.front();
  const double even_seconds = simulate_even(best, request, work, result.model_flops);
  const auto most = static_cast<size_t>(arguments.top);
  if (arguments.json) {
    out << to_json(result, request, most, even_seconds).dump(2) << "\n";
  } else {
    print_head(out);
    for (size_t i = 0; i < std::min(most, result.layouts.size()); ++i)
      print_row(out, i + 1, result.layouts[i], request.hardware);
    print_best(out, best, request);
    if (!work.options().slow_ranks.empty()) {
      out << fmt::format("with no rank slower than another: {}, {:.3g} times less\n",
                         format_estimate(even_seconds), best.step.seconds / even_seconds);
    }
    for (size_t i = 1; i < std::min(most, result.layouts.size()); ++i)
      out << fmt::format("{:>3}  {}\n", i + 1, describe_lack(result.layouts[i].step, best.step));
    if (!arguments.explain)
      out << fmt::format("{} configurations judged, {} refused\n", result.num_judged,
                         result.num_refused);
  }
  if (!arguments.write.empty()) write_toml(out, arguments, best);
  write_drawings(out, arguments, request, work, best);
  return 0;
}

}  // namespace tessera

#include <fmt/ranges.h>

#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/commands.h"
#include "core/memory.h"
#include "core/process/progress.h"
#include "model/experts/moe_blocks.h"
#include "model/run/forward_model.h"
#include "program/compile/print.h"
#include "train/memory/choose_policy.h"
#include "train/memory/planned_rank.h"
#include "train/metrics/report.h"
#include "train/plan/choose_schedule.h"
#include "train/plan/simulated_step.h"
#include "train/setup/device_choice.h"
#include "train/setup/step_schedule.h"
#include "train/setup/training_data.h"
#include "train/state/load_settings.h"
#include "train/trainer/peer_copies.h"
#include "train/trainer/trainer.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

/// Settings with a vocabulary, but without opening any data.
Settings resolve(const ConfigArguments& arguments) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, arguments.file, arguments.overrides);
  settings.model.vocab_size = resolve_vocab_size(settings.model.vocab_size,
                                                 *make_tokenizer(settings.data.tokenizer_spec()));
  validate(settings.model);
  return settings;
}

int64_t resolve_ranks(const Settings& settings, int64_t ranks) {
  return ranks > 0 ? ranks : least_ranks(settings.parallel.layout);
}

void show_presets(bool json) {
  Json list = Json::array();
  for (const Preset& preset : presets()) {
    Settings settings;
    ConfigSchema schema = make_schema(settings);
    schema.load_preset(preset.name, preset.toml);
    if (settings.model.vocab_size == 0)
      settings.model.vocab_size = resolve_vocab_size(0, *make_byte_tokenizer());
    const ParameterCount count = count_parameters(settings.model);
    list.push_back({{"name", preset.name},
                    {"description", preset.description},
                    {"parameters", count.total},
                    {"active_parameters", count.active}});
    if (!json) {
      std::cout << fmt::format("{:<20} {:>8} parameters, {:>8} active  {}\n", preset.name,
                               format_count(static_cast<double>(count.total)),
                               format_count(static_cast<double>(count.active)), preset.description);
    }
  }
  if (json) std::cout << list.dump(2) << "\n";
}

std::string join_names(const std::vector<std::string>& names) {
  return names.empty() ? "nothing" : fmt::format("{}", fmt::join(names, ", "));
}

/// "layers 0, 1, 2 recompute nothing, offload expert_pre": those that share a program.
std::string describe_policy(const StagePrograms& programs, const LayerProgramKey& key) {
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < programs.config.all_layers(); ++i) {
    if (programs.key_of(i) == key) layers.push_back(i);
  }
  const std::string_view ending = layers.size() == 1 ? "s" : "";
  return fmt::format("layer{} {} recompute{} {}, offload{} {}", layers.size() == 1 ? "" : "s",
                     fmt::join(layers, ", "), ending, join_names(key.recomputed), ending,
                     join_names(key.offloaded));
}

void show_programs(const Settings& settings, int64_t num_ranks) {
  std::set<LayerProgramKey> shown;
  const bool differ = !settings.train.offload.empty() || !settings.train.recompute.empty();
  for (const int64_t rank : first_ranks(settings, num_ranks)) {
    const PlannedRank planned = plan_rank(settings, rank, num_ranks);
    for (const auto& [key, program] : planned.model.layer_programs()) {
      if (!shown.insert(key).second) continue;
      if (differ)
        std::cout << fmt::format("# {}\n", describe_policy(planned.model.programs(), key));
      for (const Executable* run : {&program->derived.forward, &program->derived.backward})
        std::cout << print_program(run->program(), run->plan()) << "\n";
    }
  }
}

std::vector<std::pair<std::string, int64_t>> list_memory(const Settings& settings,
                                                         const PlannedRank& planned) {
  const MemoryPrediction memory = predict_memory(settings, planned);
  const ModelState::Bytes& state = memory.state;
  const ActivationBytes& activations = memory.activations;
  std::vector<std::pair<std::string, int64_t>> rows = {{"weights", state.weights},
                                                       {"gradients", state.gradients},
                                                       {"optimizer", state.optimizer},
                                                       {"saved activations", activations.saved},
                                                       {"hidden states", activations.hidden},
                                                       {"working memory", activations.transient},
                                                       {"inputs", activations.inputs}};
  if (activations.copies > 0) rows.emplace_back("weights in FP8", activations.copies);
  if (settings.train.stashes()) rows.emplace_back("stashed rows", activations.stash);
  if (!settings.train.offload.empty()) rows.emplace_back("offloaded", activations.offloaded);
  if (settings.shard.state_on_host) rows.emplace_back("offloaded state", state.on_host);
  if (!memory.on_host) {
    rows.emplace_back("kernels", memory.overhead.kernels);
    rows.emplace_back("communication", memory.overhead.communication);
    rows.emplace_back("CUDA graphs", memory.overhead.graphs);
  }
  rows.emplace_back("copy to save", memory.snapshot);
  rows.emplace_back("total", memory.total());
  rows.emplace_back("worst routing", memory.total() + activations.worst);
  // Where a neighbour holds as much.
  if (settings.peer.copy)
    rows.emplace_back("peer copies", PeerCopies::count_bytes(state.held(), state.held()));
  return rows;
}

/// What the first rank of a stage takes, on which device, and how long its passes of a step are.
struct StageMemory {
  std::string device;
  std::vector<std::pair<std::string, int64_t>> rows;
  double pass_seconds = 0;
};

Json to_json(const StageMemory& stage) {
  Json json(std::map(stage.rows.begin(), stage.rows.end()));
  json["device"] = stage.device;
  json["pass_seconds"] = stage.pass_seconds;
  return json;
}

/// A column for the first rank of each stage; as JSON one object, or with several stages a list.
void show_memory(const Settings& settings, int64_t num_ranks,
                 const std::optional<PolicyChoice>& choice, bool json) {
  std::vector<StageMemory> stages;
  std::string head = fmt::format("{:<18}", "");
  std::string devices = fmt::format("{:<18}", "device");
  for (const int64_t rank : first_ranks(settings, num_ranks)) {
    const PlannedRank planned = plan_rank(settings, rank, num_ranks);
    stages.push_back({planned.model.device().name(), list_memory(settings, planned),
                      estimate_passes(settings, planned)});
    head += fmt::format(" {:>12}", fmt::format("rank {}", rank));
    devices += fmt::format(" {:>12}", stages.back().device);
  }
  if (json) {
    Json list = Json::array();
    for (const StageMemory& stage : stages) {
      list.push_back(to_json(stage));
      if (!choice) continue;
      list.back()["train.recompute"] = choice->recompute;
      list.back()["train.offload"] = choice->offload;
    }
    std::cout << (list.size() == 1 ? list[0] : list).dump(2) << "\n";
    return;
  }
  if (num_ranks > 1) std::cout << head << "\n";
  std::cout << devices << "\n";
  for (size_t row = 0; row < stages[0].rows.size(); ++row) {
    std::cout << fmt::format("{:<18}", stages[0].rows[row].first);
    for (const StageMemory& stage : stages)
      std::cout << fmt::format(" {:>12}", format_bytes(stage.rows[row].second));
    std::cout << "\n";
  }
  std::cout << fmt::format("{:<18}", "passes (estimate)");
  for (const StageMemory& stage : stages)
    std::cout << fmt::format(" {:>12}", format_estimate(stage.pass_seconds));
  std::cout << "\n";
  if (choice) std::cout << describe(*choice) << "\n";
}

/// What the settings' limit, or this machine's GPU, asks for, put into them.
std::optional<PolicyChoice> choose_within_limit(Settings& settings, int64_t num_ranks) {
  auto choice =
      plan_policy(settings, num_ranks, plan_backend(settings, num_ranks), batch_shape(settings));
  if (choice) apply(*choice, settings.train);
  return choice;
}

/// Of the training programs of all stages, each once.
std::vector<CompileReport> report_training(const Settings& settings, int64_t num_ranks) {
  std::vector<CompileReport> reports;
  std::set<std::string> shown;
  for (const int64_t rank : first_ranks(settings, num_ranks)) {
    for (CompileReport& report : plan_rank(settings, rank, num_ranks).model.compile_reports()) {
      if (shown.insert(print_passes(report)).second) reports.push_back(std::move(report));
    }
  }
  return reports;
}

/// Of the programs that score a micro-batch of text, and of those that generate a token.
std::vector<CompileReport> report_inference(const Settings& settings) {
  const Backend backend = plan_backend(settings, 1);
  const BatchShape scored = batch_shape(settings);
  auto reports = report_forward(settings.model, scored, ForwardGoal::kLoss, backend, std::nullopt);
  const int64_t context = settings.data.sequence_length;
  const BatchShape one{.num_tokens = 1, .sequence_length = context, .dtype = scored.dtype};
  for (CompileReport& report :
       report_forward(settings.model, one, ForwardGoal::kLogits, backend, CacheShape{context})) {
    report.program += ", one token";
    reports.push_back(std::move(report));
  }
  return reports;
}

Json to_json(const ProgramFigures& figures) {
  if (figures == ProgramFigures()) return nullptr;
  return {{"nodes", figures.num_nodes},
          {"saved_bytes", figures.saved_bytes},
          {"transient_bytes", figures.transient_bytes}};
}

Json to_json(const CompileReport& report) {
  Json passes = Json::array();
  for (const PassEffect& effect : report.effects) {
    passes.push_back({{"pass", effect.pass},
                      {"what", effect.what},
                      {"forward", to_json(effect.forward)},
                      {"backward", to_json(effect.backward)},
                      {"weights", to_json(effect.weights)}});
  }
  return {{"program", report.program}, {"goal", goal_name(report.goal)}, {"passes", passes}};
}

void show_passes(const Settings& settings, const InspectArguments& arguments, int64_t num_ranks) {
  const auto reports =
      arguments.goal == "infer" ? report_inference(settings) : report_training(settings, num_ranks);
  if (arguments.json) {
    Json list = Json::array();
    for (const CompileReport& report : reports) list.push_back(to_json(report));
    std::cout << list.dump(2) << "\n";
    return;
  }
  for (const CompileReport& report : reports) std::cout << print_passes(report) << "\n";
}

/// The run as rank 0 sees it. Throws what training would refuse in any stage.
RunLayout plan_run(const Settings& settings, int64_t ranks) {
  std::vector<RunLayout> stages;
  for (const int64_t rank : first_ranks(settings, ranks))
    stages.push_back(plan_rank(settings, rank, ranks).layout);
  return std::move(stages[0]);
}

/// The groups come first: they explain what may be refused behind them.
void show_layout(const Settings& settings, int64_t ranks) {
  const Layout layout(settings.parallel.layout, ranks);
  std::cout << describe_layout(layout);
  const RunLayout run = plan_run(settings, ranks);
  if (settings.model.num_moe_layers() > 0) {
    std::cout << fmt::format("\ndispatcher {}\n",
                             describe_dispatcher(settings.model, run.part.groups));
  }
  if (layout.degree(Axis::kPp) == 1) return;
  const PipelineLayout pipeline =
      make_pipeline_layout(settings.parallel, settings.model.layer_counts());
  std::cout << fmt::format(
                   "\nchunks {}\n{} micro-batches, forward and both backward parts 1 each:\n",
                   to_string(pipeline), run.schedule.num_micro_batches)
            << draw_pipeline(
                   simulate_pipeline(run.schedule, make_order(settings.train, run.schedule)));
}

void show_schedule(const Settings& settings, int64_t ranks) {
  std::cout << list_pipeline(make_order(settings.train, plan_run(settings, ranks).schedule));
}

void show_checkpoint(const std::string& path, bool json) {
  const OpenedCheckpoint opened = open_checkpoint(path);
  const CheckpointReader& reader = opened.reader;
  print_skipped(opened);
  Json tensors = Json::array();
  for (const TensorGroup group : {TensorGroup::kModel, TensorGroup::kOptimizer}) {
    for (const std::string& name : reader.names(group)) {
      const TensorRecord& record = reader.manifest().tensors.at(name);
      tensors.push_back({{"name", name},
                         {"dtype", dtype_name(record.dtype)},
                         {"shape", std::vector<int64_t>(record.shape.dims().begin(),
                                                        record.shape.dims().end())}});
      if (!json) {
        std::cout << fmt::format("{:<48} {:<5} {}\n", name, dtype_name(record.dtype),
                                 record.shape.to_string());
      }
    }
  }
  const Json state = Json::parse(reader.state());
  if (json) {
    std::cout << Json{{"path", reader.path().string()},
                      {"step", reader.step()},
                      {"state", state},
                      {"tensors", tensors}}
                     .dump(2)
              << "\n";
  } else {
    std::cout << fmt::format("{}: step {}, {} tensors\n", reader.path().string(), reader.step(),
                             tensors.size());
  }
}

}  // namespace

int run_inspect(const InspectArguments& arguments) {
  const bool anything = arguments.presets || arguments.program || arguments.memory ||
                        arguments.layout || arguments.schedule || arguments.contexts ||
                        arguments.step || arguments.passes || !arguments.step_html.empty() ||
                        !arguments.checkpoint.empty() || !arguments.report.empty();
  require(anything,
          "nothing to inspect: give --presets, --program, --passes, --memory, --layout, "
          "--schedule, --contexts, --step, --step-html FILE, --checkpoint PATH or --report RUN");
  require(arguments.goal.empty() || arguments.passes, "--goal says of which --passes");
  if (arguments.presets) show_presets(arguments.json);
  if (!arguments.checkpoint.empty()) show_checkpoint(arguments.checkpoint, arguments.json);
  if (!arguments.report.empty())
    std::cout << write_report_from_run(arguments.report).string() << "\n";
  if (arguments.contexts) show_contexts(resolve(arguments.config), arguments);
  const bool text_only = arguments.program || arguments.layout || arguments.schedule;
  const bool step = arguments.step || !arguments.step_html.empty();
  if (text_only || arguments.memory || step || arguments.passes) {
    Settings settings = resolve(arguments.config);
    require(!text_only || !arguments.json,
            "--program, --layout and --schedule print text only; leave out --json");
    const bool of_training = text_only || arguments.memory || step || arguments.goal != "infer";
    if (of_training) validate_without_data(settings);
    const int64_t ranks = resolve_ranks(settings, arguments.ranks);
    const auto schedule = apply_schedule(settings, ranks);
    if (schedule && !arguments.json) std::cout << "# " << describe(*schedule) << "\n";
    const auto choice = choose_within_limit(settings, ranks);
    if (arguments.layout) show_layout(settings, ranks);
    if (arguments.schedule) show_schedule(settings, ranks);
    if (step) show_step(settings, ranks, arguments);
    if (arguments.program) show_programs(settings, ranks);
    if (arguments.passes) show_passes(settings, arguments, ranks);
    if (arguments.memory) show_memory(settings, ranks, choice, arguments.json);
  }
  return 0;
}

}  // namespace tessera

#include <CLI/CLI.hpp>

#include "cli/number_options.h"
#include "cli/options.h"
#include "core/config/config.h"

namespace tessera {
namespace {

/// Takes "[CONFIG] [--section.key=value ...]".
void add_config(CLI::App& command, ConfigArguments& config) {
  command.add_option("config", config.file, "Configuration file (TOML)");
  command.allow_extras();
  command.footer([] {
    return "Any key of the configuration can be given as --section.key=value:\n\n" + config_help();
  });
}

}  // namespace

CLI::App* add_train(CLI::App& app, TrainArguments& train) {
  CLI::App* command =
      app.add_subcommand("train", "Train a model; the same command continues a stopped run");
  add_config(*command, train.config);
  command->add_flag("--print-config", train.print_config,
                    "Print each resolved value and its origin, then stop");
  add_number(
      *command, "--ranks", &train.ranks,
      "Start this many ranks on this machine; 0: run as started (alone, or by mpirun, srun or "
      "torchrun)",
      between(0, kManyThings));
  command->add_option("--trace", train.trace,
                      "File for what all ranks did in the second and third step (Chrome JSON)");
  command->add_flag("--json", train.json, "With --print-config: as JSON");
  return command;
}

namespace {

CLI::App* add_tuning(CLI::App& app, const char* name, const char* what, TrainArguments& train) {
  CLI::App* command = app.add_subcommand(name, what);
  add_config(*command, train.config);
  command->add_flag("--print-config", train.print_config,
                    "Print each resolved value and its origin, then stop");
  command->add_flag("--json", train.json, "With --print-config: as JSON");
  return command;
}

}  // namespace

CLI::App* add_dpo(CLI::App& app, TrainArguments& dpo) {
  return add_tuning(app, "dpo",
                    "Train a model on pairs of answers, of which one is preferred (DPO); the same "
                    "command continues a stopped run",
                    dpo);
}

CLI::App* add_rl(CLI::App& app, TrainArguments& rl) {
  return add_tuning(
      app, "rl",
      "Train a model on rewards of its own answers (GRPO); the same command continues "
      "a stopped run",
      rl);
}

CLI::App* add_verify(CLI::App& app, VerifyArguments& verify) {
  CLI::App* command = app.add_subcommand(
      "verify",
      "Compare a configuration's layout with one rank, on the host and in F32: losses, gradients, "
      "weights. With run.device=cuda and one rank: the GPU with the host. With --static: prove the "
      "layout without running it");
  add_config(*command, verify.config);
  add_number(*command, "--ranks", &verify.ranks, "Ranks of the layout; 0: the fewest that it needs",
             between(0, kManyThings));
  CLI::Option* steps = add_number(*command, "--steps", &verify.steps, "Optimizer steps to compare",
                                  between(1, kManyThings));
  CLI::Option* tolerance = add_number(
      *command, "--tolerance", &verify.tolerance,
      "Largest relative error that agrees, of what is computed and sent in F32", above(0));
  CLI::Option* full =
      command->add_flag("--full", verify.full, "With the model's own sizes, not shrunk");
  command
      ->add_flag("--static", verify.proof,
                 "Run nothing: follow how each value of the programs is spread over the ranks, at "
                 "the model's own sizes")
      ->excludes(steps, tolerance, full);
  command->add_flag("--all", verify.all, "List every parameter; with --static, every value");
  command->add_flag("--json", verify.json, "Print JSON");
  return command;
}

CLI::App* add_bench(CLI::App& app, BenchArguments& bench) {
  CLI::App* command = app.add_subcommand(
      "bench",
      "Time a configuration's training steps, or one block of a layer, operator by operator");
  add_config(*command, bench.config);
  CLI::Option* layer = command->add_option(
      "--layer", bench.layer,
      "Time only this block of one layer, forward and backward, on random hidden "
      "states: moe, mlp or attention");
  layer->check(CLI::IsMember({"moe", "mlp", "attention"}));
  CLI::Option* steps =
      add_number(*command, "--steps", &bench.steps,
                 "Steps, or passes over the block, that are timed", between(1, kManyThings));
  CLI::Option* warmup = add_number(*command, "--warmup", &bench.warmup, "Steps before those",
                                   between(0, kManyThings));
  CLI::Option* trace =
      command->add_option("--trace", bench.trace, "File for a trace of one more step");
  command
      ->add_flag("--tiles", bench.tiles,
                 "With --layer moe: time nothing, but print how a GPU's kernels cut the experts' "
                 "products into tiles, and what a cost model predicts of these and of others")
      ->needs(layer)
      ->excludes(steps, warmup, trace);
  command
      ->add_flag("--steps-only", bench.steps_only,
                 "Time whole steps and nothing else: not their operators, nor the host's part")
      ->excludes(layer, trace);
  command->add_option("--hardware", bench.hardware,
                      "Also predict the step, by the description of that hardware (see plan)");
  command
      ->add_option("--calibrate", bench.calibration,
                   "Time the operators of some models on this machine and write what was found "
                   "into this hardware file, the rest being that of --hardware")
      ->excludes(layer, steps, warmup, trace);
  command->add_flag("--json", bench.json, "Print JSON");
  return command;
}

CLI::App* add_plan(CLI::App& app, PlanArguments& plan) {
  CLI::App* command = app.add_subcommand(
      "plan",
      "Find the fastest layout of a configuration on hardware that need not be there, by "
      "simulating its steps; keys that the configuration sets stay as they are");
  add_config(*command, plan.config);
  add_number(*command, "--gpus", &plan.gpus, "Devices, each of which is a rank",
             between(1, kManyThings))
      ->required();
  command
      ->add_option("--hardware", plan.hardware,
                   "Hardware by name, or a file of bench --calibrate; an unknown name lists them")
      ->required();
  add_number(*command, "--top", &plan.top, "Layouts that are shown", between(1, kManyThings));
  CLI::Option* skew =
      add_number(*command, "--skew", &plan.skew,
                 "Rows that come to the fullest rank's experts, in those of balanced routing",
                 between(1, kManyThings));
  command
      ->add_option("--routing", plan.routing,
                   "Run folder, or its metrics.jsonl, whose last steps say what comes to experts "
                   "instead, layer by layer")
      ->excludes(skew);
  command->add_option("--slow-rank", plan.slow_ranks,
                      "Ranks that compute slower than others, such as 5=1.3: 1.3 times as long");
  command->add_option("--slow-link", plan.slow_links,
                      "Ranks whose links are slower, such as 5=4: all that it exchanges takes 4 "
                      "times as long");
  command
      ->add_option("--exposed", plan.exposed,
                   "Groups beside whose exchanges nothing is computed, such as ep,tp: what "
                   "software takes that hides none of them")
      ->delimiter(',');
  command
      ->add_option("--pipelined", plan.pipelined,
                   "Groups, such as tp, whose exchanges travel piece by piece beside the product "
                   "that makes or reads them")
      ->delimiter(',');
  command->add_option(
      "--operator-share", plan.operator_shares,
      "Share of the rates that an operator reaches in place of what was measured, "
      "such as attention=0.35; above 1: it multiplies in a smaller format; 0: it is "
      "part of another's kernel");
  command->add_flag("--stored-scores", plan.stored_scores,
                    "Attention stores its scores, as software does without a fused kernel");
  command->add_option("--graphs", plan.graphs,
                      "What the device repeats as CUDA graphs: all, static (what has the same "
                      "shapes whatever the routing) or none; without it as run.cuda_graphs says");
  add_number(*command, "--launch-us", &plan.launch_us,
             "Microseconds of the host for an operator that is in no graph; 0: the "
             "hardware's",
             between(0, kManyThings));
  add_number(*command, "--launch-expert-us", &plan.launch_expert_us,
             "More of them for each expert, of products and quantization that go through experts "
             "one by one",
             between(0, kManyThings));
  CLI::Option* explain = command->add_flag("--explain", plan.explain,
                                           "Search nothing: simulate the configuration as it is");
  command
      ->add_flag("!--without-limit", plan.must_fit,
                 "With --explain: also where it takes more memory than there is")
      ->needs(explain);
  command->add_option("--write", plan.write, "File for the best layout's whole configuration");
  command->add_option("--html", plan.html, "File for a drawing of its step");
  command->add_option("--trace", plan.trace,
                      "File for its step as a trace with memory over time (Chrome JSON)");
  command->add_option("--chakra", plan.chakra,
                      "Write its step for simulators of networks, as MLCommons Chakra's execution "
                      "traces: files PREFIX.<rank>.et, and PREFIX.groups.json");
  command->add_flag("--json", plan.json, "Print JSON");
  return command;
}

CLI::App* add_inspect(CLI::App& app, InspectArguments& inspect) {
  CLI::App* command =
      app.add_subcommand("inspect", "Show programs, memory, presets, checkpoints, reports");
  add_config(*command, inspect.config);
  command->add_flag("--program", inspect.program, "The layers' forward and backward programs");
  command->add_flag("--memory", inspect.memory, "Predicted memory of a training run");
  command->add_flag("--layout", inspect.layout,
                    "Which rank does what under [parallel], and the pipeline's timeline");
  command->add_flag(
      "--contexts", inspect.contexts,
      "How ranks share the documents of the first steps, with parallel.dynamic_cp and "
      "without, and what that takes on --hardware");
  command->add_option("--hardware", inspect.hardware,
                      "For --contexts: hardware as for `tessera plan`");
  command->add_flag("--schedule", inspect.schedule, "Every pipeline stage's passes in their order");
  command->add_flag("--step", inspect.step, "A training step as a plan: tasks, lanes and memory");
  command->add_option("--step-html", inspect.step_html,
                      "Draw the step as a timeline into this HTML file");
  command->add_flag("--all", inspect.all, "Print all tasks of the step");
  command->add_flag("--passes", inspect.passes,
                    "What each of the compiler's passes made of the programs");
  command->add_option("--goal", inspect.goal, "With --passes: what for; default: train")
      ->check(CLI::IsMember({"train", "infer"}));
  add_number(
      *command, "--ranks", &inspect.ranks,
      "Ranks of the layout, also for --program, --passes and --memory; 0: as few as it needs",
      between(0, kManyThings));
  command->add_flag("--presets", inspect.presets, "The model presets");
  command->add_option("--checkpoint", inspect.checkpoint, "Tensors and state of a checkpoint");
  command->add_option("--report", inspect.report, "Rebuild report.html of a run folder");
  command->add_flag("--json", inspect.json, "Print JSON");
  return command;
}

}  // namespace tessera

#include <set>
#include <string>
#include <tuple>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using CliHelp = CliTest;

TEST_F(CliHelp, EverySubcommandHasIt) {
  const std::vector<std::string> commands = {"train",    "verify",  "eval",    "generate",
                                             "tokenize", "convert", "upcycle", "inspect",
                                             "bench",    "plan",    "doctor"};
  const std::string program = succeed({"--help"}).out;
  for (const std::string& command : commands) {
    EXPECT_THAT(program, HasSubstr("  " + command + " "));
    EXPECT_THAT(succeed({command, "--help"}).out, HasSubstr("Usage: tessera " + command));
  }
  EXPECT_THAT(succeed({"--version"}).out, MatchesRegex("[0-9]+\\.[0-9.]+\n"));
}

TEST_F(CliHelp, NamesEveryConfigurationKey) {
  const std::string help = succeed({"train", "--help"}).out;
  const Json config = succeed_json({"train", "--print-config", "--json"});
  ASSERT_GT(config.size(), 50);
  for (const auto& [key, value] : config.items()) EXPECT_THAT(help, HasSubstr("--" + key + "="));
}

TEST_F(CliHelp, PrintedConfigurationLoadsToTheSameValues) {
  const Arguments overrides = {"--model.preset=tiny", "--moe.inner_sizes=32,64", "--run.seed=12",
                               "--data.separator=<|end \"of\" text|>"};
  Arguments first = {"train", "--print-config"};
  first.insert(first.end(), overrides.begin(), overrides.end());
  write_all(path("printed.toml"), succeed(first).out);

  first.emplace_back("--json");
  const Json expected = succeed_json(first);
  const Json loaded = succeed_json({"train", path("printed.toml"), "--print-config", "--json"});
  ASSERT_EQ(loaded.size(), expected.size());
  for (const auto& [key, entry] : expected.items()) {
    EXPECT_EQ(loaded[key]["value"], entry["value"]) << key;
  }
  EXPECT_EQ(loaded["moe.inner_sizes"]["value"], Json({32, 64}));
}

TEST_F(CliHelp, PrintedConfigurationShowsOrigins) {
  write_all(path("run.toml"), "[model]\nhidden_size = 48\npreset = \"tiny\"\n\n[run]\nseed = 3\n");
  const Arguments arguments = {"train", path("run.toml"), "--print-config", "--run.seed=4"};
  Arguments as_json = arguments;
  as_json.emplace_back("--json");
  const Json config = succeed_json(as_json);
  EXPECT_EQ(config["model.hidden_size"]["value"], 48);
  EXPECT_EQ(config["model.hidden_size"]["origin"], path("run.toml") + ":2");
  EXPECT_EQ(config["run.seed"]["value"], 4);
  EXPECT_EQ(config["run.seed"]["origin"], "--run.seed");
  EXPECT_EQ(config["model.num_layers"]["origin"], "preset tiny");
  EXPECT_EQ(config["optim.beta2"]["origin"], "default");

  const std::string toml = succeed(arguments).out;
  for (const std::string& origin :
       {path("run.toml") + ":2", std::string("--run.seed"), std::string("preset tiny")}) {
    EXPECT_THAT(toml, HasSubstr("# " + origin));
  }
}

TEST_F(CliHelp, InspectShowsPresetsProgramsAndMemory) {
  const Json presets = succeed_json({"inspect", "--presets", "--json"});
  ASSERT_GT(presets.size(), 5);
  for (const Json& preset : presets) EXPECT_GE(preset["parameters"], preset["active_parameters"]);

  const std::string program = succeed({"inspect", "--program", "--model.preset=tiny"}).out;
  for (const char* name : {"attention", "router", "rmsnorm_backward"}) {
    EXPECT_THAT(program, HasSubstr(name));
  }
  const Json memory = succeed_json({"inspect", "--memory", "--model.preset=tiny", "--json"});
  int64_t sum = 0;
  const std::set<std::string> no_part = {"device", "total", "worst routing"};
  for (const auto& [name, bytes] : memory.items())
    sum += no_part.contains(name) ? 0 : bytes.get<int64_t>();
  EXPECT_EQ(memory["total"], sum);
}

/// Scratch memory depends on the machine, all else is the same everywhere.
TEST_F(CliHelp, InspectShowsWhatPassesDid) {
  using Row = std::tuple<std::string, int64_t, int64_t, int64_t>;
  const auto rows = [](const Json& report) {
    std::vector<Row> result;
    for (const Json& pass : report["passes"]) {
      const Json& backward = pass["backward"];
      result.emplace_back(pass["pass"], pass["forward"]["nodes"], pass["forward"]["saved_bytes"],
                          backward.is_null() ? 0 : backward["nodes"].get<int64_t>());
    }
    return result;
  };
  const Arguments passes = {"inspect", "--passes", "--model.preset=tiny", "--json"};
  const Json training = succeed_json(passes);
  ASSERT_EQ(training.size(), 3);
  EXPECT_EQ(training[1]["program"], "moe_layer");
  const int64_t saved = 10633344;
  EXPECT_EQ(rows(training[1]), (std::vector<Row>{{"as built", 18, 0, 0},
                                                 {"fuse_sums", 16, 0, 0},
                                                 {"fuse_gathers", 16, 0, 0},
                                                 {"differentiate", 16, saved, 26},
                                                 {"fuse_gradient_sums", 16, saved, 21},
                                                 {"fuse_gradient_gathers", 16, saved, 21},
                                                 {"fuse_repeats", 16, saved, 21},
                                                 {"schedule", 16, saved, 21}}));
  Arguments inference = passes;
  inference.emplace_back("--goal=infer");
  EXPECT_EQ(rows(succeed_json(inference)[1]),
            (std::vector<Row>{
                {"as built", 18, 0, 0}, {"fuse_sums", 16, 0, 0}, {"fuse_gathers", 16, 0, 0}}));
  EXPECT_THAT(succeed({"inspect", "--passes", "--model.preset=tiny"}).out,
              HasSubstr("derives the backward program"));
  expect_refused({"inspect", "--program", "--goal=infer", "--model.preset=tiny"}, {"--passes"});
  expect_refused({"inspect", "--passes", "--goal=simulate", "--model.preset=tiny"}, {"--goal"});
}

/// A GPU's kernels need other scratch memory and have limits of their own; it need not be there.
TEST_F(CliHelp, InspectPlansForTheDevice) {
  const Arguments tiny = {"inspect",
                          "--memory",
                          "--model.preset=tiny",
                          "--data.sequence_length=64",
                          "--train.micro_batch=1",
                          "--json"};
  const auto with = [](Arguments arguments, const Arguments& more) {
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  const Json cpu = succeed_json(with(tiny, {"--run.device=cpu"}));
  EXPECT_EQ(cpu["device"], "cpu");
  if (!succeed_json({"doctor", "--json"})["cuda"]["built"].get<bool>()) {
    expect_refused(with(tiny, {"--run.device=cuda"}), {"built without CUDA"});
    return;
  }
  const Json gpu = succeed_json(with(tiny, {"--run.device=cuda"}));
  EXPECT_EQ(gpu["device"], "cuda");
  EXPECT_EQ(gpu["weights"], cpu["weights"]);
  EXPECT_NE(gpu["working memory"], cpu["working memory"]);
  expect_refused(with(tiny, {"--run.device=cuda", "--moe.num_experts=2048"}),
                 {"2048 experts", "1024", "run.device = \"cpu\""});
  const Json ranks = succeed_json(with(tiny, {"--run.device=cuda", "--ranks=2"}));
  EXPECT_EQ(ranks["device"], "cuda");
  EXPECT_LT(ranks["optimizer"], gpu["optimizer"]);
}

TEST_F(CliHelp, DoctorMeasuresTheMachine) {
  const Json machine = succeed_json({"doctor", "--json"});
  EXPECT_GT(machine["matrix_gflops"]["f32"], 0.01);
  EXPECT_EQ(machine["threads"], 2);
  const Json& cuda = machine["cuda"];
  EXPECT_TRUE(!cuda["gpus"].empty() || !cuda["why_none"].get<std::string>().empty());
}

TEST_F(CliHelp, BenchTimesSteps) {
  const Arguments tiny = {"bench",
                          "--model.preset=tiny",
                          "--model.vocab_size=64",
                          "--data.sequence_length=16",
                          "--train.micro_batch=2",
                          "--train.global_batch=4",
                          "--run.device=cpu",
                          "--steps=3"};
  Arguments json = tiny;
  json.insert(json.end(), {"--json", "--trace=" + path("trace.json")});
  const Json result = succeed_json(json);
  EXPECT_EQ(result["seconds"].size(), 3);
  EXPECT_EQ(result["tokens"], 4 * 16);
  EXPECT_GT(result["tokens_per_second"], 0);
  EXPECT_GT(result["operators"]["attention"], 0);
  EXPECT_GT(result["operators"]["adamw"], 0);
  EXPECT_GT(result["memory_predicted"], 0);
  EXPECT_TRUE(result["gpu"].is_null());
  EXPECT_FALSE(Json::parse(read_all(path("trace.json")))["traceEvents"].empty());
  EXPECT_THAT(succeed(tiny).out, HasSubstr("tokens/s"));
  Arguments wrong = tiny;
  wrong.emplace_back("--train.global_batch=3");
  expect_refused(wrong, {"train.global_batch 3 is not a multiple of train.micro_batch 2"});
  Arguments nowhere = tiny;
  nowhere.push_back("--trace=" + path("none/trace.json"));
  expect_refused(nowhere, {"--trace: cannot write", "none/trace.json", "there is no folder"});
}

TEST_F(CliHelp, BenchTimesABlock) {
  const Arguments moe = {"bench",
                         "--layer=moe",
                         "--model.preset=tiny",
                         "--data.sequence_length=16",
                         "--train.micro_batch=2",
                         "--run.device=cpu",
                         "--steps=2"};
  Arguments json = moe;
  json.emplace_back("--json");
  const Json result = succeed_json(json);
  EXPECT_EQ(result["tokens"], 32);
  EXPECT_GT(result["forward"]["tflops"], 0);
  EXPECT_GT(result["backward"]["operators"]["grouped_matmul_wgrad"], 0);
  EXPECT_THAT(succeed(moe).out, HasSubstr("TFLOPS"));
  Arguments wrong = moe;
  wrong[1] = "--layer=mlp";
  expect_refused(wrong, {"none of the model's 2 layers has a block 'mlp'"});
  wrong[1] = "--layer=head";
  expect_refused(wrong, {"--layer", "head"});
}

/// A prediction, so no GPU is needed.
TEST_F(CliHelp, BenchPredictsTiles) {
  const Arguments tiles = {"bench",
                           "--layer=moe",
                           "--tiles",
                           "--model.preset=tiny",
                           "--data.sequence_length=16",
                           "--train.micro_batch=2",
                           "--train.precision=bf16"};
  const auto with = [&](const std::string& more) {
    Arguments arguments = tiles;
    arguments.push_back(more);
    return arguments;
  };
  const Json result = succeed_json(with("--json"));
  EXPECT_EQ(result["tokens"], 32);
  ASSERT_EQ(result["products"].size(), 4);
  for (const Json& product : result["products"]) {
    int64_t taken = 0;
    for (const Json& choice : product["choices"]) {
      EXPECT_GT(choice["tflops"], 0);
      EXPECT_GT(choice["tiles"], 0);
      taken += choice["taken"].get<bool>() ? 1 : 0;
    }
    EXPECT_EQ(taken, 1);
  }
  const std::string text = succeed(tiles).out;
  for (const char* part : {"FC2 data gradient", "(taken)", "TFLOPS", "% padding", "idle"})
    EXPECT_THAT(text, HasSubstr(part));
  EXPECT_THAT(succeed(with("--moe.inner_size=36")).out, HasSubstr("not in tiles"));
  expect_refused(with("--train.precision=f32"), {"train.precision = \"bf16\""});
  expect_refused(with("--run.device=cpu"), {"run.device = \"cpu\""});
  expect_refused(with("--steps=2"), {"--steps", "--tiles"});
  expect_refused({"bench", "--tiles"}, {"--tiles requires --layer"});
  expect_refused({"bench", "--tiles", "--layer=mlp"}, {"--layer is 'mlp', give moe"});
}

/// The vocabulary is the tokenizer's, which need not be there where model.vocab_size says it.
TEST_F(CliHelp, BenchTakesTheVocabularyOfTraining) {
  const auto bench = [&](const Arguments& options) {
    Arguments all = {"bench",
                     "--model.preset=tiny",
                     "--data.sequence_length=16",
                     "--train.micro_batch=1",
                     "--train.global_batch=1",
                     "--run.device=cpu",
                     "--steps=1",
                     "--warmup=0",
                     "--json"};
    all.insert(all.end(), options.begin(), options.end());
    return all;
  };
  const Arguments none = {"--data.tokenizer=" + path("none.json")};
  const Json of_bytes = succeed_json(bench({}));
  const Json of_number = succeed_json(bench({none[0], "--model.vocab_size=320"}));
  EXPECT_EQ(of_bytes["parameters"], of_number["parameters"]);
  expect_refused(bench(none), {"none.json", "model.vocab_size"});
}

/// Before anything is written, and before ranks are started.
TEST_F(CliHelp, AGpuThatIsNotThereIsRefused) {
  expect_refused(train("run", {"--run.device=cpu", "--run.cuda_graphs=on"}),
                 {"run.cuda_graphs", "needs a GPU", "auto"});
  EXPECT_FALSE(std::filesystem::exists(path("run")));
  const Json machine = succeed_json({"doctor", "--json"});
  if (!machine["cuda"]["gpus"].empty()) GTEST_SKIP() << "there is a GPU";
  expect_refused({"bench", "--model.preset=tiny", "--run.device=cuda"}, {"run.device = \"cpu\""});
  expect_refused(train("run", {"--run.device=cuda"}), {"run.device = \"cpu\""});
  expect_refused(train("run", {"--run.device=cuda", "--ranks=2"}), {"run.device = \"cpu\""});
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

TEST_F(CliHelp, MistakesOfTheCommandLine) {
  expect_refused({}, {"subcommand"});
  expect_refused({"trian"}, {"unknown subcommand 'trian'", "did you mean 'train'"});
  expect_refused({"train", "--bogus"}, {"--bogus"});
  expect_refused({"train", "a.toml", "b.toml"}, {"b.toml"});
  expect_refused({"generate", path("none"), "--bogus"}, {"--bogus"});
  expect_refused({"generate"}, {"checkpoint is required"});
  expect_refused({"eval", path("none"), "--batch-size", "many"}, {"--batch-size", "many"});
  expect_refused({"inspect"}, {"--presets"});
  expect_refused({"train", path("none.toml")}, {"none.toml", "does not exist"});
}

}  // namespace
}  // namespace tessera

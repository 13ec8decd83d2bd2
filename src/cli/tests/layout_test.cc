#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

using CliLayout = CliTest;

TEST_F(CliLayout, ShowsTheFoldedLayout) {
  const std::string out = succeed({"inspect", "--layout", "--ranks", "16", "--parallel.tp=2",
                                   "--parallel.cp=2", "--parallel.pp=2", "--parallel.ep=8",
                                   "--model.num_layers=8", "--train.global_batch=16"})
                              .out;
  EXPECT_THAT(out, HasSubstr("experts: etp 1 x ep 8 x edp 1 x pp 2"));
  EXPECT_THAT(out, HasSubstr("ep groups: [0 1 2 3 4 5 6 7] [8 9 10 11 12 13 14 15]"));
  EXPECT_THAT(out, HasSubstr("chunks [E t*4] [t*4 L]"));
  EXPECT_THAT(out, HasSubstr("of the time is waited"));
  EXPECT_THAT(out, HasSubstr("dispatcher all_to_all: 3.5 rows a token leave a rank, all_gather "
                             "would move 14"));
}

TEST_F(CliLayout, TakesTheFewestRanksThatFitBothFactorings) {
  const Arguments layout = {"inspect", "--layout", "--parallel.ep=8", "--train.global_batch=64"};
  EXPECT_THAT(succeed(layout).out, HasSubstr("8 ranks; dense parts: tp 1 x cp 1 x dp 8"));
  const auto verified =
      succeed_json({"verify", "--parallel.ep=4", "--parallel.tp=2", "--model.num_layers=2",
                    "--train.global_batch=16", "--steps=1", "--json"});
  EXPECT_TRUE(verified["agrees"]);
}

TEST_F(CliLayout, TheWeightOfAnAllToAllDecides) {
  const auto dispatcher = [&](const std::string& efficiency) {
    return succeed({"inspect", "--layout", "--parallel.ep=8", "--train.global_batch=64",
                    "--moe.num_experts=16", "--moe.top_k=7",
                    "--parallel.all_to_all_efficiency=" + efficiency})
        .out;
  };
  EXPECT_THAT(dispatcher("1"), HasSubstr("dispatcher all_to_all: 12.25 rows"));
  EXPECT_THAT(dispatcher("0.75"), HasSubstr("dispatcher all_gather: 14 rows"));
  expect_refused({"inspect", "--layout", "--parallel.all_to_all_efficiency=0"},
                 {"all_to_all_efficiency", "above 0"});
}

/// Bounded exchanges count what they move, padding with it.
TEST_F(CliLayout, BoundedExchangesCountTheirBounds) {
  const auto dispatcher = [&](const Arguments& options) {
    Arguments all = {"inspect",
                     "--layout",
                     "--parallel.ep=4",
                     "--train.global_batch=32",
                     "--moe.num_experts=16",
                     "--moe.top_k=2",
                     "--parallel.exchange=bounded"};
    all.insert(all.end(), options.begin(), options.end());
    return succeed(all).out;
  };
  EXPECT_THAT(dispatcher({}), HasSubstr("all_gather: 6 rows a token leave a rank, all_to_all would "
                                        "move 12"));
  EXPECT_THAT(dispatcher({"--moe.capacity_factor=1.25"}), HasSubstr("all_to_all: 3.75 rows"));
  EXPECT_THAT(dispatcher({"--moe.capacity_factor=1.25", "--moe.capacity_group_size=8"}),
              HasSubstr("all_to_all would move 12"));
  expect_refused({"inspect", "--layout", "--parallel.exchange=fixed"},
                 {"parallel.exchange", "exact", "bounded"});
}

TEST_F(CliLayout, SaysWhatMayBeCloned) {
  const auto inspect = [](const std::string& option) -> Arguments {
    return {"inspect",
            "--layout",
            "--parallel.ep=4",
            "--moe.num_experts=16",
            "--parallel.clone_experts=2",
            "--train.global_batch=64",
            option};
  };
  EXPECT_THAT(succeed(inspect("--moe.top_k=2")).out,
              AllOf(HasSubstr("dispatcher all_to_all"),
                    HasSubstr("each rank may clone 2 hot experts of others")));
  expect_refused(inspect("--parallel.etp=2"), {"parallel.clone_experts 2 with parallel.etp 2"});
  expect_refused(inspect("--train.precision=fp8"),
                 {"parallel.clone_experts 2 with train.precision = \"fp8\""});
}

TEST_F(CliLayout, ListsEveryStagesPasses) {
  const std::string out =
      succeed({"inspect", "--schedule", "--parallel.pp=2", "--model.num_layers=4",
               "--parallel.pipeline_schedule=interleaved", "--parallel.pipeline_chunks=2",
               "--train.global_batch=96"})
          .out;
  EXPECT_THAT(out, HasSubstr("stage  0 F0.0 F0.1 F1.0 F1.1 "));
  EXPECT_THAT(out, HasSubstr(" B1.11"));
  EXPECT_THAT(out, HasSubstr("with chunk.micro-batch"));
  EXPECT_EQ(std::ranges::count(out, '\n'), 3);
}

/// A stage of dense layers need not know the names of others' values.
TEST_F(CliLayout, RecomputesWhatOnlySomeStagesHave) {
  const Arguments plain = {"inspect",
                           "--memory",
                           "--json",
                           "--parallel.pp=2",
                           "--model.num_layers=4",
                           "--model.mtp_layers=1",
                           "--moe.first_dense_layers=2"};
  const auto with = [&](const std::string& name) {
    Arguments arguments = plain;
    arguments.push_back("--train.recompute=" + name);
    return arguments;
  };
  const auto saved = [&](const Arguments& arguments) {
    std::vector<int64_t> bytes;
    for (const auto& stage : succeed_json(arguments)) bytes.push_back(stage["saved activations"]);
    return bytes;
  };
  const auto all = saved(plain);
  EXPECT_LT(saved(with("mlp_act"))[0], all[0]);
  EXPECT_LT(saved(with("expert_act"))[1], all[1]);
  EXPECT_LT(saved(with("hidden_norm"))[1], all[1]) << "of multi-token prediction";
  expect_refused(with("expert_actt"), {"'expert_actt'", "did you mean 'expert_act'"});
}

TEST_F(CliLayout, OffloadsWhatIsNamed) {
  const auto with = [](const std::string& what, const Arguments& more = {}) {
    Arguments arguments = {"inspect",
                           "--memory",
                           "--json",
                           "--model.num_layers=8",
                           "--moe.first_dense_layers=2",
                           "--train.offload=" + what};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  const nlohmann::json all = succeed_json(with("all"));
  EXPECT_GT(all["offloaded"], 0);
  const nlohmann::json some = succeed_json(with("expert_pre"));
  EXPECT_LT(some["offloaded"], all["offloaded"]);
  EXPECT_GT(some["saved activations"], all["saved activations"]);
  EXPECT_EQ(some["total"], succeed_json(with("mlp_norm@2"))["total"]);
  expect_refused(with("expert_pr"),
                 {"'expert_pr'", "did you mean 'expert_pre'?", "kept are", "attn_norm"});
  expect_refused(with("expert_pre@0-1"), {"'expert_pre@0-1'", "no layer of these keeps"});
  expect_refused(with("all@3-8"), {"'all@3-8'", "layers 0 to 7"});
  expect_refused(with("all@3-2"), {"end before they begin"});
  expect_refused(with("all@-2"), {"'' is no layer"});
  expect_refused(with("all@2x"), {"'2x' is no layer"});
  expect_refused(with("expert_pre", {"--train.recompute=expert_pre"}), {"both name 'expert_pre'"});
  expect_refused(with("attn_norm", {"--train.recompute=all"}), {"'attn_norm'", "no layer keeps"});
  expect_refused(with("all", {"--train.offload_rate=0"}), {"train.offload_rate", "above 0"});
}

/// What is chosen is printed as a configuration that is planned alike.
TEST_F(CliLayout, ChoosesWithinAMemoryLimit) {
  const Arguments plain = {
      "inspect",         "--memory", "--json", "--model.num_layers=6", "--moe.first_dense_layers=2",
      "--run.device=cpu"};
  const auto with = [&](const Arguments& more) {
    Arguments arguments = plain;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  const nlohmann::json kept = succeed_json(plain);
  const nlohmann::json all = succeed_json(with({"--train.recompute=all"}));
  const int64_t limit = (kept["total"].get<int64_t>() + all["total"].get<int64_t>()) / 2;
  const std::string option = fmt::format("--train.memory_limit={}B", limit);
  const nlohmann::json chosen = succeed_json(with({option}));
  EXPECT_LE(chosen["total"], limit);
  EXPECT_GT(chosen["pass_seconds"], kept["pass_seconds"]);
  EXPECT_LE(chosen["pass_seconds"], all["pass_seconds"]);
  EXPECT_GT(chosen["train.recompute"].size(), 0);
  EXPECT_EQ(chosen["train.offload"].size(), 0);
  nlohmann::json pasted =
      succeed_json(with({"--train.recompute=" + chosen["train.recompute"].dump()}));
  pasted["train.recompute"] = chosen["train.recompute"];
  pasted["train.offload"] = chosen["train.offload"];
  EXPECT_EQ(pasted, chosen);
  Arguments text = with({option});
  std::erase(text, "--json");
  EXPECT_THAT(succeed(text).out, ::testing::AllOf(HasSubstr("memory limit"), HasSubstr("recompute"),
                                                  HasSubstr("train.recompute = [\"")));
  expect_refused(with({"--train.memory_limit=1KiB"}),
                 {"train.memory_limit is", "the least that training can do with", "on rank 0"});
  expect_refused(with({"--train.memory_limit=80"}), {"\"80\"", "no unit", "80GiB"});
  expect_refused(with({"--train.memory_limit=80GiBs"}), {"'gibs' is unknown"});
  expect_refused(with({"--train.recompute=attn_norm@7"}), {"'attn_norm@7'", "layers 0 to 5"});
  expect_refused(with({"--train.recompute=expert_act@0-1"}), {"no value of these layers"});
}

TEST_F(CliLayout, RefusesWhatDoesNotFit) {
  expect_refused({"inspect", "--layout", "--ranks", "16", "--parallel.tp=2", "--parallel.ep=3"},
                 {"etp 1 x ep 3 = 3 does not divide the 16 ranks", "nearest ep is 2 or 4"});
  expect_refused({"inspect", "--layout", "--parallel.pp=2", "--model.num_layers=2",
                  "--parallel.pipeline_layout=Et|x"},
                 {"found 'x'", "character 4"});
  expect_refused({"inspect", "--layout", "--parallel.tp=4294967296", "--parallel.cp=4294967296"},
                 {"parallel.tp", "from 1 to 1000000", "4294967296"});
  expect_refused({"inspect", "--layout", "--ranks", "4", "--parallel.pp=2", "--model.num_layers=4",
                  "--train.micro_batch=2", "--train.global_batch=10"},
                 {"train.global_batch 10", "2 data-parallel ranks", "nearest is 12"});
  expect_refused({"inspect", "--layout", "--parallel.tp=3"},
                 {"do not spread evenly", "parallel.tp 3"});
}

/// What would be ignored, or end in the middle of a run.
TEST_F(CliLayout, RefusesSettingsThatContradictEachOther) {
  const auto refuses = [&](const Arguments& options, const std::vector<std::string>& parts) {
    for (const Arguments& command : {Arguments{"inspect", "--layout"}, Arguments{"verify"}}) {
      Arguments all = command;
      all.insert(all.end(), options.begin(), options.end());
      expect_refused(all, parts);
    }
  };
  const std::string interleaved = "--parallel.pipeline_schedule=interleaved";
  refuses({interleaved, "--parallel.pipeline_chunks=2", "--model.num_layers=4"},
          {"2 chunks in a pipeline of one stage", "parallel.pp"});
  refuses({interleaved, "--parallel.pipeline_layout=Et|tL", "--model.num_layers=2"},
          {"2 chunks in a pipeline of one stage", "parallel.pipeline_layout"});
  refuses({interleaved, "--parallel.pp=2", "--model.num_layers=4"},
          {"one chunk a stage", "parallel.pipeline_chunks"});
  refuses({"--parallel.cp=2", "--parallel.context_inner=2"},
          {"parallel.context_inner 2", "\"hierarchical\""});
  refuses({"--parallel.cp=4", "--parallel.context=hierarchical", "--parallel.context_inner=3"},
          {"parallel.context_inner 3", "parallel.cp 4", "2 or 4"});
  refuses({"--parallel.ep=4", "--parallel.dispatcher=hierarchical", "--parallel.dispatch_inner=3"},
          {"parallel.dispatch_inner 3", "parallel.ep 4", "2 or 4"});
  refuses({"--parallel.ep=2", "--moe.num_experts=0", "--train.global_batch=16"},
          {"parallel.ep 2", "no layer", "moe.num_experts"});
}

TEST_F(CliLayout, TrainingRefusesALayoutOfMoreRanksThanThereAre) {
  expect_refused(train("run", {"--parallel.tp=2"}), {"tp 2", "2 ranks", "there is 1", "start 2"});
}

/// Without running it: what layouts spread, and that more ranks than there are prove, too.
TEST_F(CliLayout, VerifyProvesALayoutWithoutRunningIt) {
  const Arguments layout = {"verify",
                            "--static",
                            "--parallel.tp=2",
                            "--parallel.pp=2",
                            "--parallel.ep=4",
                            "--model.num_layers=4",
                            "--ranks",
                            "128",
                            "--train.micro_batch=1",
                            "--train.global_batch=64"};
  const auto with = [&](const std::string& argument) {
    Arguments arguments = layout;
    arguments.push_back(argument);
    return arguments;
  };
  EXPECT_THAT(succeed(layout).out,
              HasSubstr("proven: 128 ranks (tp 2, dp 32, ep 4, edp 16, pp 2), "));
  EXPECT_THAT(
      succeed(with("--all")).out,
      HasSubstr("attn.q.weight                    f32 [128, 256]               tp S0, dp R\n"));
  const auto json = succeed_json(with("--json"));
  EXPECT_TRUE(json["proven"]);
  EXPECT_EQ(json["checked_ranks"], 128);
  EXPECT_EQ(json["stages"].size(), 2);
  expect_refused(with("--steps=2"), {"--steps excludes --static"});
  expect_refused(with("--moe.num_experts=6"), {"parallel.ep 4", "moe.num_experts 6"});
}

TEST_F(CliLayout, VerifyAgreesWithOneRank) {
  const std::string out =
      succeed({"verify", "--ranks", "8", "--parallel.tp=2", "--parallel.pp=2", "--parallel.ep=4",
               "--model.num_layers=4", "--train.global_batch=16"})
          .out;
  EXPECT_THAT(out, HasSubstr("agrees: worst error"));
  EXPECT_THAT(out, HasSubstr("gradient norm"));
  const auto json = succeed_json({"verify", "--parallel.cp=2", "--model.num_layers=2", "--json"});
  EXPECT_TRUE(json["agrees"]);
  EXPECT_FALSE(json["parameters"].empty());
}

/// Layers that hand a state from token to token, of a published model and of one whose heads ranks
/// cannot share.
TEST_F(CliLayout, HybridsShareSequences) {
  EXPECT_THAT(succeed({"verify", "--model.preset=nemotron-3-nano-30b-a3b", "--ranks", "4",
                       "--parallel.tp=2", "--parallel.cp=2", "--data.sequence_length=64",
                       "--train.micro_batch=1", "--train.global_batch=2"})
                  .out,
              HasSubstr("agrees: worst error"));
  expect_refused(
      {"inspect", "--layout", "--parallel.cp=4", "--model.mamba_layers=[0]", "--mamba.num_heads=6"},
      {"parallel.cp 4 does not divide mamba.num_heads 6", "the nearest that does is 3"});
}

/// Multi-token prediction in a chunk of its own, as the papers place it.
TEST_F(CliLayout, PredictionHasAPlaceInThePipeline) {
  const std::vector<std::string> model = {"--ranks",
                                          "4",
                                          "--parallel.pp=4",
                                          "--model.num_layers=7",
                                          "--model.mtp_layers=1",
                                          "--parallel.pipeline_schedule=interleaved",
                                          ""};
  const auto with = [&](std::vector<std::string> command, const std::string& layout) {
    command.insert(command.end(), model.begin(), model.end());
    command.back() = "--parallel.pipeline_layout=" + layout;
    return command;
  };
  const std::string layout = "Et|(t|)*6mL";
  EXPECT_THAT(succeed(with({"verify"}, layout)).out, HasSubstr("agrees: worst error"));
  EXPECT_THAT(succeed(with({"verify"}, "Et*2|(t|)*5m|L")).out, HasSubstr("prediction loss"));
  EXPECT_THAT(succeed(with({"inspect", "--layout"}, layout)).out, HasSubstr("[t*1] [t*1] [m*1 L]"));
  EXPECT_THAT(succeed(with({"inspect", "--program"}, layout)).out, HasSubstr("mtp_moe_layer"));
  EXPECT_GT(succeed_json(with({"inspect", "--memory", "--json"}, layout))[3]["total"], 0);
  expect_refused(with({"inspect", "--layout"}, "Et|(t|)*5t|L"),
                 {"has 0 layers of multi-token prediction (m), model.mtp_layers is 1"});
}

TEST_F(CliLayout, FullShardingAgreesWithOneRank) {
  const std::string out = succeed({"verify", "--ranks", "8", "--parallel.pp=2", "--parallel.ep=2",
                                   "--model.num_layers=4", "--train.global_batch=32",
                                   "--optim.shard=full", "--optim.shard_group=2"})
                              .out;
  EXPECT_THAT(out, HasSubstr("agrees: worst error"));
}

/// Of two ranks, two states each, as a run takes them.
TEST_F(CliLayout, MemoryListsCopiesAtNeighbours) {
  std::vector<std::string> arguments = {"inspect", "--memory", "--json",
                                        "--ranks", "2",        "--train.global_batch=16"};
  EXPECT_FALSE(succeed_json(arguments).contains("peer copies"));
  arguments.emplace_back("--checkpoint.peer_copy=true");
  const auto memory = succeed_json(arguments);
  EXPECT_EQ(memory["peer copies"].get<int64_t>(),
            4 * (memory["weights"].get<int64_t>() + memory["optimizer"].get<int64_t>()));
}

TEST_F(CliLayout, FullShardingTakesLessMemory) {
  const auto total = [&](const std::vector<std::string>& shard) {
    std::vector<std::string> arguments = {"inspect",
                                          "--memory",
                                          "--json",
                                          "--ranks",
                                          "8",
                                          "--model.num_layers=24",
                                          "--train.global_batch=64",
                                          "--run.background_save=false"};
    arguments.insert(arguments.end(), shard.begin(), shard.end());
    return succeed_json(arguments)["total"].get<int64_t>();
  };
  const int64_t hybrid = total({"--optim.shard=full", "--optim.shard_group=2"});
  EXPECT_LT(total({"--optim.shard=full"}), hybrid);
  EXPECT_LT(hybrid, total({"--optim.shard=state"}));
  EXPECT_LT(total({"--optim.shard=state"}), total({"--optim.shard=none"}));
}

TEST_F(CliLayout, RefusesShardGroupsThatDoNotFit) {
  const std::vector<std::string> memory = {"inspect", "--memory", "--ranks", "8"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), memory.begin(), memory.end());
    return more;
  };
  expect_refused(with({"--optim.shard=full", "--optim.shard_group=3"}),
                 {"optim.shard_group 3 does not divide the 8", "nearest is 2 or 4"});
  expect_refused(with({"--optim.reduce_group=3"}), {"optim.reduce_group 3", "2 or 4"});
  expect_refused(with({"--optim.shard_state=false"}), {"optim.shard_state", "optim.shard"});
}

TEST_F(CliLayout, VerifyNamesWhatDiffers) {
  // Closer than rounding allows.
  const Finished finished = run_tessera({"verify", "--parallel.tp=2", "--tolerance=1e-12"});
  EXPECT_EQ(finished.code, 1);
  EXPECT_THAT(finished.out, HasSubstr("DIFFERS"));
  EXPECT_THAT(finished.out, HasSubstr("first to differ: the gradient of "));
}

/// Each rank drops among its own tokens: the reference shares them out alike.
TEST_F(CliLayout, VerifyRepeatsDropsOfEachRank) {
  const std::string out = succeed({"verify", "--ranks", "4", "--parallel.tp=2", "--parallel.ep=4",
                                   "--moe.capacity_factor=0.5", "--train.global_batch=16"})
                              .out;
  EXPECT_THAT(out, HasSubstr("agrees: worst error"));
  EXPECT_THAT(out, HasSubstr("the reference is tp 2 x cp 1 alone"));
  EXPECT_THAT(out, HasSubstr("reference of 2 ranks"));
}

TEST_F(CliLayout, VerifyHoldsCompressedGradientsToTheirRounding) {
  const auto json =
      succeed_json({"verify", "--ranks", "4", "--parallel.tp=2", "--parallel.ep=2",
                    "--optim.gradient_compression=bf16", "--train.global_batch=16", "--json"});
  EXPECT_EQ(json["gradient_tolerance"], 0x1.0p-6);
  EXPECT_EQ(json["tolerance"], 1e-4);
  EXPECT_GT(json["worst"], 1e-4);
  EXPECT_THAT(json["notes"].dump(), HasSubstr("within BF16's rounding"));
}

TEST_F(CliLayout, VerifyRunsInF32OnTheHostUnlessAskedForGpus) {
  Arguments command = {"verify",
                       "--full",
                       "--parallel.tp=2",
                       "--train.precision=bf16",
                       "--data.sequence_length=32",
                       "--model.num_layers=1",
                       "--steps=1"};
  const std::string out = succeed(command).out;
  EXPECT_THAT(out, HasSubstr("note: train.precision = \"bf16\" is left aside"));
  EXPECT_THAT(out, HasSubstr("agrees: worst error"));
  const auto machine = succeed_json({"doctor", "--json"});
  if (!machine["cuda"]["gpus"].empty()) return;
  command.push_back("--run.device=cuda");
  expect_refused(command, {"run.device = \"cuda\"", "run.device = \"cpu\""});
}

/// Sizes that a shrunk model would not have.
TEST_F(CliLayout, VerifyRefusesWhatTrainingRefuses) {
  const Arguments options = {"--ranks", "2", "--parallel.tp=2", "--moe.shared_inner_size=33"};
  for (Arguments command : {Arguments{"verify"}, {"train", "--data.text=" + path("text.txt")}}) {
    command.insert(command.end(), options.begin(), options.end());
    expect_refused(command, {"33"});
  }
  expect_refused({"verify", "--ranks", "2", "--train.global_batch=7"}, {"train.global_batch 7"});
}

}  // namespace
}  // namespace tessera

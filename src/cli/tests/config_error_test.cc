#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using CliConfigError = CliTest;

struct Mistake {
  Arguments options;
  std::vector<std::string> parts;  // of the message
};

TEST_F(CliConfigError, KeysAndTypes) {
  const std::vector<Mistake> mistakes = {
      {{"--model.hidden_sise=3"}, {"'model.hidden_sise'", "did you mean 'model.hidden_size'"}},
      {{"--modle.hidden_size=3"}, {"modle", "model.hidden_size"}},
      {{"--model.hidden_size=wide"}, {"--model.hidden_size", "an integer", "\"wide\""}},
      {{"--model.hidden_size=1.5"}, {"--model.hidden_size", "an integer", "1.5"}},
      {{"--model.hidden_size", "2"},
       {"'--model.hidden_size' is no option of tessera train", "--section.key=value"}},
      {{"--run.report=1"}, {"--run.report", "true or false", "1"}},
      {{"--moe.experts=sparse"}, {"--moe.experts", "block_sparse", "sparse"}},
      {{"--model.preset=tinny"}, {"--model.preset", "tiny"}},
      {{"--data.tokenizer=bite"}, {"bite", "byte"}},
      {{"--train.recompute=nothing_of_this_name"}, {"nothing_of_this_name"}},
  };
  for (const Mistake& mistake : mistakes)
    expect_refused(train("run", mistake.options), mistake.parts);
}

TEST_F(CliConfigError, ObjectivesOfOtherCommands) {
  expect_refused({"dpo", "--train.objective=grpo"},
                 {"train.objective is \"grpo\"", "`tessera rl`"});
  expect_refused({"rl", "--train.objective=dpo"}, {"train.objective is \"dpo\"", "`tessera dpo`"});
}

TEST_F(CliConfigError, NumbersOutOfRange) {
  for (const std::string key :
       {"model.hidden_size", "model.num_layers", "moe.top_k", "moe.inner_size", "train.steps",
        "train.micro_batch", "train.global_batch", "data.sequence_length", "run.log_interval"}) {
    expect_refused(train("run", {"--" + key + "=0"}), {"--" + key, "from 1 to", "0"});
    expect_refused(train("run", {"--" + key + "=-4"}), {"--" + key, "from 1 to", "-4"});
  }
  expect_refused(train("run", {"--run.keep_last=-1"}), {"--run.keep_last", "from 0 to", "-1"});
  for (const std::string key :
       {"run.seed", "moe.capacity_factor", "train.max_grad_norm", "moe.balance_coefficient"}) {
    expect_refused(train("run", {"--" + key + "=-1"}), {"--" + key, "at least 0", "-1"});
  }
  expect_refused(train("run", {"--optim.learning_rate=0"}), {"learning_rate", "above 0"});
  expect_refused(train("run", {"--optim.beta1=1"}), {"beta1", "below 1"});
  expect_refused(train("run", {"--data.validation_fraction=1"}),
                 {"validation_fraction", "below 1"});
  expect_refused(train("run", {"--model.hidden_size=99999999999999999999"}), {"hidden_size"});
}

TEST_F(CliConfigError, ImpossibleCombinations) {
  const std::vector<Mistake> mistakes = {
      {{"--moe.top_k=5"}, {"moe.top_k 5", "moe.num_experts 4"}},
      {{"--model.num_heads=3"}, {"model.hidden_size 16", "model.num_heads 3"}},
      {{"--model.num_heads=16"}, {"1 elements of a head are rotated"}},
      {{"--model.num_kv_heads=3"}, {"model.num_heads 2", "model.num_kv_heads 3"}},
      {{"--moe.capacity_factor=0.01"}, {"moe.capacity_factor 0.01", "at least 0.0625"}},
      {{"--moe.capacity_factor=0.01", "--moe.capacity_group_size=4"},
       {"leaves 4 experts", "at least 0.0156"}},
      {{"--moe.pad_to_capacity=true"}, {"moe.pad_to_capacity", "moe.capacity_factor"}},
      {{"--moe.experts=block_sparse", "--moe.block_size=32"},
       {"16", "moe.block_size 32", "the nearest is 32"}},
      {{"--moe.experts=block_sparse", "--moe.block_size=12"}, {"moe.block_size 12", "8, 16"}},
      {{"--train.micro_batch=4", "--train.global_batch=6"},
       {"train.global_batch 6", "nearest is 8"}},
      {{"--moe.balance_group_size=3"}, {"moe.balance_group_size 3", "moe.num_experts 4", "2 or 4"}},
      {{"--moe.capacity_group_size=2"}, {"moe.capacity_group_size 2", "moe.capacity_factor"}},
      {{"--moe.latent_size=16"}, {"moe.latent_size 16", "model.hidden_size 16", "at most 15"}},
      {{"--moe.shared_gate=true"}, {"moe.shared_gate", "moe.shared_inner_size"}},
      {{"--moe.inner_sizes=8,8"}, {"moe.inner_sizes", "2 sizes for 4 experts"}},
      {{"--moe.num_groups=3"}, {"moe.num_experts 4", "moe.num_groups 3"}},
      {{"--moe.num_groups=2", "--moe.top_groups=3"}, {"moe.top_groups 3", "moe.num_groups 2"}},
      {{"--moe.score=sigmoid", "--moe.score_order=after_top_k"}, {"moe.score_order", "softmax"}},
      {{"--model.vocab_size=100"}, {"model.vocab_size 100", "257"}},
      {{"--optim.warmup_steps=11"}, {"warmup", "11", "10"}},
      {{"--run.folder="}, {"run.folder"}},
      {{"--data.tokens=" + path("tokens")}, {"data.text", "data.tokens", "keep one"}},
      {{"--data.text="}, {"data.text", "data.tokens"}},
  };
  for (const Mistake& mistake : mistakes) {
    SCOPED_TRACE(::testing::PrintToString(mistake.options));
    expect_refused(train("run", mistake.options), mistake.parts);
  }
}

TEST_F(CliConfigError, Files) {
  const auto refuse = [this](const std::string& text, const std::vector<std::string>& parts) {
    write_all(path("run.toml"), text);
    Arguments arguments = train("run");
    arguments.insert(arguments.begin() + 1, path("run.toml"));
    expect_refused(arguments, parts);
  };
  const std::string file = path("run.toml");
  refuse("[model]\nhiden_size = 3\n", {file + ":2", "hiden_size", "model.hidden_size"});
  refuse("[modell]\nx = 3\n", {file, "modell"});
  refuse("[modell]\n", {file + ":1", "unknown section [modell]", "model"});
  refuse("[model]\n\nnum_layers = \"two\"\n",
         {file + ":3", "model.num_layers", "an integer", "two"});
  refuse("[model]\nnum_layers = \n", {file + ":2"});
  refuse("[model]\nnum_layers = 1\nnum_layers = 2\n", {file, "num_layers"});
  refuse(std::string("\x7F"
                     "ELF\0\1\2",
                     7),
         {file});
}

TEST_F(CliConfigError, RunFolderThatCannotBeWritten) {
  expect_refused(train("text.txt/run"), {path("text.txt")});
  expect_refused_after_tokens(train("run", {"--run.resume=required"}),
                              {"run.resume", path("run/checkpoints")});
}

}  // namespace
}  // namespace tessera

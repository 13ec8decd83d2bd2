#include <limits>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using CliSizeError = CliTest;

/// Options of the command line that are sizes: what cannot be is refused before anything is done.
TEST_F(CliSizeError, OptionsOfEveryCommand) {
  succeed(train("run"));
  const std::string run = path("run");
  const std::string text = path("text.txt");
  const std::vector<Arguments> commands = {
      {"eval", run, "--sequence-length"},
      {"eval", run, "--batch-size"},
      {"eval", run, "--max-batches"},
      {"generate", run, "--prompt=a", "--temperature=0", "--max-tokens"},
      {"generate", run, "--prompt=a", "--max-tokens=1", "--top-k"},
      {"tokenize", text, "--tokenizer=byte", "--overwrite", "--output=" + path("t"), "--threads"},
      {"tokenize", text, "--train=" + path("tokenizer.json"), "--vocab-size"},
      {"tokenize", text, "--train=" + path("tokenizer.json"), "--vocab-size=300",
       "--min-frequency"},
      {"convert", path("hf"), path("own"), "--vocab-size"},
      {"convert", path("hf"), path("own"), "--pad-vocab-to"},
      {"convert", path("hf"), path("own"), "--shard-size"},
      {"inspect", "--layout", "--ranks"},
      {"inspect", "--memory", "--ranks"},
  };
  succeed({"convert", run, path("hf")});
  for (const Arguments& command : commands) {
    for (const int64_t value : {int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 62,
                                std::numeric_limits<int64_t>::max()}) {
      Arguments arguments = command;
      arguments.back() += "=" + std::to_string(value);
      SCOPED_TRACE(::testing::PrintToString(arguments));
      const Finished finished = run_tessera(arguments);
      EXPECT_TRUE(finished.code == 0 || finished.code == 2) << finished.code << finished.err;
      EXPECT_THAT(finished.err, ::testing::Not(::testing::HasSubstr("internal error")));
      std::filesystem::remove_all(path("own"));
    }
  }
}

TEST_F(CliSizeError, RunsThatCannotBe) {
  expect_refused(train("run", {"--model.num_layers=1000000000"}),
                 {"--model.num_layers", "from 1 to 16384", "1000000000"});
  expect_refused(train("run", {"--model.hidden_size=4000000000"}),
                 {"--model.hidden_size", "from 1 to 1048576", "4000000000"});
  const Arguments huge = {"--model.hidden_size=65536", "--model.num_layers=1024",
                          "--model.num_heads=512", "--moe.inner_size=65536"};
  expect_refused(train("run", huge), {"out of memory", "this machine has"});
  Arguments bench = {"bench", "--model.vocab_size=320"};
  bench.insert(bench.end(), huge.begin(), huge.end());
  expect_refused(bench, {"out of memory", "this machine has"});
  Arguments verify = {"verify", "--full", "--model.vocab_size=320"};
  verify.insert(verify.end(), huge.begin(), huge.end());
  expect_refused(verify, {"out of memory", "this machine has"});
  expect_refused(train("run", {"--ranks=100000", "--train.global_batch=200000"}),
                 {"100000 ranks on this machine", "this machine has"});
  expect_refused({"verify", "--steps=1099511627776"},
                 {"--steps must be from 1 to 1048576, found 1099511627776"});
  expect_refused({"bench", "--steps=9223372036854775807"},
                 {"--steps must be from 1 to 1048576, found 9223372036854775807"});
  expect_refused({"bench", "--layer=moe", "--warmup=9223372036854775807"}, {"--warmup"});
}

TEST_F(CliSizeError, UpcyclingIntoMoreExpertsThanThereCanBe) {
  succeed(train("dense", {"--moe.num_experts=0"}));
  const std::string most = std::to_string(std::numeric_limits<int64_t>::max());
  for (const Arguments& options :
       {Arguments{"--experts", most}, Arguments{"--granularity", most},
        Arguments{"--experts=4611686018427387904", "--granularity=4"}, Arguments{"--top-k", most},
        Arguments{"--every", most}, Arguments{"--first-dense-layers", most}}) {
    Arguments arguments = {"upcycle", path("dense"), path("experts")};
    arguments.insert(arguments.end(), options.begin(), options.end());
    expect_refused(arguments, {"must be from "});
  }
}

}  // namespace
}  // namespace tessera

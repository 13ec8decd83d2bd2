#include "train/setup/size_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/testing/case_share.h"
#include "train/memory/planned_rank.h"
#include "train/setup/training_data.h"
#include "train/state/load_settings.h"
#include "train/trainer/trainer.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A model that plans in no time, in which one key can be anything.
const std::vector<std::string> kSmall = {"--model.hidden_size=16",      "--model.num_heads=2",
                                         "--model.num_layers=2",        "--moe.num_experts=4",
                                         "--moe.inner_size=16",         "--data.sequence_length=16",
                                         "--train.micro_batch=2",       "--train.global_batch=2",
                                         "--model.vocab_size=320",      "--run.device=cpu",
                                         "--data.tokens=tokens",        "--train.steps=10",
                                         "--train.validation_batches=1"};

/// Everything that is done with sizes before data is opened: "" or the message of a refusal. What
/// is neither ends the test.
std::string refusal(const std::vector<std::string>& changes, int64_t num_ranks = 0,
                    FitCheck fit = FitCheck::kMachine) {
  try {
    Settings settings;
    ConfigSchema schema = make_schema(settings);
    std::vector<std::string> all = kSmall;
    all.insert(all.end(), changes.begin(), changes.end());
    load_settings(schema, settings, "", all);
    settings.model.vocab_size = resolve_vocab_size(settings.model.vocab_size,
                                                   *make_tokenizer(settings.data.tokenizer_spec()));
    validate(settings);
    const int64_t ranks = num_ranks > 0 ? num_ranks : least_ranks(settings.parallel.layout);
    check_sized_model(settings, ranks, fit);
    const PlannedRank planned = plan_rank(settings, 0, ranks);
    ModelState::count_bytes(settings, planned.layout, planned.backend);
    return "";
  } catch (const UserError& error) {
    return error.what();
  }
}

/// The keys whose values are integers, or lists of them.
std::vector<std::string> integer_keys() {
  Settings settings;
  const ConfigSchema schema = make_schema(settings);
  std::vector<std::string> keys;
  for (const ResolvedValue& value : schema.resolved()) {
    const bool lists_texts = value.key.starts_with("data.") || value.key == "train.recompute" ||
                             value.key == "train.offload" || value.key == "precision.plain";
    if (value.value == "[]" && lists_texts) continue;
    const bool number =
        std::ranges::all_of(value.value, [](char c) { return c == '-' || (c >= '0' && c <= '9'); });
    if (number || value.value == "[]") keys.push_back(value.key);
  }
  return keys;
}

TEST(SizeCheck, NoValueOfAnyKeyDoesHarm) {
  constexpr int64_t kOne = 1;
  const std::vector<int64_t> values = {
      0, -1, 1, kOne << 31, kOne << 40, kOne << 62, std::numeric_limits<int64_t>::max()};
  const std::vector<std::string> keys = integer_keys();
  EXPECT_GT(keys.size(), 45);
  for (const std::string& key : testing::share_of_cases(keys, 0)) {
    for (const int64_t value : values) {
      SCOPED_TRACE(fmt::format("{} = {}", key, value));
      const std::string text = refusal({fmt::format("--{}={}", key, value)});
      EXPECT_THAT(text, ::testing::Not(HasSubstr("internal")));
    }
  }
}

/// The upper end of a key's range, as the message about a larger one gives it; nothing where any
/// integer will do.
std::optional<int64_t> largest(const std::string& key) {
  const std::string text = refusal({fmt::format("--{}={}", key, int64_t{1} << 62)});
  const std::string from = fmt::format("--{} must be from ", key);
  if (!text.starts_with(from)) return std::nullopt;
  const size_t number = text.find(" to ", from.size()) + 4;
  return std::stoll(text.substr(number));
}

TEST(SizeCheck, TheLargestValueOfEveryKeyIsPlannedOrRefused) {
  int64_t num_bounded = 0;
  const std::vector<std::string> keys = testing::share_of_cases(integer_keys(), 0);
  for (const std::string& key : keys) {
    SCOPED_TRACE(key);
    const auto most = largest(key);
    if (!most) continue;
    ++num_bounded;
    EXPECT_THAT(refusal({fmt::format("--{}={}", key, *most)}),
                ::testing::Not(HasSubstr("must be from")));
  }
  EXPECT_EQ(num_bounded, std::ssize(keys) - std::ranges::count(keys, "run.seed"));
}

TEST(SizeCheck, EverySizeHasAnUpperBoundThatHelpLists) {
  Settings settings;
  const std::string help = make_schema(settings).help_text();
  for (const char* key : {"model.hidden_size", "model.num_layers", "moe.num_experts",
                          "data.sequence_length", "train.global_batch", "train.steps"}) {
    const size_t at = help.find(key);
    ASSERT_NE(at, std::string::npos) << key;
    EXPECT_THAT(help.substr(at, 400), HasSubstr("from ")) << key;
  }
  EXPECT_THAT(help, HasSubstr("from 1 to 1048576"));
}

TEST(SizeCheck, ModelsThatCannotBeAreRefusedWithTheirSizes) {
  EXPECT_THAT(refusal({"--model.hidden_size=1048576", "--model.num_layers=16384",
                       "--moe.num_experts=65536", "--moe.inner_size=1048576"}),
              AllOf(HasSubstr("parameters"), HasSubstr("16384 layers"),
                    HasSubstr("hidden size 1048576"), HasSubstr("65536 experts")));
  EXPECT_THAT(
      refusal({"--data.sequence_length=16777216", "--train.micro_batch=1048576",
               "--train.global_batch=1048576"}),
      AllOf(HasSubstr("1048576 sequences of 16777216 tokens"), HasSubstr("tokens; at most")));
  EXPECT_THAT(refusal({"--data.sequence_length=1048576", "--train.micro_batch=1024",
                       "--train.global_batch=1024", "--moe.top_k=4"}),
              HasSubstr("sent to 4 experts"));
  EXPECT_THAT(refusal({"--data.sequence_length=16777216", "--train.micro_batch=32",
                       "--train.global_batch=32", "--model.num_layers=16384",
                       "--model.hidden_size=4096", "--moe.top_k=1"}),
              AllOf(HasSubstr("values, which no machine holds"), HasSubstr("hidden size 4096")));
  EXPECT_THAT(refusal({"--train.micro_batch=1", "--train.global_batch=1048576",
                       "--model.num_layers=64", "--parallel.pp=64"}),
              AllOf(HasSubstr("1048576 micro-batches"), HasSubstr("64 stages")));
}

TEST(SizeCheck, WhatNeedsFarMoreThanTheMachineIsRefusedWhereItWouldRun) {
  const std::vector<std::string> huge = {"--model.hidden_size=65536", "--model.num_layers=1024",
                                         "--model.num_heads=512", "--moe.inner_size=65536"};
  EXPECT_THAT(refusal(huge), AllOf(HasSubstr("out of memory: training would take"),
                                   HasSubstr("iB at the peak"), HasSubstr("this machine has")));
  EXPECT_EQ(refusal(huge, 0, FitCheck::kNone), "");
}

TEST(SizeCheck, RealModelsOfManyRanksArePlannedAnywhere) {
  EXPECT_EQ(refusal({"--model.hidden_size=7168", "--model.num_layers=61", "--model.num_heads=128",
                     "--model.head_size=128", "--model.vocab_size=129280", "--moe.num_experts=256",
                     "--moe.top_k=8", "--moe.inner_size=2048", "--data.sequence_length=4096",
                     "--train.micro_batch=1", "--train.global_batch=15360", "--parallel.pp=16",
                     "--parallel.ep=64", "--train.precision=bf16"},
                    2048, FitCheck::kNone),
            "");
}

TEST(SizeCheck, MemoryIsAskedForInTheMachinesTerms) {
  require_host_memory(200, 100, "a test");
  EXPECT_THAT(
      [] { require_host_memory(int64_t{3} << 40, int64_t{1} << 40, "a test"); },
      ::testing::ThrowsMessage<UserError>(HasSubstr(
          "out of memory: a test would take 3 TiB at the peak, and this machine has 1 TiB")));
  EXPECT_THROW(check_bench_runs(0, 0), UserError);
  EXPECT_THROW(check_bench_runs(1, std::numeric_limits<int64_t>::max()), UserError);
}

}  // namespace
}  // namespace tessera

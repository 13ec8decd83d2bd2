#include <regex>

#include "cli/tests/cli_testing.h"
#include "core/testing/case_share.h"
#include "train/setup/settings.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// What no numeric option and no numeric key may take, nor read as another number.
std::vector<std::string> no_numbers(bool is_integer) {
  std::vector<std::string> texts = {"",      " ",   "nan", "inf",  "-inf", "1e400", "5x",
                                    "5 # x", "5 6", "0x",  "1__0", "1e",   "--5",   "five"};
  if (is_integer)
    texts.insert(texts.end(), {"1.5", "18446744073709551616", "-9223372036854775809"});
  return texts;
}

using CliNumberError = CliTest;

struct NumericOption {
  std::string name;
  bool is_integer;
};

/// The options of a subcommand that take a number, from its help.
std::vector<NumericOption> numeric_options(const std::string& command) {
  const std::string help = run_tessera({command, "--help"}).out;
  const std::regex option("^  (?:-[a-z],)?(--[a-z-]+) (INT|UINT|FLOAT|SIZE)");
  std::vector<NumericOption> options;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    std::smatch found;
    if (std::regex_search(line, found, option)) options.push_back({found[1], found[2] != "FLOAT"});
  }
  return options;
}

/// The arguments that a subcommand cannot do without.
Arguments with_positionals(const std::string& command) {
  if (command == "eval" || command == "generate" || command == "tokenize") return {command, "none"};
  if (command == "convert" || command == "upcycle") return {command, "none", "nowhere"};
  return {command};
}

TEST_F(CliNumberError, EveryNumericOptionOfEverySubcommand) {
  size_t num_options = 0;
  for (const char* command : {"train", "verify", "eval", "generate", "tokenize", "convert",
                              "upcycle", "inspect", "bench"}) {
    for (const auto& [option, is_integer] : numeric_options(command)) {
      ++num_options;
      std::vector<std::string> values = no_numbers(is_integer);
      values.emplace_back("-1");
      for (const std::string& value : testing::share_of_cases(values, num_options)) {
        SCOPED_TRACE(fmt::format("{} {} '{}'", command, option, value));
        Arguments arguments = with_positionals(command);
        arguments.insert(arguments.end(), {option, value});
        const Finished finished = run_tessera(arguments);
        expect_error(finished, {option + " must be ", ", found ", value});
        EXPECT_LT(finished.err.size(), 200);
      }
    }
  }
  EXPECT_GE(num_options, 29);
}

TEST_F(CliNumberError, OptionsOutOfTheirRange) {
  const auto refuse = [this](const std::string& command, const std::string& option,
                             const std::string& value, const std::string& expected) {
    Arguments arguments = with_positionals(command);
    arguments.insert(arguments.end(), {option, value});
    expect_refused(arguments, {fmt::format("{} must be {}, found {}", option, expected, value)});
  };
  refuse("generate", "--max-tokens", "2147483648", "from 0 to 2147483647");
  refuse("generate", "--top-p", "0", "above 0 and at most 1");
  refuse("eval", "--batch-size", "0", "from 1 to 1048576");
  refuse("train", "--ranks", "9223372036854775807", "from 0 to 1048576");
  refuse("verify", "--tolerance", "0", "above 0");
  refuse("upcycle", "--seed", "9223372036854775808", "at least 0 and at most 9223372036854775807");
  refuse("tokenize", "--threads", "4097", "from 0 to 4096");
  expect_refused({"convert", "none", "nowhere", "--shard-size", "9000PB"},
                 {"--shard-size", "9000PB"});
  expect_refused({"convert", "none", "nowhere", "--shard-size", "0GB"}, {"--shard-size", "0GB"});
}

TEST_F(CliNumberError, NumbersMayBeWrittenAsInAConfiguration) {
  for (const char* size : {"5GB", "500 MiB", "1000", "1kb"})
    expect_error(run_tessera({"convert", "none", "nowhere", "--shard-size", size}), {"none"});
  for (const char* count : {"2", "+2", "0x2", "0b10"}) {
    const Finished two = run_tessera(
        {"inspect", "--layout", "--model.preset=tiny", "--train.micro_batch=1", "--ranks", count});
    EXPECT_EQ(two.code, 0) << two.err;
    EXPECT_THAT(two.out, ::testing::StartsWith("2 ranks; ")) << count;
  }
}

bool takes_numbers(const ResolvedValue& value) {
  const char first = value.value.front();
  return std::isdigit(static_cast<unsigned char>(first)) != 0 || first == '-';
}

TEST_F(CliNumberError, EveryNumericKeyOfTheConfiguration) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  const auto before = schema.resolved();
  int num_keys = 0;
  for (const ResolvedValue& value : before) {
    if (!takes_numbers(value)) continue;
    ++num_keys;
    const bool is_integer = value.value.find_first_of(".e") == std::string::npos;
    for (const std::string& text : no_numbers(is_integer)) {
      SCOPED_TRACE(fmt::format("--{}='{}'", value.key, text));
      try {
        schema.override_value(value.key, text);
        ADD_FAILURE() << "taken";
      } catch (const UserError& error) {
        EXPECT_THAT(error.what(), HasSubstr(fmt::format("--{} must be ", value.key)));
        EXPECT_THAT(error.what(), HasSubstr(", found "));
        EXPECT_THAT(error.what(), HasSubstr(text));
      }
    }
  }
  EXPECT_GT(num_keys, 40);
  EXPECT_EQ(schema.resolved(), before);
}

}  // namespace
}  // namespace tessera

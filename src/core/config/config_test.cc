#include "core/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/file/file.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

enum class Kind { kDense, kMoe };

struct Options {
  int64_t hidden_size = 256;
  double dropout = 0.25;
  bool tied = true;
  Kind kind = Kind::kDense;
  std::string preset = "small";
  std::string data;
  std::vector<int64_t> sizes = {1, 2};
  std::vector<std::string> files;
  std::optional<int64_t> limit;
  std::optional<double> scale = 0.5;
  std::optional<std::string> separator;
  std::optional<bool> flag;
  int64_t seed = 0;
};

struct TestConfig {
  Options options;
  ConfigSchema schema;

  TestConfig() {
    schema.add("model.hidden_size", &options.hidden_size, "Width", between(1, 4096));
    schema.add("model.tied", &options.tied, "Tied embeddings");
    schema.add("data.path", &options.data, "Text");
    schema.add("data.sizes", &options.sizes, "Sizes", at_least(1));
    schema.add("data.files", &options.files, "Files");
    schema.add_enum("model.kind", &options.kind, {{"dense", Kind::kDense}, {"moe", Kind::kMoe}},
                    "Layers");
    schema.add("model.attention.dropout", &options.dropout, "Dropout", from_below(0, 1));
    schema.add_choice("model.preset", &options.preset, {"", "small", "large"}, "Preset");
    schema.add("train.limit", &options.limit, "Limit", at_least(0));
    schema.add("train.scale", &options.scale, "Scale", above(0));
    schema.add("train.separator", &options.separator, "Separator");
    schema.add("train.flag", &options.flag, "Flag");
    schema.add("seed", &options.seed, "Seed");
  }
};

class ConfigTest : public ::testing::Test, public TestConfig {
 protected:
  std::string load_error(const std::string& text) {
    try {
      schema.load_toml_text(text, "run.toml");
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  }

  std::string override_error(const std::string& argument) {
    try {
      schema.override_argument(argument);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(ConfigTest, ReadsEveryType) {
  schema.load_toml_text(R"(
seed = 0x10
[model]
hidden_size = 1_024
tied = false
kind = "moe"
attention.dropout = 0
[data]
path = 'a\b'
sizes = [3, 4,
  5]
files = ["x", "y z"]
[train]
limit = 7
scale = 1e-3
separator = ""
flag = true
)",
                        "run.toml");
  EXPECT_EQ(options.seed, 16);
  EXPECT_EQ(options.hidden_size, 1024);
  EXPECT_FALSE(options.tied);
  EXPECT_EQ(options.kind, Kind::kMoe);
  EXPECT_EQ(options.dropout, 0.0);
  EXPECT_EQ(options.data, "a\\b");
  EXPECT_THAT(options.sizes, ElementsAre(3, 4, 5));
  EXPECT_THAT(options.files, ElementsAre("x", "y z"));
  EXPECT_EQ(options.limit, 7);
  EXPECT_EQ(options.scale, 1e-3);
  EXPECT_EQ(options.separator, "");
  EXPECT_EQ(options.flag, true);
  EXPECT_EQ(schema.origin("model.attention.dropout"), "run.toml:7");
  EXPECT_EQ(schema.origin("seed"), "run.toml:2");
}

TEST_F(ConfigTest, NoneUnsetsAnOptional) {
  schema.load_toml_text("train.scale = \"none\"\ntrain.limit = 3", "run.toml");
  EXPECT_FALSE(options.scale.has_value());
  schema.override_argument("--train.limit=none");
  EXPECT_FALSE(options.limit.has_value());
}

TEST_F(ConfigTest, OverridesTakeTextAsTyped) {
  schema.override_argument("--model.hidden_size=1_000");
  schema.override_argument("--model.attention.dropout=0.125");
  schema.override_argument("--model.tied=false");
  schema.override_argument("--model.kind=moe");
  schema.override_argument("--data.path=12 = # \"x\"");
  schema.override_argument("--data.sizes=4, 5");
  schema.override_argument("--data.files=[\"a,b\", \"c\"]");
  EXPECT_EQ(options.hidden_size, 1000);
  EXPECT_EQ(options.dropout, 0.125);
  EXPECT_FALSE(options.tied);
  EXPECT_EQ(options.kind, Kind::kMoe);
  EXPECT_EQ(options.data, "12 = # \"x\"");
  EXPECT_THAT(options.sizes, ElementsAre(4, 5));
  EXPECT_THAT(options.files, ElementsAre("a,b", "c"));
  schema.override_argument("--data.files=12,b c");
  EXPECT_THAT(options.files, ElementsAre("12", "b c"));
  schema.override_argument("--data.files=");
  EXPECT_THAT(options.files, IsEmpty());
  EXPECT_EQ(schema.origin("data.files"), "--data.files");
  schema.override_value("seed", "5", "environment");
  EXPECT_EQ(schema.origin("seed"), "environment");
}

TEST_F(ConfigTest, PrecedenceDoesNotDependOnOrder) {
  EXPECT_FALSE(schema.is_set("model.hidden_size"));
  schema.override_argument("--model.hidden_size=3");
  schema.load_toml_text("model.hidden_size = 2\nseed = 2", "run.toml");
  schema.load_preset("large", "seed = 1\nmodel.hidden_size = 1\nmodel.tied = false");
  EXPECT_EQ(options.hidden_size, 3);
  EXPECT_EQ(options.seed, 2);
  EXPECT_FALSE(options.tied);
  EXPECT_EQ(schema.origin("model.hidden_size"), "--model.hidden_size");
  EXPECT_EQ(schema.origin("seed"), "run.toml:2");
  EXPECT_EQ(schema.origin("model.tied"), "preset large");
  EXPECT_EQ(schema.origin("data.path"), "default");
  EXPECT_TRUE(schema.is_set("model.tied"));
  schema.load_toml_text("seed = 9", "later.toml");
  EXPECT_EQ(options.seed, 9);
}

TEST_F(ConfigTest, RefusesUnknownKeysAndSections) {
  EXPECT_EQ(load_error("[model]\n\nhiden_size = 1"),
            "run.toml:3: unknown key 'model.hiden_size'; did you mean 'model.hidden_size'?");
  EXPECT_EQ(load_error("[train]\nhidden_size = 1"),
            "run.toml:2: unknown key 'train.hidden_size'; did you mean 'model.hidden_size'?");
  EXPECT_EQ(load_error("[modle]\n"), "run.toml:1: unknown section [modle]; did you mean 'model'?");
  EXPECT_THAT(load_error("model = 3"), HasSubstr("run.toml:1: model is a section"));
  EXPECT_EQ(load_error("[model.hidden_size]\na = 1"),
            "run.toml:1: model.hidden_size must be an integer, found a section");
  EXPECT_THAT(load_error("\"model.hidden_size\" = 1"), HasSubstr("quoted"));
  EXPECT_EQ(override_error("--model.hiddensize=1"),
            "command line: unknown key 'model.hiddensize'; did you mean 'model.hidden_size'?");
  EXPECT_THAT(override_error("--zzzzzzzzzzzzzz=1"), HasSubstr("unknown key 'zzzzzzzzzzzzzz'"));
  EXPECT_THAT(override_error("--model.hidden_size"), HasSubstr("write --section.key=value"));
  EXPECT_THAT(override_error("model.hidden_size=1"), HasSubstr("write --section.key=value"));
}

TEST_F(ConfigTest, RefusesWrongTypes) {
  EXPECT_EQ(load_error("model.hidden_size = \"512\""),
            "run.toml:1: model.hidden_size must be an integer, found the string \"512\"");
  EXPECT_EQ(load_error("model.hidden_size = 1.0"),
            "run.toml:1: model.hidden_size must be an integer, found the number 1.0");
  EXPECT_EQ(load_error("model.tied = 1"),
            "run.toml:1: model.tied must be true or false, found the integer 1");
  EXPECT_EQ(load_error("data.path = 12"),
            "run.toml:1: data.path must be a string, found the integer 12");
  EXPECT_EQ(load_error("data.sizes = 12"),
            "run.toml:1: data.sizes must be a list of integers, found the integer 12");
  EXPECT_EQ(load_error("data.sizes = [1, true]"),
            "run.toml:1: data.sizes must be a list of integers, found true in the list");
  EXPECT_EQ(load_error("model.attention.dropout = true"),
            "run.toml:1: model.attention.dropout must be a number, found true");
  EXPECT_EQ(load_error("train.limit = \"nine\""),
            "run.toml:1: train.limit must be an integer or \"none\", found the string \"nine\"");
  EXPECT_EQ(load_error("seed = [1]"), "run.toml:1: seed must be an integer, found a list");
  EXPECT_THAT(load_error("seed = 1979-05-27"), HasSubstr("holds a date or time"));
  EXPECT_THAT(load_error("data.sizes = [[1]]"), HasSubstr("holds a list"));
  EXPECT_THAT(load_error("data.sizes = [{a = 1}]"), HasSubstr("holds a table"));
  EXPECT_EQ(override_error("--model.hidden_size=abc"),
            "--model.hidden_size must be an integer, found the string \"abc\"");
  EXPECT_EQ(override_error("--model.hidden_size="),
            "--model.hidden_size must be an integer, found the string \"\"");
  EXPECT_EQ(override_error("--model.hidden_size=1\nseed=2"),
            "--model.hidden_size must be an integer, found the string \"1\\u000Aseed=2\"");
  EXPECT_THAT(override_error("--data.sizes=1,x"), HasSubstr("found the string \"x\" in the list"));
  EXPECT_EQ(options.hidden_size, 256);
  EXPECT_THAT(options.sizes, ElementsAre(1, 2));
}

TEST_F(ConfigTest, RefusesNumbersOutOfRange) {
  EXPECT_EQ(load_error("model.hidden_size = 0"),
            "run.toml:1: model.hidden_size must be from 1 to 4096, found 0");
  EXPECT_EQ(load_error("model.attention.dropout = 1"),
            "run.toml:1: model.attention.dropout must be at least 0 and below 1, found 1");
  EXPECT_EQ(load_error("train.scale = 0.0"), "run.toml:1: train.scale must be above 0, found 0.0");
  EXPECT_EQ(load_error("train.scale = nan"),
            "run.toml:1: train.scale must be a finite number above 0, found nan");
  EXPECT_EQ(load_error("train.scale = inf"),
            "run.toml:1: train.scale must be a finite number above 0, found inf");
  EXPECT_EQ(load_error("data.sizes = [1, 0]"),
            "run.toml:1: data.sizes must be at least 1, found 0");
  EXPECT_EQ(override_error("--train.limit=-1"), "--train.limit must be at least 0, found -1");
  EXPECT_THAT(load_error("seed = 99999999999999999999"), HasSubstr("run.toml:1: "));
  EXPECT_EQ(options.hidden_size, 256);
  EXPECT_EQ(options.scale, 0.5);
}

TEST_F(ConfigTest, RefusesNumbersThatTheirTypeCannotHold) {
  EXPECT_EQ(override_error("--model.hidden_size=18446744073709551616"),
            "--model.hidden_size must be from 1 to 4096, found 18446744073709551616");
  EXPECT_EQ(override_error("--data.sizes=[1, 18446744073709551616]"),
            "--data.sizes must be at least 1 and at most 9223372036854775807, found "
            "18446744073709551616");
  EXPECT_THAT(override_error("--train.scale=1e400"),
              HasSubstr("must be a number above 0, found 1e400"));
  EXPECT_THAT(override_error("--train.scale=1e-400"), HasSubstr("nearer to 0"));
  EXPECT_THAT(override_error("--model.hidden_size=5 # x"), HasSubstr("found the string \"5 # x\""));
  EXPECT_THAT(override_error("--data.sizes=[5 # x]"),
              HasSubstr("found the string \"5 # x\" in the list"));
  schema.override_argument("--train.scale=18446744073709551616");
  EXPECT_EQ(options.scale, 18446744073709551616.0);
}

/// A text in quotes is never cut at its commas.
TEST_F(ConfigTest, RefusesListsWhoseQuotesAreNotToml) {
  EXPECT_THAT(override_error("--data.files=[\"a,b\", \"c]"), HasSubstr("--data.files is no list"));
  EXPECT_THAT(override_error("--data.files=[\"\\ud83d\\ude00\"]"), HasSubstr("no list as TOML"));
  schema.override_argument("--data.files=[\"a,b\", \"\U0001f642\"]");
  EXPECT_THAT(options.files, ElementsAre("a,b", "\U0001f642"));
  schema.override_argument("--data.files=a,[b]");
  EXPECT_THAT(options.files, ElementsAre("a", "[b]"));
}

TEST_F(ConfigTest, RefusesUnknownNames) {
  EXPECT_EQ(load_error("model.kind = \"mo\""),
            "run.toml:1: model.kind must be one of dense, moe, found the string \"mo\"; did you "
            "mean 'moe'?");
  EXPECT_THAT(override_error("--model.preset=lrge"), HasSubstr("did you mean 'large'?"));
  EXPECT_THAT(override_error("--model.preset=zzz"), HasSubstr("must be one of \"\", "));
  EXPECT_THAT(load_error("model.kind = 3"), HasSubstr("one of dense, moe, found the integer 3"));
}

TEST_F(ConfigTest, RefusesBrokenText) {
  EXPECT_THAT(load_error("seed = 1\nseed = 2"), HasSubstr("run.toml:2: "));
  EXPECT_THAT(load_error("seed = 1\n[model"), HasSubstr("run.toml:2: "));
  EXPECT_THAT(load_error("seed = \"\xFF\""), HasSubstr("run.toml:1: "));
  EXPECT_THAT(load_error("seed"), HasSubstr("run.toml:1: "));
  std::string deep;
  for (int i = 0; i < 20'000; ++i) deep += "a.";
  EXPECT_THAT(load_error(deep + "a = 1"), HasSubstr("run.toml: more than"));
  EXPECT_THAT(override_error("--data.path=\xFF"), HasSubstr("valid UTF-8"));
  EXPECT_THAT(load_error("data.path = \"\\u0000\""), HasSubstr("NUL"));
}

TEST_F(ConfigTest, KeepsEveryCharacter) {
  const std::string text =
      "\u00a0 \u00e9\u045d\u07ff\u0800\u1680\u2003\u3000\u3042\u3fff\u4000\u6f22\ufeff\U0001f642";
  schema.load_toml_text("data.path = \"" + text + "\"\ndata.files = ['" + text + "', \"\\u00e9\"]",
                        "a");
  EXPECT_EQ(options.data, text);
  EXPECT_THAT(options.files, ElementsAre(text, "\u00e9"));
  EXPECT_THAT(load_error("\"caf\u00e9\" = 1"), HasSubstr("unknown key 'caf\u00e9'"));
  EXPECT_THAT(load_error("seed = \u00e9"), HasSubstr("run.toml:1: "));
  EXPECT_THAT(load_error("seed \u3000= 1"), HasSubstr("run.toml:1: "));
  EXPECT_THAT(load_error("data.path = \"\U000f00e9\""), HasSubstr("private"));
  EXPECT_THAT(load_error("data.path = \"\\U000F00E9\""), HasSubstr("private"));
  EXPECT_THAT(load_error("seed = 1\n# \xC3"), HasSubstr("run.toml:2: not valid UTF-8"));
}

TEST_F(ConfigTest, RefusesMissingFiles) {
  const std::string folder = std::string(testing::TempDir()) + unique_name("/config_test-");
  std::filesystem::create_directories(folder);
  write_file_synced(folder + "/small.toml", "seed = 4");
  schema.load_toml(folder + "/small.toml");
  EXPECT_EQ(options.seed, 4);
  const auto message = [this](const std::string& path) -> std::string {
    try {
      schema.load_toml(path);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message(folder + "/smal.toml"),
              HasSubstr("smal.toml does not exist; did you mean 'small.toml'?"));
  EXPECT_THAT(message(folder + "/no/small.toml"), HasSubstr("nor does the folder"));
  EXPECT_THAT(message(folder), HasSubstr("it is a folder"));
  std::filesystem::remove_all(folder);
}

TEST_F(ConfigTest, PrintedConfigurationLoadsAgain) {
  schema.override_value("data.path", "quote \" back \\ tab \t é \x7F");
  schema.override_value("data.files", "[\"a,b\", \"\", \"[\"]");
  schema.override_value("data.sizes", "");
  schema.override_value("train.scale", "none");
  schema.override_value("train.limit", "12", "odd\norigin\xFF");
  schema.override_value("model.kind", "moe");
  schema.override_value("seed", "-5");
  options.dropout = 1.0 / 3.0;
  TestConfig again;
  again.schema.load_toml_text(schema.to_toml(), "printed.toml");
  const auto values = schema.resolved();
  const auto values_again = again.schema.resolved();
  ASSERT_EQ(values_again.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(values_again[i].key, values[i].key);
    EXPECT_EQ(values_again[i].value, values[i].value);
    EXPECT_THAT(values_again[i].origin, HasSubstr("printed.toml:"));
  }
  EXPECT_EQ(again.options.dropout, 1.0 / 3.0);
  EXPECT_EQ(again.options.data, options.data);
  EXPECT_FALSE(again.options.scale.has_value());
}

TEST_F(ConfigTest, PrintsAlignedSectionsWithOrigins) {
  schema.load_preset("large", "model.hidden_size = 512");
  const std::string text = schema.to_toml();
  EXPECT_THAT(text, HasSubstr("seed        = 0"));
  EXPECT_THAT(text, HasSubstr("[model]\nhidden_size = 512"));
  EXPECT_THAT(text, HasSubstr("# preset large\n"));
  EXPECT_THAT(text, HasSubstr("[model.attention]\ndropout     = 0.25"));
  EXPECT_LT(text.find("seed"), text.find("[model]"));
}

TEST_F(ConfigTest, JsonHasValuesAndOrigins) {
  schema.override_argument("--data.files=a\"b,c");
  schema.override_argument("--seed=7");
  const auto json = nlohmann::json::parse(schema.to_json());
  EXPECT_EQ(json["seed"]["value"], 7);
  EXPECT_EQ(json["seed"]["origin"], "--seed");
  EXPECT_EQ(json["data.files"]["value"][0], "a\"b");
  EXPECT_EQ(json["model.attention.dropout"]["value"], 0.25);
  EXPECT_TRUE(json["train.limit"]["value"].is_null());
  EXPECT_EQ(json["model.kind"]["value"], "dense");
  EXPECT_EQ(json.size(), schema.keys().size());
}

TEST_F(ConfigTest, HelpNamesTypeRangeAndDefault) {
  options.hidden_size = 99;
  const std::string help = schema.help_text();
  EXPECT_THAT(help, HasSubstr("--model.hidden_size=256\n      Width (an integer, from 1 to 4096)"));
  EXPECT_THAT(help, HasSubstr("--model.kind=\"dense\"\n      Layers (one of dense, moe)"));
  EXPECT_THAT(help, HasSubstr("[train]\n"));
}

TEST_F(ConfigTest, BugsInASchemaAreInternalErrors) {
  int64_t other = 0;
  EXPECT_THROW(schema.add("model.hidden_size", &other, "twice"), InternalError);
  EXPECT_THROW(schema.add("model", &other, "a section's name"), InternalError);
  EXPECT_THROW(schema.add("seed.low", &other, "inside a value"), InternalError);
  EXPECT_THROW(schema.add("a b", &other, "a blank"), InternalError);
  EXPECT_THROW(schema.add("low", &other, "default out of range", at_least(1)), InternalError);
  EXPECT_THROW(schema.origin("nothing"), InternalError);
}

/// Characters that toml++ 3.3 cannot tell from white space, in keys and after a line's backslash.
TEST(ConfigText, CharactersOfAllPlanesAreReadOrRefused) {
  for (const char* character :
       {"\u00e9", "\u045d", "\u3042", "\ufb26", "\ufcff", "\ufefe", "\uff1f", "\U0001F600"}) {
    std::string text;
    ConfigSchema schema;
    schema.add("data.text", &text, "");
    schema.load_toml_text(fmt::format("[data]\ntext = \"\"\"a \\\n {}\"\"\"\n", character), "t");
    EXPECT_EQ(text, fmt::format("a {}", character));
    EXPECT_THROW(schema.load_toml_text(fmt::format("{}a.b = 1", character), "t"), UserError);
  }
  std::string text;
  ConfigSchema schema;
  schema.add("data.text", &text, "");
  schema.load_toml_text("\xEF\xBB\xBF[data]\ntext = \"x\"\n", "t");
  EXPECT_EQ(text, "x");
}

TEST(ConfigText, ABackslashBeforeUIsNoEscapeOnceItIsEscaped) {
  std::string text;
  ConfigSchema schema;
  schema.add("data.text", &text, "");
  schema.override_value("data.text", "C:\\U000F0041");
  schema.load_toml_text(schema.to_toml(), "printed");
  EXPECT_EQ(text, "C:\\U000F0041");
  EXPECT_THROW(schema.load_toml_text("[data]\ntext = \"\\U000F0041\"", "t"), UserError);
}

TEST(ConfigText, ThePrivatePlaneIsRefusedOnTheCommandLineToo) {
  std::string text;
  ConfigSchema schema;
  schema.add("data.text", &text, "");
  EXPECT_THROW(schema.override_value("data.text", "a\xF3\xB0\x92\x92"), UserError);
  schema.override_value("data.text", "a\xF3\xA0\x92\x92");
  EXPECT_EQ(text, "a\xF3\xA0\x92\x92");
}

}  // namespace
}  // namespace tessera

#include <cstring>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using CliDataError = CliTest;

TEST_F(CliDataError, TextThatCannotBeUsed) {
  const auto refuse = [this](const std::string& text, const std::vector<std::string>& parts) {
    expect_refused(train("run", {"--data.text=" + text}), parts);
  };
  refuse(path("texts.txt"), {path("texts.txt"), "does not exist", "text.txt"});
  write_all(path("empty.txt"), "");
  refuse(path("empty.txt"), {path("empty.txt")});
  write_all(path("blank.txt"), " \n\n \n");
  refuse(path("blank.txt"), {path("blank.txt")});
  std::string binary(5000, '\0');
  for (size_t i = 0; i < binary.size(); ++i) binary[i] = static_cast<char>(i * 37);
  write_all(path("binary.txt"), binary);
  refuse(path("binary.txt"), {path("binary.txt"), "is no text"});
  std::filesystem::create_directories(path("folder"));
  refuse(path("folder"), {path("folder")});
}

TEST_F(CliDataError, TextShorterThanASequence) {
  write_all(path("short.txt"), "Only these words.\n");
  expect_refused_after_tokens(
      train("run", {"--data.text=" + path("short.txt"), "--data.validation_fraction=0",
                    "--data.sequence_length=64"}),
      {"19 tokens", "65 (sequence_length + 1)"});
}

/// A run on a token file, which the tests damage.
class CliTokenFile : public CliTest {
 protected:
  CliTokenFile() {
    succeed(train("maker", {"--train.steps=1"}));
    for (const auto& entry : std::filesystem::directory_iterator(path("maker/tokens"))) {
      const std::string extension = entry.path().extension().string();
      if (extension == ".json") continue;
      std::filesystem::copy_file(entry.path(), path("tokens" + extension));
    }
  }
  void refuse(const std::vector<std::string>& parts) const {
    expect_refused(train("run", {"--data.text=", "--data.tokens=" + path("tokens")}), parts);
  }
  /// Overwrites 8 bytes of the index, then runs.
  void refuse_with_number(size_t offset, uint64_t value, const std::vector<std::string>& parts) {
    const std::string whole = read_all(path("tokens.idx"));
    std::string damaged = whole;
    std::memcpy(damaged.data() + offset, &value, sizeof(value));
    write_all(path("tokens.idx"), damaged);
    refuse(parts);
    write_all(path("tokens.idx"), whole);
  }
};

TEST_F(CliTokenFile, WholeTrains) {
  succeed(train("run", {"--data.text=", "--data.tokens=" + path("tokens.idx")}));
  EXPECT_EQ(read_steps("run").size(), 10);
}

TEST_F(CliTokenFile, MissingOrTruncated) {
  const std::string idx = read_all(path("tokens.idx"));
  const std::string bin = read_all(path("tokens.bin"));
  for (const size_t length : {size_t{0}, size_t{20}, size_t{40}, idx.size() - 1}) {
    write_all(path("tokens.idx"), idx.substr(0, length));
    refuse({path("tokens.idx")});
  }
  write_all(path("tokens.idx"), idx);
  for (const size_t length : {size_t{0}, size_t{1}, bin.size() - 2}) {
    write_all(path("tokens.bin"), bin.substr(0, length));
    refuse({path("tokens")});
  }
  std::filesystem::remove(path("tokens.bin"));
  refuse({path("tokens.bin")});
  std::filesystem::remove(path("tokens.idx"));
  refuse({path("tokens")});
}

TEST_F(CliTokenFile, HostileNumbers) {
  for (const uint64_t huge : {uint64_t{1} << 32, uint64_t{1} << 60, ~uint64_t{0}}) {
    refuse_with_number(18, huge, {"number of sequences", std::to_string(huge)});
    refuse_with_number(26, huge, {"number of document indices", std::to_string(huge)});
  }
  refuse_with_number(9, 7, {"version is 7"});
  refuse_with_number(0, 0, {"MMIDIDX"});
}

TEST_F(CliTokenFile, IdOutsideTheVocabulary) {
  std::string bin = read_all(path("tokens.bin"));
  for (size_t i = 1; i < bin.size(); i += 2) bin[i] = '\x7F';
  write_all(path("tokens.bin"), bin);
  expect_error(run_tessera(train("run", {"--data.text=", "--data.tokens=" + path("tokens")})),
               {path("tokens.bin"), "320"});
  EXPECT_TRUE(checkpoints("run").empty());
}

}  // namespace
}  // namespace tessera

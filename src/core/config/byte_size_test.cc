#include "core/config/byte_size.h"

#include <gmock/gmock.h>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(ByteSize, ReadsNumbersWithUnits) {
  const auto parse = [](const std::string& text) { return parse_byte_size("key", text); };
  EXPECT_EQ(parse("80GiB"), int64_t{80} << 30);
  EXPECT_EQ(parse("1.5 TiB"), int64_t{3} << 39);
  EXPECT_EQ(parse("500 mb"), 500'000'000);
  EXPECT_EQ(parse("0.5KiB"), 512);
  EXPECT_EQ(parse("3kb"), 3000);
  EXPECT_EQ(parse("7gB"), 7'000'000'000);
  EXPECT_EQ(parse("1 B"), 1);
  EXPECT_EQ(parse("1.9B "), 1);
  EXPECT_EQ(parse("2TB"), 2'000'000'000'000);
}

TEST(ByteSize, RefusesWhatIsNone) {
  const auto expect = [](const std::string& text, const std::string& why) {
    EXPECT_THAT([&] { parse_byte_size("train.memory_limit", text); },
                ThrowsMessage<UserError>(AllOf(HasSubstr("train.memory_limit is \"" + text + "\""),
                                               HasSubstr(why), HasSubstr("80GiB"))))
        << text;
  };
  expect("80", "no unit");
  expect("80 ", "no unit");
  expect("GiB", "begin with a number");
  expect("lots", "begin with a number");
  expect("nan GiB", "begin with a number");
  expect("inf GiB", "begin with a number");
  expect(" 80GiB", "begin with a number");
  expect("80GiBs", "'gibs' is unknown");
  expect("80 G", "'g' is unknown");
  expect("8e1GiB", "'e1gib' is unknown");
  expect("1,5GiB", "unknown");
  expect("0GiB", "no size");
  expect("-3GiB", "no size");
  expect("0.4B", "no size");
  expect("99999999999TiB", "no size");
}

}  // namespace
}  // namespace tessera

#include "core/config/typed_number.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TypedNumber, IntegersBeyond64BitsAreNamedWithTheirBound) {
  EXPECT_EQ(describe_unheld("18446744073709551616", true, at_least(0)),
            "must be at least 0 and at most 9223372036854775807, found 18446744073709551616");
  EXPECT_EQ(describe_unheld("9223372036854775808", true, {}),
            "must be at most 9223372036854775807, found 9223372036854775808");
  EXPECT_EQ(describe_unheld("-9223372036854775809", true, {}),
            "must be at least -9223372036854775808, found -9223372036854775809");
  EXPECT_EQ(describe_unheld("99999999999999999999", true, between(1, 8)),
            "must be from 1 to 8, found 99999999999999999999");
  for (const char* held : {"0", "-1", "+7", "9223372036854775807", "-9223372036854775808"})
    EXPECT_EQ(describe_unheld(held, true, {}), "") << held;
}

TEST(TypedNumber, RealNumbersBeyondTheirRangeAreNamed) {
  EXPECT_THAT(describe_unheld("1e400", false, above(0)),
              AllOf(HasSubstr("must be a number above 0, found 1e400"), HasSubstr("1.8e+308")));
  EXPECT_THAT(describe_unheld("-1e400", false, {}), HasSubstr("must be a number, found -1e400"));
  EXPECT_THAT(describe_unheld("0.01e-400", false, {}),
              AllOf(HasSubstr("found 0.01e-400"), HasSubstr("nearer to 0")));
  for (const char* held : {"0", "0e-999", "0.000", "1e308", "-1.5", "18446744073709551616"})
    EXPECT_EQ(describe_unheld(held, false, {}), "") << held;
}

TEST(TypedNumber, OtherTextIsLeftToOthers) {
  for (const char* text :
       {"", " ", "x", "1x", "1e", "1.", ".5", "nan", "inf", "0x10", "1_000", "--1"}) {
    EXPECT_EQ(describe_unheld(text, true, {}), "") << text;
    EXPECT_EQ(describe_unheld(text, false, {}), "") << text;
    EXPECT_FALSE(parse_decimal(text)) << text;
  }
  EXPECT_EQ(parse_decimal("-2.5e3"), -2500.0);
  EXPECT_TRUE(std::isinf(*parse_decimal("1e999")));
}

}  // namespace
}  // namespace tessera

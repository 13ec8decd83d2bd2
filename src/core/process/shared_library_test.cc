#include "core/process/shared_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(SharedLibrary, LoadsTheFirstThatThereIs) {
  const std::array<std::string, 2> names{"libno-such-thing.so.1", "libm.so.6"};
  const SharedLibrary library(names, "arithmetic", "install it");
  EXPECT_EQ(library.name(), "libm.so.6");
  double (*root)(double) = nullptr;
  library.find("cbrt", root);
  EXPECT_DOUBLE_EQ(root(27.0), 3.0);
}

TEST(SharedLibrary, SaysWhatIsMissingWhereItWasLookedForAndWhatToDo) {
  const std::array<std::string, 2> names{"libno-such-thing.so.1", "/nowhere/libno-such-thing.so.1"};
  EXPECT_THAT([&] { SharedLibrary(names, "arithmetic", "install such-thing"); },
              ThrowsMessage<UserError>(
                  AllOf(HasSubstr("arithmetic cannot be loaded; install such-thing; tried:"),
                        HasSubstr("\n  libno-such-thing.so.1: cannot open"),
                        HasSubstr("\n  /nowhere/libno-such-thing.so.1: cannot open"))));
}

TEST(SharedLibrary, AFunctionThatIsNotThereIsNamed) {
  const std::array<std::string, 1> names{"libm.so.6"};
  const SharedLibrary library(names, "arithmetic", "install it");
  double (*nothing)(double) = nullptr;
  EXPECT_THAT([&] { library.find("no_such_function", nothing); },
              ThrowsMessage<UserError>(HasSubstr("libm.so.6 has no no_such_function")));
}

}  // namespace
}  // namespace tessera

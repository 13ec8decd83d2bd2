#include "cli/tests/kill_testing.h"

namespace tessera {
namespace {

TEST_F(CliKillTest, AtManyRandomMoments) {
  kill_and_continue(50, 2);
}

}  // namespace
}  // namespace tessera

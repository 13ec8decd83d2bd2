#include "cli/tests/kill_testing.h"

namespace tessera {
namespace {

TEST_F(CliKillTest, AtRandomMoments) {
  kill_and_continue(8, 1);
}

}  // namespace
}  // namespace tessera

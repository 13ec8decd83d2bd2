#include "checkpoint/kill_testing.h"

namespace tessera {
namespace {

using CheckpointKill = FolderTest;

TEST_F(CheckpointKill, TheNewestCompleteOneLoads) {
  kill_savers(folder_, 10, 1);
}

}  // namespace
}  // namespace tessera

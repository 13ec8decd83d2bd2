#include "checkpoint/kill_testing.h"

namespace tessera {
namespace {

/// On a disk, which makes kills fall between writing and its end.
class CheckpointKill : public FolderTest {
 protected:
  CheckpointKill() : FolderTest(::testing::TempDir()) {}
};

TEST_F(CheckpointKill, TheNewestCompleteOneLoads) {
  kill_savers(folder_, 1, 10, 1);
}

TEST_F(CheckpointKill, TheNewestCompleteOneOfSeveralRanksLoads) {
  kill_savers(folder_, 3, 10, 2);
}

TEST_F(CheckpointKill, TheNewestCompleteOneLoadsThatAThreadWrote) {
  kill_savers(folder_, 1, 10, 3, Saving::kInBackground);
}

TEST_F(CheckpointKill, TheNewestCompleteOneOfSeveralRanksLoadsThatThreadsWrote) {
  kill_savers(folder_, 3, 10, 4, Saving::kInBackground);
}

}  // namespace
}  // namespace tessera

#include "train/run/run_saver.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(SlowSave, SaysWhatLimitsAndWhichIntervalWouldDo) {
  EXPECT_EQ(describe(SlowSave{.step = 20,
                              .num_bytes = int64_t{6} << 30,
                              .write_seconds = 12,
                              .interval = 10,
                              .trained = 5,
                              .waited = 7.5}),
            "training waited 7.5 s until the checkpoint of step 20 was written: the disk is slower "
            "than the saves. 6 GiB took 12 s, 512 MiB/s, and the next save was due after 5 s; "
            "raise run.checkpoint_interval to 25 or more, or use a faster disk");
}

}  // namespace
}  // namespace tessera

#include "core/process/helper_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace tessera {
namespace {

TEST(HelperThread, DoesOnePieceAfterTheOther) {
  int done = 0;
  std::thread::id worker;
  HelperThread helper;
  helper.wait();
  for (int i = 1; i <= 100; ++i) {
    helper.give([&] {
      ++done;
      worker = std::this_thread::get_id();
    });
    helper.wait();
    ASSERT_EQ(done, i);
  }
  EXPECT_NE(worker, std::this_thread::get_id());
}

TEST(HelperThread, FindsWorkThatComesNowAndThen) {
  using std::chrono::milliseconds;
  int done = 0;
  HelperThread helper;
  for (int i = 1; i <= 5; ++i) {
    helper.give([&] { ++done; });
    helper.wait();
    ASSERT_EQ(done, i);
    std::this_thread::sleep_for(milliseconds(12));  // so that it looks
  }
  for (int i = 6; i <= 50; ++i) {  // and is woken again
    helper.give([&] { ++done; });
    helper.wait();
    ASSERT_EQ(done, i);
  }
}

TEST(HelperThread, EndsItsWorkAlsoWhereItLooks) {
  using std::chrono::milliseconds;
  int done = 0;
  {
    HelperThread helper;
    for (int i = 0; i < 3; ++i) {
      helper.wait();
      helper.give([&] { ++done; });
      if (i < 2) std::this_thread::sleep_for(milliseconds(12));
    }
  }
  EXPECT_EQ(done, 3);
}

TEST(HelperThread, WorksWhileItsOwnerDoes) {
  std::atomic<bool> goes_on = false;
  bool done = false;
  HelperThread helper;
  helper.give([&] {
    goes_on.wait(false);
    done = true;
  });
  goes_on = true;  // were the work done by give(), this would not be reached
  goes_on.notify_all();
  helper.wait();
  EXPECT_TRUE(done);
}

TEST(HelperThread, EndsItsWorkBeforeItIsGone) {
  int done = 0;
  for (int i = 1; i <= 100; ++i) {
    {
      HelperThread helper;
      helper.give([&] { ++done; });
    }
    ASSERT_EQ(done, i);
  }
}

TEST(HelperThread, MayNeverWork) {
  const HelperThread helper;
}

}  // namespace
}  // namespace tessera

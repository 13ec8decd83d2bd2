#include "core/process/signal_mask.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace tessera {
namespace {

// A signal handler can reach nothing but static storage.
std::atomic<int> g_handled = 0;

void count(int /*signal*/) {
  ++g_handled;
}

TEST(SignalMask, SignalsComeWhenItEnds) {
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = count;
  sigaction(SIGUSR1, &action, &before);
  g_handled = 0;
  {
    const SignalMask mask;
    raise(SIGUSR1);
    std::thread([] { raise(SIGUSR1); }).join();  // inherits the mask, and ends with its signal
    EXPECT_EQ(g_handled, 0);
  }
  EXPECT_EQ(g_handled, 1);
  sigaction(SIGUSR1, &before, nullptr);
}

}  // namespace
}  // namespace tessera

#include <iostream>
#include <thread>

#include "comm/error.h"
#include "comm/launch.h"

namespace tessera {
namespace {

constexpr int kUserErrorCode = 2;
constexpr int kInternalErrorCode = 1;
// Long enough for the first rank to tell a mistake that all ranks find, and to end them.
constexpr std::chrono::milliseconds kFirstRankTells{500};
constexpr std::chrono::milliseconds kLook{20};

// Whether another rank ends all within a moment.
bool others_tell(World& world) {
  for (auto waited = kLook; waited < kFirstRankTells; waited += kLook) {
    if (world.ending()) return true;
    std::this_thread::sleep_for(kLook);
  }
  return false;
}

void tell(const std::string& text) {
  std::cerr << "tessera: " + text + "\n" << std::flush;
}

[[noreturn]] void end_all(World& world, const std::string& what, int code) {
  if (world.rank() == 0 || !others_tell(world))
    tell("rank " + std::to_string(world.rank()) + ": " + what);
  world.abort(code);
}

}  // namespace

int run_rank(World& world, const std::function<int()>& body) {
  if (world.size() == 1) return body();
  try {
    return body();
  } catch (const CommError& error) {
    tell(error.what());  // it names the rank
    world.abort(kUserErrorCode);
  } catch (const UserError& error) {
    end_all(world, error.what(), kUserErrorCode);
  } catch (const std::exception& error) {
    end_all(world, std::string("internal error: ") + error.what(), kInternalErrorCode);
  }
}

}  // namespace tessera

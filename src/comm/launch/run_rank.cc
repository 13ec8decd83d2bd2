#include <cctype>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <thread>

#include "comm/error.h"
#include "comm/launch/launch.h"
#include "core/exit_code.h"
#include "core/limits.h"
#include "core/text/message.h"

namespace tessera {
namespace {

// Long enough for the first rank to tell a mistake that all ranks find, and to end them.
constexpr std::chrono::milliseconds kFirstRankTells{500};
constexpr std::chrono::milliseconds kLook{20};

std::vector<int64_t> all_ranks(const World& world) {
  std::vector<int64_t> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Whether another rank ends all within a moment.
bool others_tell(World& world) {
  for (auto waited = kLook; waited < kFirstRankTells; waited += kLook) {
    if (world.ending()) return true;
    std::this_thread::sleep_for(kLook);
  }
  return false;
}

void tell(const std::string& text) {
  std::cout << std::flush;  // which ending all ranks would not do
  std::cerr << "tessera: " + shorten_message(text) + "\n" << std::flush;
}

// "rank 3: ...", as of a failure that one rank told the others.
bool names_rank(const std::string& text) {
  constexpr std::string_view kRank = "rank ";
  if (!text.starts_with(kRank)) return false;
  size_t end = kRank.size();
  while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end])) != 0) ++end;
  return end > kRank.size() && text.compare(end, 2, ": ") == 0;
}

[[noreturn]] void end_all(World& world, const std::string& what, int code) {
  if (world.rank() == 0 || !others_tell(world))
    tell(names_rank(what) ? what : "rank " + std::to_string(world.rank()) + ": " + what);
  world.abort(code);
}

}  // namespace

int run_rank(World& world, const std::function<int()>& body) {
  if (world.size() == 1) return body();
  try {
    const int code = name_limits(body);
    // Back ends end together, but not all can say which rank they wait for.
    world.make_group("end", all_ranks(world))->barrier();
    return code;
  } catch (const CommError& error) {
    tell(error.what());  // it names the rank
    world.abort(kUserErrorCode);
  } catch (const UserError& error) {
    end_all(world, error.what(), kUserErrorCode);
  } catch (const std::filesystem::filesystem_error& error) {
    end_all(world, error.what(), kUserErrorCode);
  } catch (const std::exception& error) {
    end_all(world, std::string("internal error: ") + error.what(), kInternalErrorCode);
  }
}

}  // namespace tessera

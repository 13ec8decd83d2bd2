#include "checkpoint/together.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "comm/error.h"
#include "comm/thread/thread_world.h"
#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

enum class Thrown { kNothing, kUserError, kInternalError };

/// What `together` throws on each rank when some ranks' actions throw.
std::vector<std::pair<Thrown, std::string>> run_together(
    int64_t num_ranks, const std::function<void(int64_t rank)>& action) {
  std::vector<std::pair<Thrown, std::string>> thrown(num_ranks);
  run_thread_world(num_ranks, [&](World& world) {
    const CommunicatorPtr all = world.make_world_group();
    auto& own = thrown[world.rank()];
    try {
      together(*all, [&] { action(world.rank()); });
    } catch (const UserError& error) {
      own = {Thrown::kUserError, error.what()};
    } catch (const InternalError& error) {
      own = {Thrown::kInternalError, error.what()};
    }
    all->barrier();  // still in step with one another
  });
  return thrown;
}

TEST(Together, AllRanksThrowTheErrorOfTheLowest) {
  using Pair = std::pair<Thrown, std::string>;
  for (const int64_t num_ranks : {2, 3, 7}) {
    EXPECT_THAT(run_together(num_ranks, [](int64_t) {}), Each(Pair(Thrown::kNothing, "")));
    EXPECT_THAT(
        run_together(num_ranks, [](int64_t rank) { require(rank == 0, "mistake {}", rank); }),
        Each(Pair(Thrown::kUserError, "rank 1: mistake 1")));
    EXPECT_THAT(run_together(num_ranks,
                             [&](int64_t rank) {
                               if (rank == num_ranks - 1) throw std::runtime_error("bug");
                             }),
                Each(Pair(Thrown::kInternalError, fmt::format("rank {}: bug", num_ranks - 1))));
    EXPECT_THAT(run_together(num_ranks,
                             [](int64_t rank) {
                               if (rank == 0) throw 5;
                               user_error("mistake");
                             }),
                Each(Pair(Thrown::kInternalError, "rank 0: an exception of unknown type")));
  }
}

using Alive = std::function<void()>;

/// What the ranks of a world with this time limit throw where rank 0 does something alone.
void run_on_first(double limit_seconds, const std::function<void(const Alive&)>& action) {
  run_thread_world(3,
                   [&](World& world) {
                     const CommunicatorPtr all = world.make_world_group();
                     on_first_rank(*all, [&](const Alive& alive) {
                       EXPECT_EQ(world.rank(), 0);
                       action(alive);
                     });
                     all->barrier();
                   },
                   {.timeout_seconds = limit_seconds});
}

TEST(OnFirstRank, OthersWaitForAsLongAsItIsAlive) {
  run_on_first(0.5, [](const Alive& alive) {
    for (int i = 0; i < 150; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      alive();
    }
  });
}

TEST(OnFirstRank, OthersGiveUpOneThatHangs) {
  const auto hang = [](const Alive& alive) {
    alive();
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  };
  EXPECT_THROW(run_on_first(0.3, hang), CommError);
}

TEST(OnFirstRank, AllThrowWhatItThrew) {
  run_thread_world(3, [](World& world) {
    const CommunicatorPtr all = world.make_world_group();
    try {
      on_first_rank(*all, [](const Alive&) { user_error("no such file"); });
      ADD_FAILURE() << "rank " << world.rank() << " went on";
    } catch (const UserError& error) {
      EXPECT_STREQ(error.what(), "rank 0: no such file");
    }
    all->barrier();
  });
}

TEST(Together, OneRankThrowsWhatItThrew) {
  const CommunicatorPtr alone = make_single_communicator("w");
  EXPECT_THROW(together(*alone, [] { throw std::out_of_range("x"); }), std::out_of_range);
}

std::string random_text(uint64_t stream) {
  Random random(1, stream);
  std::string text(random.next_below(3) * random.next_below(100'000), ' ');
  for (char& c : text) c = static_cast<char>(random.next_u64());
  return text;
}

TEST(Together, TextsOfAnyLengthArrive) {
  for (const int64_t num_ranks : {1, 2, 5, 8}) {
    std::vector<std::string> expected;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      expected.push_back(random_text(static_cast<uint64_t>(rank)));
    }
    run_thread_world(num_ranks, [&](World& world) {
      const CommunicatorPtr all = world.make_world_group();
      const size_t rank = world.rank();
      const auto gathered = gather_texts(*all, expected[rank]);
      EXPECT_EQ(gathered, rank == 0 ? expected : std::vector<std::string>{});
      EXPECT_EQ(broadcast_texts(*all, rank == 0 ? expected : std::vector<std::string>{"own"}),
                expected);
      EXPECT_THAT(broadcast_texts(*all, {}), IsEmpty());
      EXPECT_THAT(broadcast_texts(*all, {""}), ElementsAre(""));
    });
  }
}

}  // namespace
}  // namespace tessera

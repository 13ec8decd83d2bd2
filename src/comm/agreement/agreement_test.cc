#include "comm/agreement/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "comm/agreement/compared_environment.h"
#include "comm/thread/thread_world.h"
#include "core/process/build_id.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::Pair;

using Values = std::map<std::string, std::string>;

RankStatement say(const Values& values, const Values& more = {}) {
  RankStatement statement;
  statement.topics.push_back({.values = values, .advice = "mend it"});
  statement.topics.push_back({.values = more, .advice = "mend that"});
  return statement;
}

RankStatement fail(const std::string& why, std::vector<RankStatement::Topic> topics = {}) {
  return {.topics = std::move(topics), .failure = why};
}

std::string compare(const std::vector<RankStatement>& ranks) {
  return find_disagreement(ranks).value_or("agree");
}

TEST(Agreement, EqualStatementsAgree) {
  EXPECT_EQ(compare({say({{"a", "1"}}), say({{"a", "1"}}), say({{"a", "1"}})}), "agree");
}

TEST(Agreement, NamesKeyRanksAndValues) {
  EXPECT_EQ(compare({say({{"a", "1"}, {"b", "x"}}), say({{"a", "2"}, {"b", "x"}})}),
            "a is 1 on rank 0 and 2 on rank 1; mend it");
  EXPECT_EQ(compare({say({{"a", "1"}}), say({{"a", "2"}}), say({{"a", "1"}}), say({{"a", "1"}})}),
            "a is 1 on ranks 0 2-3 and 2 on rank 1; mend it");
}

TEST(Agreement, KeysMayBeMissing) {
  EXPECT_EQ(compare({say({{"a", "1"}}), say({{"a", "1"}, {"b", "2"}})}),
            "b is unset on rank 0 and 2 on rank 1; mend it");
}

TEST(Agreement, TheFirstTopicThatDiffersIsTold) {
  EXPECT_EQ(compare({say({{"a", "1"}}, {{"b", "1"}}), say({{"a", "2"}}, {{"b", "2"}})}),
            "a is 1 on rank 0 and 2 on rank 1; mend it");
  EXPECT_EQ(compare({say({{"a", "1"}}, {{"b", "1"}}), say({{"a", "1"}}, {{"b", "2"}})}),
            "b is 1 on rank 0 and 2 on rank 1; mend that");
}

TEST(Agreement, ManyDifferencesAreCutShort) {
  Values ones;
  Values twos;
  for (const std::string key : {"a", "b", "c", "d", "e"}) {
    ones[key] = "1";
    twos[key] = "2";
  }
  EXPECT_EQ(compare({say(ones), say(twos)}),
            "a is 1 on rank 0 and 2 on rank 1; b is 1 on rank 0 and 2 on rank 1; c is 1 on rank 0 "
            "and 2 on rank 1; 2 more differ; mend it");
  std::vector<RankStatement> ranks;
  for (int i = 0; i < 20; ++i) ranks.push_back(say({{"a", std::to_string(i % 10)}}));
  EXPECT_EQ(compare(ranks),
            "a is 0 on ranks 0 10, 1 on ranks 1 11, 2 on ranks 2 12 and 7 other values; mend it");
}

TEST(Agreement, FailuresAreToldAfterDifferences) {
  const auto topics = say({{"a", "1"}}).topics;
  EXPECT_EQ(compare({say({{"a", "1"}}), fail("no file", {topics[0]})}), "rank 1: no file");
  EXPECT_EQ(compare({say({{"a", "2"}}), fail("no file", {topics[0]})}),
            "a is 2 on rank 0 and 1 on rank 1; mend it");
  EXPECT_EQ(compare({fail("no file"), fail("no file")}), "no file");
  EXPECT_EQ(compare({fail("no file"), fail("no space")}), "rank 0: no file");
}

/// What each of three ranks gets, and all that is told.
std::pair<std::set<bool>, std::string> run_ranks(const std::vector<RankStatement>& statements) {
  std::set<bool> results;
  std::mutex mutex;
  testing::internal::CaptureStderr();
  run_thread_world(std::ssize(statements), [&](World& world) {
    const bool agree = ranks_agree(world, statements[world.rank()]);
    EXPECT_EQ(world.statistics().counts().size(), 0);
    world.make_world_group()->barrier();  // ranks can go on in any case
    const std::lock_guard lock(mutex);
    results.insert(agree);
  });
  return {results, testing::internal::GetCapturedStderr()};
}

TEST(Agreement, AllRanksLearnItAndOneTells) {
  EXPECT_THAT(run_ranks({say({{"a", "1"}}), say({{"a", "1"}}), say({{"a", "1"}})}),
              Pair(ElementsAre(true), ""));
  EXPECT_THAT(run_ranks({say({{"a", "1"}}), say({{"a", "1"}}), say({{"a", "22"}, {"b:\n", ""}})}),
              Pair(ElementsAre(false),
                   "tessera: a is 1 on ranks 0-1 and 22 on rank 2; b:\n is unset on ranks 0-1 and "
                   " on rank 2; mend it\n"));
  EXPECT_THAT(run_ranks({fail("no"), fail("no"), fail("no")}),
              Pair(ElementsAre(false), "tessera: no\n"));
}

TEST(ComparedEnvironment, HoldsWhatChangesResultsOrCommunication) {
  const std::vector<std::string> entries = {"TESSERA_X=1",
                                            "TESSERA_PORT=1",
                                            "OMP_NUM_THREADS=3",
                                            "NCCL_ALGO=Ring",
                                            "NCCL_DEBUG=INFO",
                                            "NCCL_DEBUG_FILE=a",
                                            "NCCL_SOCKET_IFNAME=eth",
                                            "CUDA_VISIBLE_DEVICES=1",
                                            "HOSTNAME=node",
                                            "RANK=1",
                                            "LOCAL_RANK=1",
                                            "no value",
                                            "OMPI_MCA_btl=tcp",
                                            "OMPI_MCA_ess_vpid=1",
                                            "ONEDNN_MAX_CPU_ISA=AVX2"};
  EXPECT_EQ(compared_environment(entries, false), (Values{{"OMPI_MCA_btl", "\"tcp\""},
                                                          {"ONEDNN_MAX_CPU_ISA", "\"AVX2\""},
                                                          {"TESSERA_X", "\"1\""}}));
  EXPECT_EQ(compared_environment(entries, true).count("NCCL_ALGO"), 1);
  EXPECT_EQ(compared_environment(entries, true).size(), 4);
}

TEST(BuildId, IsHexadecimal) {
  EXPECT_EQ(program_build_id().find_first_not_of("0123456789abcdef"), std::string::npos);
}

}  // namespace
}  // namespace tessera

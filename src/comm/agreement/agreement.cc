#include "comm/agreement/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <set>

#include "core/random.h"

namespace tessera {
namespace {

/// Changes with the form of statements: programs that write others see no more than that.
constexpr uint64_t kFormat = 0x7465737365726131;

constexpr size_t kMostKeys = 3;
constexpr size_t kMostValues = 3;
constexpr size_t kMostRanges = 4;
constexpr size_t kMostText = 160;

using Ranks = std::vector<int64_t>;

/// "rank 3", "ranks 0-2 5".
std::string name_ranks(const Ranks& ranks) {
  std::string text;
  size_t num_ranges = 0;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (++num_ranges > kMostRanges) return fmt::format("ranks{} and others", text);
    text += end - i == 1 ? fmt::format(" {}", ranks[i])
                         : fmt::format(" {}-{}", ranks[i], ranks[end - 1]);
    i = end;
  }
  return (ranks.size() == 1 ? "rank" : "ranks") + text;
}

std::string shorten(const std::string& text) {
  return text.size() <= kMostText ? text : text.substr(0, kMostText) + "...";
}

/// The ranks that say each value of a key, by the lowest rank that does.
std::vector<std::pair<std::string, Ranks>> group_ranks(std::span<const RankStatement> all,
                                                       size_t topic, const std::string& key) {
  std::vector<std::pair<std::string, Ranks>> groups;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].topics.size() <= topic) continue;
    const auto& values = all[rank].topics[topic].values;
    const auto found = values.find(key);
    const std::string value = found == values.end() ? "unset" : found->second;
    auto group = std::ranges::find(groups, value, &std::pair<std::string, Ranks>::first);
    if (group == groups.end()) group = groups.insert(groups.end(), {value, {}});
    group->second.push_back(static_cast<int64_t>(rank));
  }
  return groups;
}

/// "KEY is A on rank 0 and B on rank 1"; empty where all say the same.
std::string compare_key(std::span<const RankStatement> all, size_t topic, const std::string& key) {
  const auto groups = group_ranks(all, topic, key);
  if (groups.size() < 2) return "";
  std::string text = key + " is";
  const size_t shown = std::min(groups.size(), kMostValues);
  for (size_t i = 0; i < shown; ++i) {
    const bool last = i + 1 == shown && shown == groups.size();
    text += fmt::format("{} {} on {}", i == 0 ? "" : (last ? " and" : ","),
                        shorten(groups[i].first), name_ranks(groups[i].second));
  }
  if (shown < groups.size()) text += fmt::format(" and {} other values", groups.size() - shown);
  return text;
}

std::string compare_topic(std::span<const RankStatement> all, size_t topic) {
  std::set<std::string> keys;
  std::string advice;
  for (const RankStatement& rank : all) {
    if (rank.topics.size() <= topic) continue;
    for (const auto& [key, value] : rank.topics[topic].values) keys.insert(key);
    if (advice.empty()) advice = rank.topics[topic].advice;
  }
  std::string text;
  size_t num_different = 0;
  for (const std::string& key : keys) {
    const std::string difference = compare_key(all, topic, key);
    if (difference.empty() || ++num_different > kMostKeys) continue;
    text += (text.empty() ? "" : "; ") + difference;
  }
  if (num_different == 0) return "";
  if (num_different > kMostKeys) text += fmt::format("; {} more differ", num_different - kMostKeys);
  return text + "; " + advice;
}

std::string describe_failure(std::span<const RankStatement> all) {
  const auto failed =
      std::ranges::find_if(all, [](const RankStatement& rank) { return !rank.failure.empty(); });
  if (failed == all.end()) return "";
  const bool alike =
      std::ranges::all_of(all, [&](const auto& rank) { return rank.failure == failed->failure; });
  return alike ? failed->failure
               : fmt::format("rank {}: {}", failed - all.begin(), failed->failure);
}

void put(std::string& bytes, const std::string& text) {
  bytes += std::to_string(text.size()) + ":" + text;
}

std::string take(std::string_view& bytes) {
  const size_t colon = bytes.find(':');
  ensure(colon != std::string_view::npos, "a rank's statement is cut short");
  const size_t length = std::stoull(std::string(bytes.substr(0, colon)));
  ensure(length <= bytes.size() - colon - 1, "a rank's statement is cut short");
  std::string text(bytes.substr(colon + 1, length));
  bytes.remove_prefix(colon + 1 + length);
  return text;
}

std::string to_bytes(const RankStatement& statement) {
  std::string bytes;
  put(bytes, statement.failure);
  for (const auto& topic : statement.topics) {
    put(bytes, topic.advice);
    put(bytes, std::to_string(topic.values.size()));
    for (const auto& [key, value] : topic.values) {
      put(bytes, key);
      put(bytes, value);
    }
  }
  return bytes;
}

RankStatement from_bytes(std::string_view bytes) {
  RankStatement statement;
  statement.failure = take(bytes);
  while (!bytes.empty()) {
    RankStatement::Topic& topic = statement.topics.emplace_back();
    topic.advice = take(bytes);
    const auto count = std::stoull(take(bytes));
    for (uint64_t i = 0; i < count; ++i) {
      std::string key = take(bytes);
      topic.values[std::move(key)] = take(bytes);
    }
  }
  return statement;
}

/// What ranks exchange in any case: of a fixed size, whatever they are and say.
struct Summary {
  uint64_t format = kFormat;
  uint64_t hash = 0;
  int64_t num_bytes = 0;
  int64_t failed = 0;
  bool operator==(const Summary&) const = default;
};

std::vector<Summary> exchange_summaries(Communicator& all, Summary own) {
  std::vector<Summary> summaries(all.size());
  const auto bytes = static_cast<int64_t>(sizeof(Summary));
  all.all_gather({&own, DType::kU8, {1, bytes}},
                 {summaries.data(), DType::kU8, {all.size(), bytes}})
      .wait();
  return summaries;
}

/// Rank 0's: which ranks are of programs that write statements otherwise.
std::optional<std::string> find_other_formats(const std::vector<Summary>& summaries) {
  Ranks others;
  for (size_t rank = 0; rank < summaries.size(); ++rank) {
    if (summaries[rank].format != summaries[0].format) others.push_back(static_cast<int64_t>(rank));
  }
  if (others.empty()) return std::nullopt;
  return fmt::format(
      "{} and rank 0 are of different versions of Tessera; start the same program "
      "on all ranks",
      name_ranks(others));
}

/// Every rank's statement at rank 0; nothing elsewhere.
std::vector<RankStatement> gather(Communicator& all, const std::vector<Summary>& summaries,
                                  std::string own) {
  if (all.rank() != 0) {
    all.send({own.data(), DType::kU8, {std::ssize(own)}}, 0).wait();
    return {};
  }
  std::vector<RankStatement> statements = {from_bytes(own)};
  for (int64_t rank = 1; rank < all.size(); ++rank) {
    std::string bytes(summaries[rank].num_bytes, '\0');
    all.receive({bytes.data(), DType::kU8, {std::ssize(bytes)}}, rank).wait();
    statements.push_back(from_bytes(bytes));
  }
  return statements;
}

/// Returns on all ranks when rank 0 has told, so that nobody ends the job before.
void tell_why(Communicator& all, const std::vector<Summary>& summaries, std::string own) {
  std::optional<std::string> why = find_other_formats(summaries);
  if (!why) why = find_disagreement(gather(all, summaries, std::move(own)));
  if (all.rank() == 0) std::cerr << "tessera: " + why.value_or("the ranks differ") + "\n";
  all.barrier();
}

}  // namespace

std::optional<std::string> find_disagreement(std::span<const RankStatement> ranks) {
  size_t num_topics = 0;
  for (const RankStatement& rank : ranks) num_topics = std::max(num_topics, rank.topics.size());
  for (size_t topic = 0; topic < num_topics; ++topic) {
    if (std::string text = compare_topic(ranks, topic); !text.empty()) return text;
  }
  if (std::string text = describe_failure(ranks); !text.empty()) return text;
  return std::nullopt;
}

bool ranks_agree(World& world, const RankStatement& own) {
  const CommunicatorPtr all = world.make_world_group();
  std::string bytes = to_bytes(own);
  const auto summaries = exchange_summaries(*all, {.hash = hash_text(bytes.data(), bytes.size()),
                                                   .num_bytes = std::ssize(bytes),
                                                   .failed = own.failure.empty() ? 0 : 1});
  const bool alike = std::ranges::all_of(summaries, [&](const Summary& summary) {
    return summary == summaries[0] && summary.failed == 0;
  });
  if (!alike) tell_why(*all, summaries, std::move(bytes));
  world.statistics().clear();
  return alike;
}

}  // namespace tessera

#include "train/plan/chakra_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "train/plan/plan_testing.h"

namespace tessera {
namespace {

using testing::settings_to_plan;
using testing::small_machine;

/// Reads protocol buffers: the fields of a message, numbers and bytes.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  bool is_done() const { return bytes_.empty(); }
  uint64_t varint() {
    uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      const auto byte = static_cast<uint8_t>(bytes_.at(0));
      bytes_.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7fU) << shift;
      if (byte < 0x80) return value;
    }
  }
  std::string_view delimited() {
    const size_t length = varint();
    const std::string_view part = bytes_.substr(0, length);
    EXPECT_EQ(part.size(), length);
    bytes_.remove_prefix(length);
    return part;
  }

 private:
  std::string_view bytes_;
};

struct Node {
  uint64_t id = 0;
  std::string name;
  uint64_t type = 0;
  std::vector<uint64_t> needs;
  uint64_t microseconds = 0;
  std::map<std::string, uint64_t> numbers;
  std::string group;
};

void read_attribute(std::string_view bytes, Node& node) {
  Reader reader(bytes);
  std::string name;
  while (!reader.is_done()) {
    const uint64_t key = reader.varint();
    if (key == (1U << 3U | 2U)) {
      name = reader.delimited();
    } else if (key == (29U << 3U | 2U)) {
      EXPECT_EQ(name, "pg_name");
      node.group = reader.delimited();
    } else {
      EXPECT_TRUE(key == 9U << 3U || key == 27U << 3U) << key;
      node.numbers[name] = reader.varint();
    }
  }
}

Node read_node(std::string_view bytes) {
  Node node;
  Reader reader(bytes);
  while (!reader.is_done()) {
    switch (const uint64_t key = reader.varint()) {
      case 1U << 3U:
        node.id = reader.varint();
        break;
      case 2U << 3U | 2U:
        node.name = reader.delimited();
        break;
      case 3U << 3U:
        node.type = reader.varint();
        break;
      case 4U << 3U | 2U: {
        Reader packed(reader.delimited());
        while (!packed.is_done()) node.needs.push_back(packed.varint());
        break;
      }
      case 7U << 3U:
        node.microseconds = reader.varint();
        break;
      case 10U << 3U | 2U:
        read_attribute(reader.delimited(), node);
        break;
      default:
        ADD_FAILURE() << "field " << key;
    }
  }
  return node;
}

std::vector<Node> read_trace(const std::string& file) {
  Reader reader(file);
  EXPECT_EQ(reader.delimited(),
            "\n\x05"
            "0.0.4");
  std::vector<Node> nodes;
  while (!reader.is_done()) nodes.push_back(read_node(reader.delimited()));
  return nodes;
}

constexpr uint64_t kCompute = 4;
constexpr uint64_t kSend = 5;
constexpr uint64_t kReceive = 6;
constexpr uint64_t kCollective = 7;

SimulatedPlans simulate(const std::vector<std::string>& options, int64_t num_ranks) {
  return simulate_all_plans(settings_to_plan(options), num_ranks, StepWork(small_machine()), 2);
}

TEST(ChakraTrace, HasNodesBehindWhatTheyNeed) {
  const SimulatedPlans plans = simulate({"--parallel.pp=2", "--parallel.ep=2"}, 4);
  const ChakraTraces traces = make_chakra_traces(plans);
  ASSERT_EQ(traces.ranks.size(), 4);
  const auto groups = nlohmann::json::parse(traces.groups);
  for (size_t rank = 0; rank < traces.ranks.size(); ++rank) {
    const std::vector<Node> nodes = read_trace(traces.ranks[rank]);
    std::set<uint64_t> types;
    double computed = 0;
    for (size_t i = 0; i < nodes.size(); ++i) {
      const Node& node = nodes[i];
      EXPECT_EQ(node.id, i);
      EXPECT_FALSE(node.name.empty());
      for (const uint64_t need : node.needs) EXPECT_LT(need, node.id) << node.name;
      types.insert(node.type);
      if (node.type == kCompute) computed += 1e-6 * static_cast<double>(node.microseconds);
      if (node.type != kCollective) continue;
      if (node.name.find("results") == std::string::npos) {
        EXPECT_GT(node.numbers.at("comm_size"), 0) << node.name;
      }
      EXPECT_THAT(groups.at(node.group), ::testing::Contains(rank)) << node.name;
    }
    EXPECT_EQ(types, (std::set<uint64_t>{kCompute, kSend, kReceive, kCollective}));
    EXPECT_NEAR(computed, plans.clocks[rank].computed, 0.2 * computed)
        << "exchanges slow the clock's computation, and microseconds are rounded";
  }
}

/// All members of a group have its exchanges in one order; every message has two ends.
TEST(ChakraTrace, RanksFitTogether) {
  const ChakraTraces traces = make_chakra_traces(
      simulate({"--parallel.pp=2", "--parallel.pipeline_chunks=2",
                "--parallel.pipeline_schedule=interleaved", "--parallel.tp=2", "--parallel.ep=4"},
               8));
  std::map<std::string, std::map<size_t, std::vector<std::pair<uint64_t, uint64_t>>>> exchanges;
  using End = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;
  std::multiset<End> sent;
  std::multiset<End> received;
  for (size_t rank = 0; rank < traces.ranks.size(); ++rank) {
    for (const Node& node : read_trace(traces.ranks[rank])) {
      const auto& numbers = node.numbers;
      if (node.type == kCollective) {
        exchanges[node.group][rank].emplace_back(numbers.at("comm_type"), numbers.at("comm_size"));
      } else if (node.type == kSend || node.type == kReceive) {
        (node.type == kSend ? sent : received)
            .insert({numbers.at("comm_src"), numbers.at("comm_dst"), numbers.at("comm_tag"),
                     numbers.at("comm_size")});
        EXPECT_EQ(numbers.at(node.type == kSend ? "comm_src" : "comm_dst"), rank);
      }
    }
  }
  EXPECT_FALSE(sent.empty());
  EXPECT_EQ(sent, received);
  EXPECT_EQ(std::set<End>(sent.begin(), sent.end()).size(), sent.size()) << "a tag is used twice";
  const auto groups = nlohmann::json::parse(traces.groups);
  for (const auto& [group, members] : exchanges) {
    EXPECT_EQ(members.size(), groups.at(group).size());
    for (const auto& [rank, own] : members) EXPECT_EQ(own, members.begin()->second) << group;
  }
}

}  // namespace
}  // namespace tessera

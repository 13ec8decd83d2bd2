#include "train/plan/chakra_trace.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

namespace tessera {
namespace {

/// A message of protocol buffers, as it is written.
class Message {
 public:
  void number(int field, uint64_t value) {
    varint(static_cast<uint64_t>(field) << 3U);
    varint(value);
  }
  void text(int field, std::string_view value) {
    varint(static_cast<uint64_t>(field) << 3U | kDelimited);
    varint(value.size());
    bytes_ += value;
  }
  void message(int field, const Message& value) { text(field, value.bytes_); }
  /// Of a repeated field, packed.
  void numbers(int field, const std::vector<uint64_t>& values) {
    if (values.empty()) return;
    Message packed;
    for (const uint64_t value : values) packed.varint(value);
    message(field, packed);
  }
  void append_to(std::string& file) const {
    Message length;
    length.varint(bytes_.size());
    file += length.bytes_ + bytes_;
  }

 private:
  static constexpr uint64_t kDelimited = 2;

  void varint(uint64_t value) {
    constexpr uint64_t kSeven = 0x7f;
    for (; value > kSeven; value >>= 7U)
      bytes_ += static_cast<char>((value & kSeven) | (kSeven + 1));
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

/// NodeType of et_def.proto.
enum class NodeType : uint8_t {
  kLoad = 2,
  kStore = 3,
  kCompute = 4,
  kSend = 5,
  kReceive = 6,
  kCollective = 7
};

/// CollectiveCommType of et_def.proto.
uint64_t collective_number(CommKind kind) {
  switch (kind) {
    case CommKind::kAllGather:
    case CommKind::kSend:  // around a ring, to all
    case CommKind::kReceive:
      return 2;
    case CommKind::kReduceScatter:
      return 7;
    case CommKind::kAllToAll:
      return 6;
    case CommKind::kBroadcast:
      return 5;
    case CommKind::kBarrier:
      return 9;
    case CommKind::kAllReduce:
      break;
  }
  return 0;
}

// Fields of Node and AttributeProto.
constexpr int kId = 1;
constexpr int kName = 2;
constexpr int kType = 3;
constexpr int kControlDependencies = 4;
constexpr int kMicroseconds = 7;
constexpr int kAttribute = 10;
constexpr int kInt64 = 9;
constexpr int kBool = 27;
constexpr int kText = 29;

Message attribute(std::string_view name, int field, uint64_t value) {
  Message message;
  message.text(1, name);
  message.number(field, value);
  return message;
}

Message attribute(std::string_view name, std::string_view value) {
  Message message;
  message.text(1, name);
  message.text(kText, value);
  return message;
}

using GroupNumbers = std::map<GroupKey, size_t>;

/// Writes one rank's nodes.
class RankWriter {
 public:
  RankWriter(const StepPlan& plan, const PlanWork& works, GroupNumbers& groups)
      : plan_(plan), works_(works), groups_(groups) {}

  std::string run() {
    Message metadata;
    metadata.text(1, "0.0.4");
    metadata.append_to(file_);
    for (const TaskId id : plan_.tasks.ids()) add(id);
    return std::move(file_);
  }

 private:
  using Id = uint64_t;

  void add(TaskId id) {
    const Task& task = plan_.tasks[id];
    const TaskWork& work = works_[id];
    const Lane& lane = plan_.lanes[task.lane];
    if (task.phase == TaskPhase::kWait) {
      // What the step before started is none of this trace's.
      for (const Id started : started_[*task.started_by]) waited_.push_back(started);
      return;
    }
    if (goes_beside(lane)) {
      started_[id] = {beside(task, work, lane.kind)};
    } else if (communicates(lane)) {
      started_[id] = start_all(task, work, lane);
      if (task.phase == TaskPhase::kWhole) {
        for (const Id started : started_[id]) waited_.push_back(started);
      }
    } else {
      if (work.program != nullptr) run_program(task, *work.program);
      if (work.seconds > 0) compute(task.name, work.seconds);
    }
  }

  void run_program(const Task& task, const ProgramTimes& program) {
    std::vector<Id>& inside = inside_[{task.subject.chunk, task.subject.place}];
    for (const ProgramMoment& moment : program.moments) {
      switch (moment.kind) {
        case ProgramMoment::Kind::kCompute:
          compute(task.name, moment.seconds);
          break;
        case ProgramMoment::Kind::kStart:
          inside.push_back(collective(task.name, program.groups[moment.group], moment.comm,
                                      moment.bytes, moment.seconds));
          break;
        case ProgramMoment::Kind::kWait:
          waited_.push_back(inside.at(moment.exchange));
          break;
        case ProgramMoment::Kind::kHostWait:
          break;
      }
    }
    if (task.subject.part.is_last()) inside_.erase({task.subject.chunk, task.subject.place});
  }

  std::vector<Id> start_all(const Task& task, const TaskWork& work, const Lane& lane) {
    std::vector<Id> all;
    if (lane.kind == LaneKind::kMessages) {
      all.push_back(message(task, work, lane));
    } else {
      all.push_back(
          collective(task.name, {lane.name, lane.ranks}, work.comm, work.bytes, work.seconds));
    }
    if (work.program == nullptr) return all;
    for (const ProgramMoment& moment : work.program->moments) {
      if (moment.kind != ProgramMoment::Kind::kStart) continue;
      all.push_back(collective(task.name, work.program->groups[moment.group], moment.comm,
                               moment.bytes, moment.seconds));
    }
    return all;
  }

  /// Behind what its lane did before, and all that was waited for.
  Message begin(NodeType type, std::string_view name, double seconds,
                const std::vector<Id>& before = {}) {
    Message node;
    node.number(kId, next_);
    node.text(kName, name);
    node.number(kType, static_cast<uint64_t>(type));
    std::vector<Id> needs = waited_;
    if (computed_) needs.push_back(*computed_);
    needs.insert(needs.end(), before.begin(), before.end());
    std::ranges::sort(needs);
    needs.erase(std::unique(needs.begin(), needs.end()), needs.end());
    node.numbers(kControlDependencies, needs);
    node.number(kMicroseconds, static_cast<uint64_t>(std::llround(std::max(seconds, 0.0) * 1e6)));
    node.message(kAttribute, attribute("is_cpu_op", kBool, 0));
    return node;
  }

  Id end(const Message& node) {
    node.append_to(file_);
    return next_++;
  }

  void compute(std::string_view name, double seconds) {
    const Message node = begin(NodeType::kCompute, name, seconds);
    waited_.clear();
    computed_ = end(node);
  }

  /// Those of a group follow one another.
  Id collective(std::string_view name, const GroupKey& group, CommKind kind, double bytes,
                double seconds) {
    const size_t number = groups_.try_emplace(group, groups_.size()).first->second;
    const auto last = last_.find(number);
    Message node = begin(NodeType::kCollective,
                         fmt::format("{} {}, {}", comm_kind_name(kind), group.name, name), seconds,
                         last == last_.end() ? std::vector<Id>() : std::vector{last->second});
    node.message(kAttribute, attribute("comm_type", kInt64, collective_number(kind)));
    node.message(kAttribute, attribute("comm_size", kInt64, rounded(bytes)));
    node.message(kAttribute, attribute("pg_name", std::to_string(number)));
    return last_[number] = end(node);
  }

  Id message(const Task& task, const TaskWork& work, const Lane& lane) {
    const bool sends = task.kind == TaskKind::kSend;
    const int64_t peer = lane.ranks.at(task.subject.peer);
    const int64_t from = sends ? plan_.rank : peer;
    const int64_t to = sends ? peer : plan_.rank;
    Message node = begin(sends ? NodeType::kSend : NodeType::kReceive, task.name, work.seconds);
    node.message(kAttribute, attribute("comm_src", kInt64, static_cast<uint64_t>(from)));
    node.message(kAttribute, attribute("comm_dst", kInt64, static_cast<uint64_t>(to)));
    const uint64_t size = sends ? rounded(work.bytes) : received_bytes(task);
    node.message(kAttribute, attribute("comm_size", kInt64, size));
    node.message(kAttribute, attribute("comm_tag", kInt64, tag(lane.name, from, to)));
    return end(node);
  }

  uint64_t received_bytes(const Task& task) const {
    int64_t bytes = 0;
    for (const BufferId id : task.writes) bytes += plan_.buffers[id].bytes;
    return static_cast<uint64_t>(bytes);
  }

  /// The same on both ends, and another for each message between two ranks.
  uint64_t tag(const std::string& lane, int64_t from, int64_t to) {
    const uint64_t number = tags_[{lane, from, to}]++;
    return 2 * number + (lane == "pp" ? 0 : 1);
  }

  /// What goes beside all else follows its lane, and what it is to come after.
  Id beside(const Task& task, const TaskWork& work, LaneKind lane) {
    const bool updates = lane == LaneKind::kHostUpdates;
    const NodeType type = updates                     ? NodeType::kCompute
                          : lane == LaneKind::kStores ? NodeType::kStore
                                                      : NodeType::kLoad;
    std::vector<Id> before;
    if (const auto last = beside_.find(lane); last != beside_.end()) before.push_back(last->second);
    for (const TaskId after : task.after)
      before.insert(before.end(), started_[after].begin(), started_[after].end());
    Message node = begin(type, task.name, work.seconds, before);
    if (!updates)
      node.message(kAttribute, attribute("tensor_size", kInt64, static_cast<uint64_t>(task.bytes)));
    return beside_[lane] = end(node);
  }

  static uint64_t rounded(double bytes) {
    return static_cast<uint64_t>(std::llround(std::max(bytes, 0.0)));
  }

  const StepPlan& plan_;
  const PlanWork& works_;
  GroupNumbers& groups_;
  std::string file_;
  Id next_ = 0;
  std::optional<Id> computed_;     // the last computation
  std::map<LaneKind, Id> beside_;  // the last of each lane
  std::vector<Id> waited_;         // since then
  std::map<size_t, Id> last_;      // by group
  std::map<TaskId, std::vector<Id>> started_;
  std::map<std::pair<int64_t, int64_t>, std::vector<Id>> inside_;  // by chunk and place
  std::map<std::tuple<std::string, int64_t, int64_t>, uint64_t> tags_;
};

}  // namespace

ChakraTraces make_chakra_traces(const SimulatedPlans& plans) {
  ChakraTraces traces;
  GroupNumbers groups;
  for (size_t i = 0; i < plans.plans.size(); ++i)
    traces.ranks.push_back(RankWriter(plans.plans[i], plans.works[i], groups).run());
  nlohmann::ordered_json numbers = nlohmann::ordered_json::object();
  std::vector<const std::vector<int64_t>*> members(groups.size());
  for (const auto& [key, number] : groups) members[number] = &key.ranks;
  for (size_t number = 0; number < members.size(); ++number)
    numbers[std::to_string(number)] = *members[number];
  traces.groups = numbers.dump();
  return traces;
}

}  // namespace tessera

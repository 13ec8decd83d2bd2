#include "sim/step_work.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "model/run/pass_order.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad.h"
#include "program/dependencies.h"
#include "sim/units.h"
#include "step/build/node_types.h"

namespace tessera {
namespace {

using Moment = ProgramMoment;

CommKind kind_of(const Operator& op) {
  const std::string_view name = op.name();
  if (name.starts_with("all_gather")) return CommKind::kAllGather;
  if (name.starts_with("reduce_scatter")) return CommKind::kReduceScatter;
  if (name.starts_with("all_reduce")) return CommKind::kAllReduce;
  if (name.starts_with("ring")) return CommKind::kSend;
  return CommKind::kAllToAll;  // of rows, and of heads
}

bool is_ring(const Operator& op) {
  return op.name().starts_with("ring");
}

/// What a rank brings to an exchange. Around a ring go keys and values; the queries, which come
/// first, stay.
double brought_bytes(const Operator& op, const std::vector<ValueType>& inputs) {
  if (!is_ring(op)) return static_cast<double>(inputs.front().num_bytes());
  double bytes = 0;
  for (size_t i = 1; i < inputs.size(); ++i) bytes += static_cast<double>(inputs[i].num_bytes());
  return bytes;
}

/// Writes the moments of a program down, computation that follows other as one.
class MomentWriter {
 public:
  void compute(const Operator& op, double seconds, double host_seconds) {
    std::vector<Moment>& moments = times_.moments;
    if (moments.empty() || moments.back().kind != Moment::Kind::kCompute) moments.emplace_back();
    Moment& moment = moments.back();
    moment.seconds += seconds;
    // The last of the operators ends behind those before, and behind the host.
    moment.host_seconds += host_seconds;
    moment.launched_seconds = std::max(moment.launched_seconds, moment.host_seconds) + seconds;
    times_.by_operator[std::string(op.name())] += seconds;
  }
  void wait_for_device() { times_.moments.push_back({.kind = Moment::Kind::kHostWait}); }
  int32_t start(const Communicator& group, double seconds, double host_seconds, CommKind comm,
                double bytes, LinkKind link) {
    const GroupKey key{group.name(), group.ranks()};
    const auto found = std::ranges::find(times_.groups, key);
    const auto at = static_cast<int32_t>(found - times_.groups.begin());
    if (found == times_.groups.end()) times_.groups.push_back(key);
    times_.moments.push_back({.kind = Moment::Kind::kStart,
                              .seconds = seconds,
                              .host_seconds = host_seconds,
                              .exchange = count_,
                              .group = at,
                              .comm = comm,
                              .bytes = bytes,
                              .link = link});
    return count_++;
  }
  void wait(int32_t exchange) {
    times_.moments.push_back({.kind = Moment::Kind::kWait, .exchange = exchange});
  }
  /// What follows is written; what was is another part's, whose exchanges count on.
  void begin_part() { times_ = {}; }
  ProgramTimes take() { return std::move(times_); }

 private:
  ProgramTimes times_;
  int32_t count_ = 0;
};

CommKind kind_of(TaskAction action) {
  switch (action) {
    case TaskAction::kReduceBucket:
    case TaskAction::kReduceModule:
      return CommKind::kReduceScatter;
    case TaskAction::kGatherBucket:
    case TaskAction::kGatherModule:
      return CommKind::kAllGather;
    default:
      return CommKind::kAllReduce;
  }
}

/// The rows of a program's experts as a share of their bound: that of what has the fewest, since
/// what a rank sends is not less than all.
double share_of_rows(const Executable& executable, double skew) {
  const std::map<ValueId, int64_t>& expected = executable.rows().expected();
  double share = 1;
  for (const Value& value : executable.program().values()) {
    if (!value.type.ragged()) continue;
    const auto rows = expected.find(value.type.extent.value());
    if (rows == expected.end()) continue;
    const auto bound = static_cast<double>(value.type.shape[value.type.ragged_dim]);
    share = std::min(share, skew * static_cast<double>(rows->second) / bound);
  }
  return share;
}

/// Whether it makes or reads codes of experts' tokens, which have the size of a bound.
bool has_bounded_codes(const Node& node) {
  const std::string_view name = node.op->name();
  return (name == QuantizeTokens::kName && node.inputs.size() > QuantizeTokens::kOffsets) ||
         (name == ScaledGroupedWgrad::kName && node.inputs.size() > ScaledGroupedWgrad::kOffsets);
}

/// Of the tokens that come.
Cost less_bound(Cost cost, const Node& node, const Program& program, double share) {
  cost.flops *= share;
  for (const auto* ids : {&node.inputs, &node.outputs}) {
    for (const ValueType& type : program.types(*ids)) {
      if (type.dtype == DType::kE4M3 && !type.ragged())
        cost.bytes -= (1 - share) * static_cast<double>(type.num_bytes());
    }
  }
  return cost;
}

ProgramTimes slow_down(ProgramTimes times, const Slowdown& slowdown) {
  for (Moment& moment : times.moments)
    moment.seconds *= moment.kind == Moment::Kind::kCompute ? slowdown.computing : slowdown.links;
  for (auto& [name, seconds] : times.by_operator) seconds *= slowdown.computing;
  return times;
}

/// Of what is no run of a program of the model.
TaskWork slow_down(TaskWork work, const Lane& lane, const Slowdown& slowdown) {
  if (!goes_beside(lane)) work.seconds *= communicates(lane) ? slowdown.links : slowdown.computing;
  if (work.program != nullptr)
    work.program = std::make_shared<const ProgramTimes>(slow_down(*work.program, slowdown));
  return work;
}

bool is_of_modules(TaskAction action) {
  return action == TaskAction::kReduceModule || action == TaskAction::kGatherModule;
}

}  // namespace

std::span<const std::string_view> exposable_groups() {
  static constexpr std::string_view kGroups[] = {
      "tp", "ring",    "heads",          "micro_batch",    "etp",
      "ep", "experts", "dense_replicas", "expert_replicas"};
  return kGroups;
}

StepWork::StepWork(const Hardware& hardware, const SimulationOptions& options)
    : hardware_(hardware),
      options_(options),
      kernels_(hardware_, options.software.operator_shares),
      links_(hardware_) {}

/// All wait for the fullest rank; but where ranks share processors, those that are done leave
/// theirs to it, so that what all together have to do takes as long in any case.
double StepWork::skew_of(const Task& task, const StagePrograms& programs,
                         double processor_share) const {
  double skew = options_.skew;
  if (!options_.routing.empty() && task.subject.program.part == ProgramPart::kLayer) {
    const PipelineChunk& chunk = programs.part.chunks.at(task.subject.chunk);
    skew = options_.routing.skew(chunk.first_layer + task.subject.program.idx,
                                 programs.part.groups.ep->size());
  }
  return std::max(skew * std::min(processor_share, 1.0), std::min(skew, 1.0));
}

double StepWork::node_seconds(const Executable& executable, const Node& node, double skew,
                              int64_t pieces) const {
  const std::vector<ValueType> inputs = types_at(executable, node.inputs, skew);
  if (options_.software.stores_scores) {
    if (const auto seconds = stored_scores_seconds(node, inputs.front(), hardware_))
      return kMicro * hardware_.gap_microseconds + *seconds;
  }
  Cost cost = node.op->cost(inputs, types_at(executable, node.outputs, skew));
  if (has_bounded_codes(node))
    cost = less_bound(cost, node, executable.program(), share_of_rows(executable, skew));
  const auto count = static_cast<double>(pieces);
  const Cost piece{.flops = cost.flops / count, .bytes = cost.bytes / count};
  return count * (kMicro * hardware_.gap_microseconds +
                  kernels_.seconds(node.op->name(), operand_format(inputs), piece));
}

double StepWork::exchange_seconds(const Executable& executable, const Node& node,
                                  const Communicator& group, double skew) const {
  const std::vector<ValueType> inputs = types_at(executable, node.inputs, skew);
  if (is_ring(*node.op)) {
    const double bytes = brought_bytes(*node.op, inputs);
    double seconds = 0;
    for (int64_t i = 0; i + 1 < group.size(); ++i)
      seconds += links_.message_seconds(group.ranks()[i], group.ranks()[i + 1], bytes);
    return seconds;
  }
  const CommKind kind = kind_of(*node.op);
  const double bytes = brought_bytes(*node.op, inputs);
  return links_.exchange_seconds(kind, group.ranks(), sent_bytes(kind, group.size(), bytes));
}

ClockOptions StepWork::clock_options(int64_t num_ranks) const {
  ClockOptions options{.exchange_share = hardware_.exchange_share,
                       .exposed = options_.exposed,
                       .updates_beside = !hardware_.on_host};
  if (hardware_.node_processors > 0) {
    options.processor_share = static_cast<double>(hardware_.node_processors) /
                              static_cast<double>(std::min(num_ranks, hardware_.node_devices));
  }
  return options;
}

ProgramTimes StepWork::find(const Executable& executable, const RunPart& part, double skew) const {
  const Program& program = executable.program();
  const std::vector<int> waits = tessera::find_waits(program);
  const std::vector<bool> tells = find_tellers(program, executable.backend());
  const Pieces pieces = find_pieces(options_.software, program);
  std::multimap<int, int32_t> under_way;  // by the node before which an exchange is waited for
  MomentWriter writer;
  const auto wait_before = [&](int node) {
    for (auto [at, last] = under_way.equal_range(node); at != last; ++at) writer.wait(at->second);
  };
  const auto end = part.is_last() ? static_cast<int>(program.nodes().size()) : part.end;
  for (int i = 0; i < end; ++i) {
    if (i == part.begin) writer.begin_part();
    wait_before(i);
    const Node& node = program.nodes()[i];
    const Communicator* const group = group_of(*node.op);
    const bool exchanges = group != nullptr && group->size() > 1;
    const double given = host_seconds(options_.software, hardware_, program, node);
    if (exchanges) {
      double seconds = exchange_seconds(executable, node, *group, skew);
      if (const auto found = pieces.product_of.find(i); found != pieces.product_of.end()) {
        const Node& product = program.nodes()[found->second];
        seconds = pipelined_seconds(seconds, node_seconds(executable, product, skew, group->size()),
                                    group->size());
      }
      const double bytes = brought_bytes(*node.op, types_at(executable, node.inputs, skew));
      under_way.emplace(waits[i], writer.start(*group, seconds, given, kind_of(*node.op), bytes,
                                               links_.link_of(group->ranks())));
    }
    if (group == nullptr || is_ring(*node.op)) {
      writer.compute(*node.op, node_seconds(executable, node, skew, pieces.of_node[i]), given);
    }
    if (tells[i] && options_.software.graphs != LaunchGraphs::kAll) writer.wait_for_device();
  }
  if (part.is_last()) wait_before(end);
  return writer.take();
}

double StepWork::memory_seconds(const Task& task) const {
  const bool updates = task.action == TaskAction::kUpdate && hardware_.update_gbs > 0;
  const double rate =
      updates ? kGiga * hardware_.update_gbs : hardware_.memory_share * hardware_.memory_rate();
  return static_cast<double>(task.bytes) / rate;
}

/// The ranks of a node share its host's memory; a processor updates as it does in any case.
double StepWork::host_update_seconds(const Task& task, int64_t num_ranks) const {
  if (hardware_.on_host) return memory_seconds(task);
  const auto sharing = static_cast<double>(std::min(num_ranks, hardware_.node_devices));
  return static_cast<double>(task.bytes) * sharing / (kGiga * hardware_.host_update_gbs);
}

/// What a task exchanges beside its own lane's group.
TaskWork StepWork::exchange_of(const StepPlan& plan, const Task& task) const {
  const CommKind kind = kind_of(task.action);
  ProgramTimes inner;
  double own = static_cast<double>(task.bytes);
  for (const InnerExchanges& inside : task.inside) {
    const Lane& lane = plan.lanes[inside.lane];
    const double sent = sent_bytes(CommKind::kReduceScatter, std::ssize(lane.ranks),
                                   static_cast<double>(inside.bytes));
    if (is_of_modules(task.action)) own -= sent;
    const auto number = static_cast<int32_t>(inner.groups.size());
    inner.groups.push_back({lane.name, lane.ranks});
    inner.moments.push_back({.kind = Moment::Kind::kStart,
                             .seconds = links_.exchange_seconds(kind, lane.ranks, sent),
                             .exchange = number,
                             .group = number,
                             .comm = kind,
                             .bytes = static_cast<double>(inside.bytes),
                             .link = links_.link_of(lane.ranks)});
  }
  const Lane& lane = plan.lanes[task.lane];
  TaskWork work{.comm = kind, .bytes = std::max(own, 0.0)};
  if (lane.kind == LaneKind::kMessages) {
    work.seconds = links_.message_seconds(plan.rank, lane.ranks.at(task.subject.peer), own);
  } else if (lane.kind == LaneKind::kGroup) {
    work.seconds = links_.exchange_seconds(kind, lane.ranks, std::max(own, 0.0));
    work.link = links_.link_of(lane.ranks);
  } else {
    for (int32_t i = 0; i < std::ssize(inner.groups); ++i)
      inner.moments.push_back({.kind = Moment::Kind::kWait, .exchange = i});
    work.seconds = memory_seconds(task);
  }
  if (!inner.groups.empty()) work.program = std::make_shared<const ProgramTimes>(std::move(inner));
  return work;
}

TaskWork StepWork::other_of(const StepPlan& plan, const Task& task, int64_t num_ranks) const {
  const Lane& lane = plan.lanes[task.lane];
  if (lane.kind == LaneKind::kHostUpdates && task.phase == TaskPhase::kStart)
    return {.seconds = host_update_seconds(task, num_ranks)};
  if (goes_beside(lane) && lane.kind != LaneKind::kHostUpdates)
    return {.seconds = static_cast<double>(task.bytes) / (kGiga * hardware_.host_gbs)};
  if (task.phase == TaskPhase::kWait) return {};
  if (task.action == TaskAction::kEnd) return {.seconds = kMicro * hardware_.step_microseconds};
  if (communicates(lane) || !task.inside.empty()) return exchange_of(plan, task);
  return {.seconds = memory_seconds(task)};
}

PlanWork StepWork::find(const StepPlan& plan, const StagePrograms& programs, int64_t num_ranks,
                        const Slowdown& slowdown) const {
  const double processor_share = clock_options(num_ranks).processor_share;
  using Key = std::tuple<const Executable*, int, int, double>;
  std::map<Key, std::shared_ptr<const ProgramTimes>> known;
  PlanWork work;
  for (const Task& task : plan.tasks) {
    if (task.action != TaskAction::kRunProgram) {
      work.add(slow_down(other_of(plan, task, num_ranks), plan.lanes[task.lane], slowdown));
      continue;
    }
    const Executable& executable = find_executable(
        programs, programs.part.chunks.at(task.subject.chunk), task.subject.program);
    const RunPart& part = task.subject.part;
    const double skew = skew_of(task, programs, processor_share);
    std::shared_ptr<const ProgramTimes>& times = known[{&executable, part.begin, part.end, skew}];
    if (times == nullptr) {
      times =
          std::make_shared<const ProgramTimes>(slow_down(find(executable, part, skew), slowdown));
    }
    work.add({.program = times});
  }
  return work;
}

}  // namespace tessera

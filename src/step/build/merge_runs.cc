#include "step/build/merge_runs.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "program/dependencies.h"
#include "step/build/node_types.h"
#include "step/simulate_plan.h"

namespace tessera {
namespace {

/// What a part takes by estimate.
struct PartTimes {
  double computing = 0;
  struct Exchange {
    double seconds = 0;
    int wait = 0;  ///< the node before which it is waited for
  };
  std::vector<Exchange> exchanges;

  double total() const {
    double sum = computing;
    for (const Exchange& exchange : exchanges) sum += exchange.seconds;
    return sum;
  }
};

PartTimes estimate(const Executable& executable, const RunPart& part) {
  const Program& program = executable.program();
  const MachineRates rates = estimated_rates(executable.backend().is_host());
  const std::vector<int> waits = find_waits(program);
  const int end = part.is_last() ? static_cast<int>(program.nodes().size()) : part.end;
  PartTimes times;
  for (int i = part.begin; i < end; ++i) {
    const Node& node = program.nodes()[i];
    const std::vector<ValueType> inputs = types_at(executable, node.inputs);
    if (node.op->communicates()) {
      double bytes = 0;
      for (const ValueType& type : inputs) bytes += static_cast<double>(type.num_bytes());
      times.exchanges.push_back({rates.exchange_seconds + bytes / rates.link_bytes, waits[i]});
      continue;
    }
    const Cost cost = node.op->cost(inputs, types_at(executable, node.outputs));
    times.computing +=
        rates.kernel_seconds + std::max(cost.flops / rates.flops, cost.bytes / rates.memory_bytes);
  }
  return times;
}

/// The parts of a pass, and how far it has come.
class MergedPass {
 public:
  MergedPass(std::span<const StepRun> runs, bool is_forward) {
    for (size_t run = 0; run < runs.size(); ++run) {
      RunPart part;
      for (const int point : runs[run].executable->wait_points()) {
        part.end = point;
        add(runs[run], {is_forward, run, part});
        part.begin = point;
      }
      part.end = RunPart::kToTheEnd;
      add(runs[run], {is_forward, run, part});
    }
  }

  bool is_done() const { return next_ == parts_.size(); }
  size_t done() const { return next_; }
  size_t size() const { return parts_.size(); }
  double seconds_left() const { return left_; }
  ProgramPart next_of() const { return kinds_[next_]; }
  bool has_only_layers_left() const {
    return std::all_of(kinds_.begin() + static_cast<ptrdiff_t>(next_), kinds_.end(),
                       [](ProgramPart kind) { return kind == ProgramPart::kLayer; });
  }

  /// When what the next part waits for is over.
  double ready() const {
    double ready = 0;
    for (const auto& [wait, end] : under_way_) {
      if (needs(wait)) ready = std::max(ready, end);
    }
    return ready;
  }

  /// Runs the next part from `now`, which becomes its end; exchanges follow one another.
  MergedPart take(double& now, double& link_free) {
    now = std::max(now, ready());
    std::erase_if(under_way_, [&](const auto& exchange) { return needs(exchange.first); });
    const PartTimes& times = *times_[next_];
    now += times.computing;
    for (const PartTimes::Exchange& exchange : times.exchanges) {
      link_free = std::max(link_free, now) + exchange.seconds;
      double& end = under_way_[exchange.wait];
      end = std::max(end, link_free);
    }
    left_ -= times.total();
    return parts_[next_++];
  }

 private:
  void add(const StepRun& run, const MergedPart& part) {
    const std::tuple key(run.executable, part.part.begin, part.part.end);
    const auto [known, is_new] = known_.try_emplace(key);
    if (is_new) known->second = estimate(*run.executable, part.part);
    parts_.push_back(part);
    kinds_.push_back(run.ref.part);
    times_.push_back(&known->second);
    left_ += known->second.total();
  }
  /// A run begins behind all exchanges of the one before.
  bool needs(int wait) const {
    return parts_[next_].part.is_first() || wait <= parts_[next_].part.begin;
  }

  std::map<std::tuple<const Executable*, int, int>, PartTimes> known_;
  std::vector<MergedPart> parts_;
  std::vector<ProgramPart> kinds_;
  std::vector<const PartTimes*> times_;
  std::map<int, double> under_way_;  // ends of exchanges by the node before which they must be over
  size_t next_ = 0;
  double left_ = 0;
};

bool is_forward_next(const MergedPass& forward, const MergedPass& backward, double now,
                     bool same_shapes) {
  if (forward.is_done() || backward.is_done()) return backward.is_done();
  if (forward.next_of() == ProgramPart::kHead && !backward.has_only_layers_left()) return false;
  if (!same_shapes) return forward.done() * backward.size() <= backward.done() * forward.size();
  const double forward_at = std::max(now, forward.ready());
  const double backward_at = std::max(now, backward.ready());
  if (forward_at != backward_at) return forward_at < backward_at;
  return forward.seconds_left() > backward.seconds_left();
}

}  // namespace

std::vector<MergedPart> merge_runs(std::span<const StepRun> forward,
                                   std::span<const StepRun> backward, bool same_shapes) {
  MergedPass forward_pass(forward, true);
  MergedPass backward_pass(backward, false);
  std::vector<MergedPart> order;
  double now = 0;
  double link_free = 0;
  while (!forward_pass.is_done() || !backward_pass.is_done()) {
    MergedPass& next = is_forward_next(forward_pass, backward_pass, now, same_shapes)
                           ? forward_pass
                           : backward_pass;
    order.push_back(next.take(now, link_free));
  }
  return order;
}

}  // namespace tessera

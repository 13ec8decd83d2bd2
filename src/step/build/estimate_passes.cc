#include "step/build/estimate_passes.h"

#include <algorithm>
#include <map>
#include <utility>

#include "program/dependencies.h"
#include "step/build/node_types.h"

namespace tessera {
namespace {

int64_t sum_bytes(const std::vector<ValueType>& types) {
  int64_t bytes = 0;
  for (const ValueType& type : types) bytes += type.num_bytes();
  return bytes;
}

/// Walks over a step's runs with the copies that go on beside them.
class PassWalk {
 public:
  PassWalk(const StagePrograms& programs, const SavedPlacement& placement,
           const MachineRates& rates)
      : programs_(programs), rates_(rates) {
    for (const LayerOffload& offload : placement.offloads) {
      at_forward_.emplace(offload.forward, &offload);
      at_stored_.emplace(offload.stored, &offload);
      at_reload_.emplace(offload.reload, &offload);
      at_backward_.emplace(offload.backward, &offload);
    }
  }

  void run(const Executable* executable, int at) {
    each(at_stored_, at, [&](const LayerOffload* one) { wait(stored_.at(one)); });
    each(at_reload_, at, [&](const LayerOffload* one) { reloaded_[one] = copy(*one, reloads_); });
    each(at_backward_, at, [&](const LayerOffload* one) { wait(reloaded_.at(one)); });
    const auto [found, is_new] = known_.try_emplace(executable, 0);
    if (is_new) found->second = estimate_seconds(*executable, rates_);
    now_ += found->second;
    each(at_forward_, at, [&](const LayerOffload* one) { stored_[one] = copy(*one, stores_); });
  }

  double now() const { return now_; }

 private:
  using ByRun = std::multimap<int, const LayerOffload*>;

  template <typename Use>
  static void each(const ByRun& offloads, int run, const Use& use) {
    for (auto [at, last] = offloads.equal_range(run); at != last; ++at) use(at->second);
  }

  void wait(double until) { now_ = std::max(now_, until); }

  /// Returns when a copy is over that begins behind those of its direction.
  double copy(const LayerOffload& offload, double& free_at) {
    const auto bytes = static_cast<double>(
        layer_moved_bytes(programs_, programs_.part.chunks[offload.chunk], offload.layer));
    free_at = std::max(free_at, now_) + bytes / rates_.host_bytes;
    now_ += bytes / rates_.memory_bytes;
    return free_at;
  }

  const StagePrograms& programs_;
  const MachineRates& rates_;
  ByRun at_forward_, at_stored_, at_reload_, at_backward_;
  std::map<const LayerOffload*, double> stored_, reloaded_;
  std::map<const Executable*, double> known_;
  double stores_ = 0;
  double reloads_ = 0;
  double now_ = 0;
};

}  // namespace

double estimate_seconds(const Executable& executable, const MachineRates& rates) {
  const Program& program = executable.program();
  const std::vector<int> waits = find_waits(program);
  std::multimap<int, double> under_way;  // by the node before which an exchange is waited for
  double now = 0;
  double link_free = 0;
  for (int i = 0; i < std::ssize(program.nodes()); ++i) {
    for (auto [at, last] = under_way.equal_range(i); at != last; ++at)
      now = std::max(now, at->second);
    const Node& node = program.nodes()[i];
    const std::vector<ValueType> inputs = types_at(executable, node.inputs);
    const Cost cost = node.op->cost(inputs, types_at(executable, node.outputs));
    now +=
        rates.kernel_seconds + std::max(cost.flops / rates.flops, cost.bytes / rates.memory_bytes);
    if (node.op->communicates()) {
      link_free = std::max(link_free, now) + rates.exchange_seconds +
                  static_cast<double>(sum_bytes(inputs)) / rates.link_bytes;
      under_way.emplace(waits[i], link_free);
    }
  }
  return std::max(now, link_free);
}

double estimate_passes(const std::vector<StepRun>& runs, const StagePrograms& programs,
                       const SavedPlacement& placement, const MachineRates& rates) {
  PassWalk walk(programs, placement, rates);
  int at = 0;
  // A run in parts counts where it ends.
  for (const StepRun& run : runs) {
    if (run.part.is_last()) walk.run(run.executable, at);
    ++at;
  }
  return walk.now();
}

}  // namespace tessera

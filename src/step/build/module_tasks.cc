#include <algorithm>
#include <functional>
#include <optional>

#include "step/build/parameter_tasks.h"

namespace tessera {
namespace {

/// The modules of parameters, the largest first.
std::vector<size_t> modules_of(const ShardedExchanges& exchanges,
                               const std::vector<ProgramParameters::Place>& places) {
  std::vector<size_t> modules;
  for (const ProgramParameters::Place& place : places) {
    const size_t module = exchanges.module_of[place.parameter];
    if (std::ranges::find(modules, module) == modules.end()) modules.push_back(module);
  }
  std::ranges::stable_sort(modules, std::greater<>(),
                           [&](size_t module) { return exchanges.modules[module].gathered_bytes; });
  return modules;
}

class ModuleTasks final : public ParameterTasks {
 public:
  ModuleTasks(PlanWriter& writer, const ShardedExchanges& exchanges,
              const std::vector<StepRun>& runs)
      : writer_(writer),
        exchanges_(exchanges),
        runs_(runs),
        weight_slots_(exchanges.weight_buffers),
        gradient_slots_(exchanges.gradient_buffers) {}

  void before_run(size_t idx, Task& task) override {
    const StepRun& run = runs_[idx];
    for (const size_t module : modules_of(exchanges_, run.parameters.weights)) {
      if (exchanges_.modules[module].is_sharded()) gather(module);
    }
    if (idx + 1 < runs_.size()) gather_ahead(runs_[idx + 1]);
    bind_weights(run, task);
    bind_gradients(run, task);
  }

  void after_run(size_t idx) override {
    const ProgramParameters& parameters = runs_[idx].parameters;
    for (Slot& slot : weight_slots_) {
      const auto modules = modules_of(exchanges_, parameters.weights);
      if (slot.module && std::ranges::find(modules, *slot.module) != modules.end()) slot = {};
    }
    for (const size_t module : modules_of(exchanges_, parameters.gradients)) reduce(module);
  }

  void finish_gradients() override {
    while (Slot* const slot = oldest_reduction()) complete(*slot);
    Task task{.action = TaskAction::kFinishGradients,
              .lane = writer_.lane(LaneKind::kHost),
              .name = "gradients are complete"};
    tessera::update(task, gradient_shares());
    for (const CommunicatorPtr& replicas : exchanges_.replicas) {
      task.kind = TaskKind::kExchange;
      task.name = "sum gradients over the copies";
      task.inside.push_back({writer_.group(*replicas), 1, 0});
    }
    writer_.add(std::move(task));
  }

  std::optional<TaskId> update(const Communicator& world,
                               const std::vector<BufferId>& /*results*/) override {
    Task judge{.kind = TaskKind::kOptimizer,
               .action = TaskAction::kJudge,
               .lane = writer_.lane(LaneKind::kOptimizer),
               .name = "gradient norm"};
    read(judge, gradient_shares());
    if (world.size() > 1) judge.inside.push_back({writer_.group(world), 1, sizeof(double)});
    Task task{.kind = TaskKind::kOptimizer,
              .action = TaskAction::kUpdate,
              .lane = judge.lane,
              .name = "update, all shares",
              .flops = exchanges_.update_flops,
              .bytes = 2 * exchanges_.state_bytes,
              .only_on_update = true};
    task.after.push_back(writer_.add(std::move(judge)));
    read(task, gradient_shares());
    tessera::update(task, weight_shares());
    writer_.add(std::move(task));
    return std::nullopt;
  }

 private:
  /// A buffer that modules use one after the other.
  struct Slot {
    std::optional<size_t> module;
    BufferId buffer = {};
    std::optional<TaskId> start;  ///< of its exchange
    bool waited = false;          ///< of weights
    int64_t turn = 0;             ///< of gradients: when their reduction began; 0: not yet
    std::vector<size_t> units;    ///< of gradients: those that a run adds to
  };

  const ModuleExchange& at(size_t module) const { return exchanges_.modules[module]; }
  BufferId weight_shares() {
    return writer_.state("shares of weights, moments", exchanges_.state_bytes);
  }
  BufferId gradient_shares() { return writer_.state("shares of gradients", 0); }

  static Slot* find(std::vector<Slot>& slots, std::optional<size_t> module) {
    const auto slot = std::ranges::find_if(
        slots, [&](const Slot& s) { return s.module == module && s.turn == 0; });
    return slot == slots.end() ? nullptr : &*slot;
  }

  const UnitExchange& unit_of(size_t parameter, size_t& unit) const {
    const auto& units = at(exchanges_.module_of[parameter]).units;
    unit = std::ranges::find_if(units,
                                [&](const UnitExchange& u) {
                                  return std::ranges::find(u.parameters, parameter) !=
                                         u.parameters.end();
                                }) -
           units.begin();
    return units.at(unit);
  }

  BufferId take(const std::string& what, size_t module, size_t slot, int64_t bytes, Purpose purpose,
                int64_t slot_bytes) {
    return writer_.buffer(fmt::format("{} of {}, #{}", what, at(module).name, num_taken_++), bytes,
                          {.name = fmt::format("{} of modules, buffer {}", what, slot),
                           .bytes = slot_bytes,
                           .purpose = purpose});
  }

  /// The first unit's group is the task's lane.
  Task exchange(size_t module, TaskAction action, const std::string& what,
                const std::vector<size_t>& units, int64_t UnitExchange::*bytes) {
    Task task{.kind = TaskKind::kExchange,
              .action = action,
              .name = fmt::format("{}, {}", what, at(module).name),
              .subject = {.unit = static_cast<int64_t>(module)}};
    for (const size_t idx : units) {
      const UnitExchange& unit = at(module).units[idx];
      const LaneId lane = writer_.group(*unit.shard);
      if (idx == units.front()) {
        task.lane = lane;
      } else {
        task.inside.push_back({lane, 1, unit.*bytes});
      }
      task.bytes += unit.*bytes - unit.*bytes / unit.shard->size();
    }
    return task;
  }

  std::vector<size_t> sharded_units(size_t module) const {
    std::vector<size_t> units;
    for (size_t u = 0; u < at(module).units.size(); ++u) {
      if (at(module).units[u].is_sharded) units.push_back(u);
    }
    return units;
  }

  void gather(size_t module) {
    if (find(weight_slots_, module) != nullptr) return;
    Slot* const slot = find(weight_slots_, std::nullopt);
    ensure(slot != nullptr, "module {} is needed while all {} buffers are in use", module,
           weight_slots_.size());
    slot->module = module;
    slot->buffer = take("gathered weights", module, slot - weight_slots_.data(),
                        at(module).gathered_bytes, Purpose::kGathered, exchanges_.max_weight_bytes);
    Task task = exchange(module, TaskAction::kGatherModule, "gather weights", sharded_units(module),
                         &UnitExchange::weight_bytes);
    read(task, weight_shares());
    write(task, slot->buffer);
    slot->start = writer_.start(std::move(task));
  }

  void gather_ahead(const StepRun& run) {
    for (const size_t module : modules_of(exchanges_, run.parameters.weights)) {
      if (at(module).is_sharded() && find(weight_slots_, std::nullopt) != nullptr) gather(module);
    }
  }

  void bind_weights(const StepRun& run, Task& task) {
    for (const size_t module : modules_of(exchanges_, run.parameters.weights)) {
      Slot* const slot = find(weight_slots_, module);
      if (slot == nullptr) continue;
      if (!slot->waited) writer_.wait_for(*slot->start);
      slot->waited = true;
      read(task, slot->buffer);
    }
    read(task, weight_shares());
  }

  void bind_gradients(const StepRun& run, Task& task) {
    for (const ProgramParameters::Place& place : run.parameters.gradients) {
      size_t unit = 0;
      if (!unit_of(place.parameter, unit).is_sharded) {
        tessera::update(task, gradient_shares());
        continue;
      }
      Slot& slot = take_gradients(exchanges_.module_of[place.parameter]);
      // The run that takes a buffer zeroes it first.
      const bool is_own = std::ranges::find(task.writes, slot.buffer) != task.writes.end();
      if (!slot.units.empty() && !is_own) read(task, slot.buffer);
      write(task, slot.buffer);
      if (std::ranges::find(slot.units, unit) == slot.units.end()) slot.units.push_back(unit);
    }
  }

  Slot& take_gradients(size_t module) {
    if (Slot* const slot = find(gradient_slots_, module)) return *slot;
    Slot* slot = find(gradient_slots_, std::nullopt);
    if (slot == nullptr) {
      slot = oldest_reduction();
      ensure(slot != nullptr, "gradients of module {} while all {} buffers are in use", module,
             gradient_slots_.size());
      complete(*slot);
    }
    int64_t bytes = 0;
    for (const UnitExchange& unit : at(module).units)
      bytes += unit.is_sharded ? unit.gradient_bytes : 0;
    slot->module = module;
    slot->buffer = take("gradients", module, slot - gradient_slots_.data(), bytes,
                        Purpose::kReduced, exchanges_.max_gradient_bytes);
    return *slot;
  }

  void reduce(size_t module) {
    Slot* const slot = find(gradient_slots_, module);
    if (slot == nullptr) return;
    std::ranges::sort(slot->units);
    Task task = exchange(module, TaskAction::kReduceModule, "reduce gradients", slot->units,
                         &UnitExchange::reduced_bytes);
    tessera::update(task, slot->buffer);
    slot->start = writer_.start(std::move(task));
    slot->turn = ++num_reductions_;
  }

  Slot* oldest_reduction() {
    Slot* oldest = nullptr;
    for (Slot& slot : gradient_slots_) {
      if (slot.turn > 0 && (oldest == nullptr || slot.turn < oldest->turn)) oldest = &slot;
    }
    return oldest;
  }

  void complete(Slot& slot) {
    writer_.add_to(writer_.wait_for(*slot.start), gradient_shares());
    slot = {};
  }

  PlanWriter& writer_;
  const ShardedExchanges& exchanges_;
  const std::vector<StepRun>& runs_;
  std::vector<Slot> weight_slots_, gradient_slots_;
  int64_t num_taken_ = 0;
  int64_t num_reductions_ = 0;
};

}  // namespace

std::unique_ptr<ParameterTasks> write_module_tasks(PlanWriter& writer,
                                                   const ShardedExchanges& exchanges,
                                                   const std::vector<StepRun>& runs) {
  return std::make_unique<ModuleTasks>(writer, exchanges, runs);
}

}  // namespace tessera

#include "runtime/executable.h"

#include <algorithm>
#include <iostream>
#include <set>
#include <utility>

#include "core/process/stopwatch.h"
#include "program/dependencies.h"
#include "runtime/slab_of.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

/// The exchanges of one run that were started and not yet waited for, in the order of their starts.
class Exchanges {
 public:
  Exchanges(const Program& program, Device& device, const NodeObserver& observer)
      : program_(program), device_(device), observer_(observer) {}

  /// Takes over what node `idx` started, to be complete before node `wait`.
  void add(size_t idx, Pending pending, int wait) {
    under_way_.push_back({std::move(pending), idx, wait, nullptr});
  }
  /// The same for a node that was given to a side lane.
  void add_aside(size_t idx, SideLane& lane, int wait) {
    under_way_.push_back({Pending(), idx, wait, &lane});
  }
  /// Waits for those that node `idx` needs.
  void wait_before(int idx) {
    for (Exchange& exchange : under_way_) {
      if (exchange.wait == idx) finish(exchange);
    }
    std::erase_if(under_way_, [=](const Exchange& exchange) { return exchange.wait == idx; });
  }
  /// Back ends without a thread of their own move data only when they are called.
  void progress() {
    for (Exchange& exchange : under_way_) exchange.pending.done();
  }

 private:
  struct Exchange {
    Pending pending;
    size_t node = 0;
    int wait = 0;
    SideLane* lane = nullptr;  // it is no exchange, but work there
  };

  void finish(Exchange& exchange) {
    if (exchange.lane != nullptr) return exchange.lane->join();
    const Device::Mark begin = observer_ ? device_.mark() : 0;
    exchange.pending.wait();
    if (!observer_) return;
    const Node& node = program_.nodes()[exchange.node];
    device_.when_known(begin, device_.mark(),
                       [&program = program_, &node, observer = observer_](auto from, auto to) {
                         observer({program, node, NodeEvent::Phase::kWait, from, to});
                       });
  }

  const Program& program_;
  Device& device_;
  const NodeObserver& observer_;
  std::vector<Exchange> under_way_;
};

Executable::Executable(Program program, const Backend& backend, const std::vector<ValueId>& saved,
                       const std::map<ValueId, int64_t>& told,
                       const std::vector<ValueId>& offloaded,
                       const std::map<ValueId, int64_t>& expected)
    : program_(std::move(program)),
      backend_(backend),
      plan_(plan_memory(
          program_, saved,
          [&](const Operator& op, std::span<const ValueType> inputs) {
            return backend.workspace_bytes(op, inputs);
          },
          offloaded)),
      waits_(find_waits(program_)),
      prepared_(std::make_shared<PreparedRuns>()) {
  std::vector<bool> apart;
  for (const Node& node : program_.nodes()) {
    backend.check_formats(*node.op, program_.types(node.inputs));
    backend.check_formats(*node.op, program_.types(node.outputs));
    const Kernel& kernel = backend.kernel(*node.op);
    ensure(node.op->communicates() || !kernel.is_asynchronous(),
           "operator '{}' does not communicate, but its kernel is asynchronous", node.op->name());
    kernels_.push_back(kernel);
    apart.push_back(node.op->communicates() || kernel.tells_the_host());
  }
  const bool some_aside = std::ranges::any_of(program_.nodes(), &Node::aside);
  ensure(!some_aside || (backend_.side_lane() != nullptr && std::ranges::count(apart, true) == 0),
         "program '{}': nodes run aside, and others need the host", program_.name());
  segments_ = cut_segments(apart, waits_);
  rows_ = RowPlan(program_, plan_, find_tellers(program_, backend_), told, expected);
}

Bindings Executable::make_bindings() const {
  Bindings bindings;
  bindings.tensors.resize(program_.num_values());
  return bindings;
}

Tensor Executable::at_bound(const Bindings& bindings, ValueId id) const {
  const Placement& placement = plan_.values[id];
  const ValueType& type = program_.type(id);
  if (placement.storage == Storage::kBound) return bindings.tensors[id];
  return {slab_of(bindings, placement.storage) + placement.offset, type.dtype, type.shape,
          backend_.is_host() ? nullptr : &backend_.device(), type.scale};
}

Tensor Executable::view(const Bindings& bindings, ValueId id) const {
  Tensor tensor = at_bound(bindings, id);
  const ValueType& type = program_.type(id);
  if (!tensor || !type.ragged()) return tensor;
  int64_t extent = 0;
  backend_.device().copy(&extent, at_bound(bindings, type.extent.value()).as<int64_t>(),
                         sizeof(extent));
  ensure(extent >= 0 && extent <= type.shape[type.ragged_dim],
         "'{}' has extent {} over its bound {}", program_.value(id).name, extent,
         type.shape[type.ragged_dim]);
  tensor.shape[type.ragged_dim] = extent;
  return tensor;
}

void Executable::check_bindings(const Bindings& bindings) const {
  ensure(bindings.tensors.size() == program_.values().size(),
         "program '{}': {} bindings for {} values", program_.name(), bindings.tensors.size(),
         program_.values().size());
  for (ValueId id = 0; id < program_.num_values(); ++id) {
    if (plan_.values[id].storage != Storage::kBound) continue;
    const Tensor& tensor = bindings.tensors[id];
    const Value& value = program_.value(id);
    if (!tensor && value.kind == ValueKind::kAccumulator) continue;
    const bool is_set = tensor || value.type.num_bytes() == 0;
    if (is_set && tensor.dtype == value.type.dtype && tensor.scale == value.type.scale &&
        tensor.shape == value.type.shape)
      continue;
    // Text is made only here, for this is part of every run.
    internal_error("program '{}': '{}' is bound to {} {}, expected {}", program_.name(), value.name,
                   tensor ? dtype_name(tensor.dtype) : "nothing", tensor.shape.to_string(),
                   value.type.to_string());
  }
}

/// What a kernel gets: on the host actual extents, where this very node does not make them. On a
/// device all of it is the device's, also what the host reaches too, since it is the device that
/// reads and writes it.
Tensor Executable::argument(const Bindings& bindings, const Node& node, ValueId id) const {
  const ValueType& type = program_.type(id);
  if (!backend_.is_host()) {
    Tensor tensor = at_bound(bindings, id);
    tensor.device = &backend_.device();
    return tensor;
  }
  if (!type.ragged()) return at_bound(bindings, id);
  const bool extent_is_own =
      std::ranges::find(node.outputs, type.extent.value()) != node.outputs.end();
  return extent_is_own ? at_bound(bindings, id) : view(bindings, id);
}

const int64_t* Executable::extent_address(const Bindings& bindings, ValueId id) const {
  const ValueType& type = program_.type(id);
  return type.ragged() ? at_bound(bindings, type.extent.value()).as<int64_t>() : nullptr;
}

/// On the host it is known; a GPU knows its extents alone.
bool Executable::may_have_elements(const Bindings& bindings, const Node& node, ValueId id) const {
  if (program_.type(id).num_bytes() == 0) return false;
  return !backend_.is_host() || argument(bindings, node, id).num_elements() > 0;
}

/// Before node `idx` adds to accumulators of which some are `unset`, which they are not afterwards:
/// `sets` where its kernel is to write all of them; otherwise those that must become zero.
std::vector<Tensor> Executable::begin_sums(size_t idx, const Bindings& bindings,
                                           std::vector<ValueId>& unset, bool& sets) const {
  sets = false;
  if (unset.empty()) return {};
  const Node& node = program_.nodes()[idx];
  std::vector<Tensor> begun;
  bool all = kernels_[idx].sets_accumulators();
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const Tensor& sum = bindings.tensors[node.outputs[i]];
    if (!node.op->accumulates(static_cast<int>(i)) || !sum) continue;
    if (std::erase(unset, node.outputs[i]) > 0) {
      begun.push_back(sum);
    } else {
      all = false;
    }
  }
  if (begun.empty()) return {};
  for (const ValueId id : node.inputs) all = all && may_have_elements(bindings, node, id);
  sets = all;
  return all ? std::vector<Tensor>() : begun;
}

/// What node `idx`'s kernel gets. Appends its tensors and extents, of which the result is a view:
/// they must not move any more.
KernelArgs Executable::make_args(size_t idx, const Bindings& bindings, std::vector<Tensor>& tensors,
                                 std::vector<const int64_t*>& extents) const {
  const Node& node = program_.nodes()[idx];
  const size_t first = tensors.size();
  for (const auto* ids : {&node.inputs, &node.outputs}) {
    for (const ValueId id : *ids) {
      tensors.push_back(argument(bindings, node, id));
      if (!backend_.is_host()) extents.push_back(extent_address(bindings, id));
    }
  }
  const std::span<const Tensor> all = std::span(tensors).subspan(first);
  std::span<std::byte> workspace;
  if (plan_.workspace_bytes[idx] > 0) {
    workspace = {bindings.transient + plan_.workspace_offsets[idx],
                 static_cast<size_t>(plan_.workspace_bytes[idx])};
  }
  return {.inputs = all.first(node.inputs.size()),
          .outputs = all.subspan(node.inputs.size()),
          .workspace = workspace,
          .extents = backend_.is_host() ? std::span<const int64_t* const>()
                                        : std::span<const int64_t* const>(extents).subspan(first),
          .context = node.aside ? backend_.side_lane()->context() : backend_.context()};
}

void Executable::run_aside(size_t idx, const KernelArgs& args, Exchanges& exchanges) const {
  SideLane& lane = *backend_.side_lane();
  lane.give([&] { start_node(idx, args); });
  exchanges.add_aside(idx, lane, waits_[idx]);
}

Pending Executable::start_node(size_t idx, const KernelArgs& args) const {
  const Operator& op = *program_.nodes()[idx].op;
  try {
    return kernels_[idx].start(op, args);
  } catch (const InternalError& error) {
    throw InternalError(
        fmt::format("program '{}', operator '{}': {}", program_.name(), op.name(), error.what()));
  }
}

void Executable::run_node(size_t idx, const KernelArgs& args, const std::vector<Tensor>& zeroed,
                          Exchanges& exchanges, const NodeObserver& observer) const {
  Device& device = backend_.device();
  exchanges.wait_before(static_cast<int>(idx));
  const Device::Mark begin = observer ? device.mark() : 0;
  for (const Tensor& sum : zeroed) device.zero(sum.data, sum.num_bytes());
  const bool aside = program_.nodes()[idx].aside;
  if (aside) run_aside(idx, args, exchanges);
  if (aside && observer) backend_.side_lane()->join();  // so that the times are its own
  Pending pending = aside ? Pending() : start_node(idx, args);
  const bool started = kernels_[idx].is_asynchronous();
  if (started) exchanges.add(idx, std::move(pending), waits_[idx]);
  if (observer) {
    const auto phase = started ? NodeEvent::Phase::kStart : NodeEvent::Phase::kRun;
    device.when_known(begin, device.mark(), [this, idx, phase, observer](auto from, auto to) {
      observer({program_, program_.nodes()[idx], phase, from, to});
    });
  }
  exchanges.progress();
}

std::vector<int> Executable::wait_points() const {
  std::set<int> points;
  for (size_t i = 0; i < program_.nodes().size(); ++i) {
    if (program_.nodes()[i].op->communicates()) points.insert(waits_[i]);
  }
  points.erase(static_cast<int>(program_.nodes().size()));
  return {points.begin(), points.end()};
}

void Executable::leave_transient(const Bindings& bindings) const {
  if (bindings.elastic != nullptr)
    bindings.elastic->leave_transient(bindings.transient, plan_.transient_bytes);
}

void Executable::run(const Bindings& bindings, const NodeObserver& observer) const {
  PartialRun(*this, bindings, observer).run_to(RunPart::kToTheEnd);
}

void Executable::run_on_host(const Bindings& bindings, size_t idx, HostRun& run,
                             Exchanges& exchanges, const NodeObserver& observer) const {
  const Node& node = program_.nodes()[idx];
  // Before what makes the actual extents of the node's arguments.
  exchanges.wait_before(static_cast<int>(idx));
  bool sets = false;
  const std::vector<Tensor> zeroed = begin_sums(idx, bindings, run.unset, sets);
  commit_outputs(idx, bindings, run.rows);
  run.tensors.clear();
  run.tensors.reserve(node.inputs.size() + node.outputs.size());
  KernelArgs args = make_args(idx, bindings, run.tensors, run.extents);
  args.set_accumulators = sets;
  run_node(idx, args, zeroed, exchanges, observer);
}

PreparedRun& Executable::prepare(const Bindings& bindings) const {
  if (PreparedRun* known = prepared_->find(bindings)) return *known;
  check_bindings(bindings);
  auto run = std::make_unique<PreparedRun>();
  run->bindings = bindings;
  size_t num_arguments = 0;
  for (const Node& node : program_.nodes())
    num_arguments += node.inputs.size() + node.outputs.size();
  run->tensors.reserve(num_arguments);
  run->extents.reserve(num_arguments);
  std::vector<ValueId> unset = bindings.unset;
  for (size_t i = 0; i < program_.nodes().size(); ++i) {
    run->args.push_back(make_args(i, bindings, run->tensors, run->extents));
    run->zeroed.push_back(begin_sums(i, bindings, unset, run->args.back().set_accumulators));
  }
  run->recorded.resize(segments_.size());
  return prepared_->add(std::move(run));
}

/// Kernels are called as always, but the device only records what they give it.
Recording Executable::record_segment(const PreparedRun& run, const Segment& segment) const {
  Device& device = backend_.device();
  if (!device.begin_recording()) return {.why_not = device.name() + " cannot record its work"};
  try {
    const NodeObserver nobody;
    Exchanges none(program_, device, nobody);
    for (size_t i = segment.begin; i < segment.end; ++i)
      run_node(i, run.args[i], run.zeroed[i], none, nobody);
    none.wait_before(static_cast<int>(segment.end));
  } catch (const std::exception& error) {
    device.end_recording();
    return {.why_not = error.what()};
  }
  return device.end_recording();
}

void Executable::record(PreparedRun& run) const {
  run.state = PreparedRun::State::kRecorded;
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (!segments_[i].recordable) continue;
    Recording recording = record_segment(run, segments_[i]);
    run.recorded[i] = std::move(recording.work);
    if (run.recorded[i]) continue;
    run.state = PreparedRun::State::kPlain;
    RunControl& control = backend_.control();
    require(control.graphs != GraphMode::kOn,
            "run.cuda_graphs = \"on\", but program '{}' cannot be recorded: {}; with \"auto\" such "
            "programs run without",
            program_.name(), recording.why_not);
    if (control.why_not_recorded.empty()) {
      control.why_not_recorded = recording.why_not;
      std::cerr << fmt::format("tessera: program '{}' runs without a CUDA graph: {}\n",
                               program_.name(), recording.why_not);
    }
  }
}

void Executable::begin_on_device(const Bindings& bindings, DeviceRun& run,
                                 const NodeObserver& observer) const {
  RunControl& control = backend_.control();
  const bool recorded_with_more = backend_.device().is_recording();
  if (recorded_with_more) {
    ensure(std::ranges::all_of(segments_, &Segment::recordable),
           "program '{}' tells the host what comes out, or communicates", program_.name());
  }
  run.prepared = &prepare(bindings);
  if (run.prepared->version != backend_.kernel_version()) {
    for (auto& work : run.prepared->recorded) work.reset();
    run.prepared->state = PreparedRun::State::kNew;
  }
  run.graphs = control.graphs != GraphMode::kOff && !observer && !recorded_with_more;
  if (!run.graphs || run.prepared->state != PreparedRun::State::kRun) return;
  // What is recorded may copy, and only from memory that is there.
  for (size_t i = 0; i < program_.nodes().size(); ++i)
    commit_outputs(i, bindings, run.prepared->rows);
  record(*run.prepared);
}

void Executable::run_segment(const Bindings& bindings, size_t idx, DeviceRun& run,
                             Exchanges& exchanges, const NodeObserver& observer) const {
  const Segment& segment = segments_[idx];
  const PreparedRun& prepared = *run.prepared;
  const RecordedWork* const recorded = run.graphs ? prepared.recorded[idx].get() : nullptr;
  for (size_t i = segment.begin; i < segment.end; ++i) commit_outputs(i, bindings, run.rows);
  if (recorded != nullptr) {
    exchanges.wait_before(static_cast<int>(segment.begin));
    recorded->run();
    exchanges.progress();
    backend_.control().num_operations += recorded->num_operations();
    return;
  }
  for (size_t i = segment.begin; i < segment.end; ++i)
    run_node(i, prepared.args[i], prepared.zeroed[i], exchanges, observer);
}

void Executable::end_on_device(DeviceRun& run) const {
  PreparedRun& prepared = *run.prepared;
  if (prepared.state == PreparedRun::State::kNew) {
    prepared.state = PreparedRun::State::kRun;
    prepared.version = backend_.kernel_version();
    prepared.rows = std::move(run.rows);
  }
  backend_.control().num_operators += std::ssize(program_.nodes());
}

struct PartialRun::State {
  State(const Executable& of, const Bindings& with, const NodeObserver& by)
      : program(of),
        bindings(with),
        observer(by),
        exchanges(of.program(), of.backend().device(), observer) {}

  const Executable& program;
  const Bindings& bindings;
  NodeObserver observer;
  Exchanges exchanges;
  int next = 0;
  Executable::HostRun host = {};
  Executable::DeviceRun device = {};
};

PartialRun::PartialRun(const Executable& program, const Bindings& bindings,
                       const NodeObserver& observer)
    : state_(std::make_unique<State>(program, bindings, observer)) {
  if (!program.backend().is_host()) return;
  program.check_bindings(bindings);
  state_->host.unset = bindings.unset;
}
PartialRun::~PartialRun() = default;
PartialRun::PartialRun(PartialRun&&) noexcept = default;
PartialRun& PartialRun::operator=(PartialRun&&) noexcept = default;

void PartialRun::run_to(int end) {
  const int all = static_cast<int>(state_->program.program().nodes().size());
  const int last = end == RunPart::kToTheEnd ? all : end;
  state_->program.backend().is_host() ? run_on_host(last) : run_on_device(last);
  if (last < all) return;
  state_->exchanges.wait_before(all);
  state_->program.leave_transient(state_->bindings);
}

void PartialRun::run_on_host(int last) {
  State& at = *state_;
  for (; at.next < last; ++at.next)
    at.program.run_on_host(at.bindings, at.next, at.host, at.exchanges, at.observer);
}

void PartialRun::run_on_device(int last) {
  State& at = *state_;
  const bool begins = at.next == 0;
  Device& device = at.program.backend().device();
  if (begins && at.program.backend().control().waits_before_programs && !device.is_recording())
    device.synchronize();
  const auto start = Clock::now();
  if (begins) at.program.begin_on_device(at.bindings, at.device, at.observer);
  const std::vector<Segment>& segments = at.program.segments_;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (std::cmp_less(segments[i].begin, at.next) ||
        std::cmp_greater_equal(segments[i].begin, last))
      continue;
    ensure(std::cmp_less_equal(segments[i].end, last), "program '{}': a part ends before node {}",
           at.program.program().name(), last);
    at.program.run_segment(at.bindings, i, at.device, at.exchanges, at.observer);
  }
  at.next = last;
  if (std::cmp_equal(last, at.program.program().nodes().size()))
    at.program.end_on_device(at.device);
  at.program.backend().control().seconds += seconds_since(start);
}

}  // namespace tessera

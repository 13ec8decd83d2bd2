#include "runtime/executable.h"

#include <algorithm>

#include "program/dependencies.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

/// The exchanges of one run that were started and not yet waited for, in the order of their starts.
class Exchanges {
 public:
  Exchanges(const Program& program, const NodeObserver& observer)
      : program_(program), observer_(observer) {}

  /// Takes over what node `idx` started, to be complete before node `wait`.
  void add(size_t idx, Pending pending, int wait) {
    under_way_.push_back({std::move(pending), idx, wait});
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
  };

  void finish(Exchange& exchange) {
    const auto begin = Clock::now();
    exchange.pending.wait();
    if (!observer_) return;
    observer_(
        {program_, program_.nodes()[exchange.node], NodeEvent::Phase::kWait, begin, Clock::now()});
  }

  const Program& program_;
  const NodeObserver& observer_;
  std::vector<Exchange> under_way_;
};

}  // namespace

Executable::Executable(Program program, const Backend& backend, const std::vector<ValueId>& saved)
    : program_(std::move(program)),
      backend_(backend),
      plan_(plan_memory(program_, saved,
                        [&](const Operator& op, std::span<const ValueType> inputs) {
                          return backend.workspace_bytes(op, inputs);
                        })),
      waits_(find_waits(program_)) {
  for (const Node& node : program_.nodes()) {
    const Kernel& kernel = backend.kernel(*node.op);
    ensure(node.op->communicates() || !kernel.is_asynchronous(),
           "operator '{}' does not communicate, but its kernel is asynchronous", node.op->name());
    kernels_.push_back(kernel);
  }
}

Bindings Executable::make_bindings() const {
  Bindings bindings;
  bindings.tensors.resize(static_cast<size_t>(program_.num_values()));
  return bindings;
}

Tensor Executable::at_bound(const Bindings& bindings, ValueId id) const {
  const Placement& placement = plan_.values[static_cast<size_t>(id)];
  const ValueType& type = program_.type(id);
  if (placement.storage == Storage::kBound) return bindings.tensors[static_cast<size_t>(id)];
  std::byte* slab = placement.storage == Storage::kSaved ? bindings.saved : bindings.transient;
  return {slab + placement.offset, type.dtype, type.shape,
          backend_.is_host() ? nullptr : &backend_.device()};
}

Tensor Executable::view(const Bindings& bindings, ValueId id) const {
  Tensor tensor = at_bound(bindings, id);
  const ValueType& type = program_.type(id);
  if (!tensor || !type.ragged()) return tensor;
  int64_t extent = 0;
  backend_.device().copy(&extent, at_bound(bindings, type.extent).as<int64_t>(), sizeof(extent));
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
    if (plan_.values[static_cast<size_t>(id)].storage != Storage::kBound) continue;
    const Tensor& tensor = bindings.tensors[static_cast<size_t>(id)];
    const Value& value = program_.value(id);
    if (!tensor && value.kind == ValueKind::kAccumulator) continue;
    const bool is_set = tensor || value.type.num_bytes() == 0;
    ensure(is_set && tensor.dtype == value.type.dtype && tensor.shape == value.type.shape,
           "program '{}': '{}' is bound to {} {}, expected {}", program_.name(), value.name,
           tensor ? dtype_name(tensor.dtype) : "nothing", tensor.shape.to_string(),
           value.type.to_string());
  }
}

/// What a kernel gets: on the host actual extents, where this very node does not make them.
Tensor Executable::argument(const Bindings& bindings, const Node& node, ValueId id) const {
  const ValueType& type = program_.type(id);
  if (!type.ragged() || !backend_.is_host()) return at_bound(bindings, id);
  const bool extent_is_own = std::ranges::find(node.outputs, type.extent) != node.outputs.end();
  return extent_is_own ? at_bound(bindings, id) : view(bindings, id);
}

const int64_t* Executable::extent_address(const Bindings& bindings, ValueId id) const {
  const ValueType& type = program_.type(id);
  return type.ragged() ? at_bound(bindings, type.extent).as<int64_t>() : nullptr;
}

/// Before node `idx` adds to accumulators of which some are `unset`, which they are not afterwards:
/// true where its kernel is to write all of them; otherwise those become zero.
bool Executable::begin_sums(size_t idx, const Bindings& bindings,
                            std::vector<ValueId>& unset) const {
  const Node& node = program_.nodes()[idx];
  std::vector<Tensor> begun;
  bool all = kernels_[idx].sets_accumulators();
  for (size_t i = 0; i < node.outputs.size() && !unset.empty(); ++i) {
    const Tensor& sum = bindings.tensors[static_cast<size_t>(node.outputs[i])];
    if (!node.op->accumulates(static_cast<int>(i)) || !sum) continue;
    if (std::erase(unset, node.outputs[i]) > 0) {
      begun.push_back(sum);
    } else {
      all = false;
    }
  }
  if (begun.empty()) return false;
  for (const ValueId id : node.inputs) all = all && program_.type(id).num_bytes() > 0;
  if (all) return true;
  for (const Tensor& sum : begun) backend_.device().zero(sum.data, sum.num_bytes());
  return false;
}

Pending Executable::start_node(size_t idx, const Bindings& bindings, bool set_accumulators) const {
  const Node& node = program_.nodes()[idx];
  std::vector<Tensor> tensors;
  tensors.reserve(node.inputs.size() + node.outputs.size());
  for (const ValueId id : node.inputs) tensors.push_back(argument(bindings, node, id));
  for (const ValueId id : node.outputs) tensors.push_back(argument(bindings, node, id));
  std::vector<const int64_t*> extents;
  if (!backend_.is_host()) {
    for (const ValueId id : node.inputs) extents.push_back(extent_address(bindings, id));
    for (const ValueId id : node.outputs) extents.push_back(extent_address(bindings, id));
  }
  std::span<std::byte> workspace;
  if (plan_.workspace_bytes[idx] > 0) {
    workspace = {bindings.transient + plan_.workspace_offsets[idx],
                 static_cast<size_t>(plan_.workspace_bytes[idx])};
  }
  const std::span<const Tensor> all = tensors;
  try {
    return kernels_[idx].start(*node.op, {.inputs = all.first(node.inputs.size()),
                                          .outputs = all.subspan(node.inputs.size()),
                                          .workspace = workspace,
                                          .extents = extents,
                                          .context = backend_.context(),
                                          .set_accumulators = set_accumulators});
  } catch (const InternalError& error) {
    throw InternalError(fmt::format("program '{}', operator '{}': {}", program_.name(),
                                    node.op->name(), error.what()));
  }
}

void Executable::run(const Bindings& bindings, const NodeObserver& observer) const {
  check_bindings(bindings);
  Device& device = backend_.device();
  Exchanges exchanges(program_, observer);
  std::vector<ValueId> unset = bindings.unset;
  for (size_t i = 0; i < program_.nodes().size(); ++i) {
    exchanges.wait_before(static_cast<int>(i));
    const Device::Mark begin = observer ? device.mark() : 0;
    const bool set_accumulators = !unset.empty() && begin_sums(i, bindings, unset);
    Pending pending = start_node(i, bindings, set_accumulators);
    const bool started = kernels_[i].is_asynchronous();
    if (started) exchanges.add(i, std::move(pending), waits_[i]);
    if (observer) {
      const auto phase = started ? NodeEvent::Phase::kStart : NodeEvent::Phase::kRun;
      device.when_known(begin, device.mark(), [this, i, phase, observer](auto from, auto to) {
        observer({program_, program_.nodes()[i], phase, from, to});
      });
    }
    exchanges.progress();
  }
  exchanges.wait_before(static_cast<int>(program_.nodes().size()));
}

}  // namespace tessera

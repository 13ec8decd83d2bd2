#include "program/memory_plan.h"

#include <algorithm>

#include "core/memory.h"
#include "program/dependencies.h"

namespace tessera {
namespace {

bool overlap(const Lifetime& a, const Lifetime& b) {
  return a.first <= b.last && b.first <= a.last;
}

/// The lowest offset at which `request` fits between the already placed requests that live at the
/// same time.
int64_t find_gap(const MemoryRequest& request,
                 const std::vector<const MemoryRequest*>& placed_by_offset) {
  int64_t offset = 0;
  for (const MemoryRequest* other : placed_by_offset) {
    if (!overlap(request.lifetime, other->lifetime)) continue;
    if (offset + request.num_bytes <= *other->offset) return offset;
    offset = std::max(offset, *other->offset + other->num_bytes);
  }
  return offset;
}

void place_saved(const Program& program, const std::vector<ValueId>& saved,
                 const std::vector<ValueId>& offloaded, MemoryPlan& plan) {
  for (const ValueId id : saved) {
    Placement& placement = plan.values[id];
    if (program.value(id).kind != ValueKind::kIntermediate || program.is_output(id)) continue;
    const bool stays = std::ranges::find(offloaded, id) == offloaded.end();
    int64_t& slab = stays ? plan.saved_bytes : plan.offloaded_bytes;
    placement = {stays ? Storage::kSaved : Storage::kOffloaded, slab};
    slab += align_up(program.type(id).num_bytes());
  }
}

}  // namespace

IdVector<ValueId, Lifetime> find_lifetimes(const Program& program) {
  IdVector<ValueId, Lifetime> lifetimes(program.num_values());
  const std::vector<int> waits = find_waits(program);
  for (int i = 0; i < std::ssize(program.nodes()); ++i) {
    const auto touch = [&](ValueId id) {
      Lifetime& lifetime = lifetimes[id];
      if (lifetime.first < 0) lifetime.first = i;
      lifetime.last = std::max(lifetime.last, waits[i] - 1);
    };
    const NodeAccess access = find_access(program, program.nodes()[i]);
    std::ranges::for_each(access.reads, touch);
    std::ranges::for_each(access.writes, touch);
  }
  return lifetimes;
}

std::vector<Lifetime> find_workspace_lifetimes(const Program& program) {
  std::vector<Lifetime> lifetimes;
  for (const int wait : find_waits(program))
    lifetimes.push_back({static_cast<int>(lifetimes.size()), wait - 1});
  return lifetimes;
}

int64_t place_requests(std::vector<MemoryRequest>& requests) {
  std::ranges::stable_sort(requests, std::greater<>(), &MemoryRequest::num_bytes);
  std::vector<const MemoryRequest*> placed;
  int64_t total = 0;
  for (const MemoryRequest& request : requests) {
    *request.offset = find_gap(request, placed);
    total = std::max(total, *request.offset + request.num_bytes);
    const auto at = std::ranges::upper_bound(placed, *request.offset, {},
                                             [](const MemoryRequest* r) { return *r->offset; });
    placed.insert(at, &request);
  }
  return total;
}

MemoryPlan plan_memory(const Program& program, const std::vector<ValueId>& saved,
                       const WorkspaceRule& workspace, const std::vector<ValueId>& offloaded) {
  MemoryPlan plan;
  plan.values.resize(program.num_values());
  plan.workspace_offsets.resize(program.nodes().size());
  plan.workspace_bytes.resize(program.nodes().size());
  place_saved(program, saved, offloaded, plan);

  std::vector<MemoryRequest> requests;
  const IdVector<ValueId, Lifetime> lifetimes = find_lifetimes(program);
  for (ValueId id = 0; id < program.num_values(); ++id) {
    Placement& placement = plan.values[id];
    const bool transient = program.value(id).kind == ValueKind::kIntermediate &&
                           !program.is_output(id) && placement.storage == Storage::kBound;
    if (!transient) continue;
    placement.storage = Storage::kTransient;
    const Lifetime& lifetime = lifetimes[id];
    if (lifetime.first < 0) continue;  // a pass took its node away
    requests.push_back({align_up(program.type(id).num_bytes()), lifetime, &placement.offset});
  }
  const std::vector<Lifetime> workspace_lifetimes = find_workspace_lifetimes(program);
  for (size_t i = 0; i < program.nodes().size(); ++i) {
    const Node& node = program.nodes()[i];
    const std::vector<ValueType> types = program.types(node.inputs);
    plan.workspace_bytes[i] = workspace ? workspace(*node.op, types) : 0;
    if (plan.workspace_bytes[i] > 0) {
      requests.push_back(
          {align_up(plan.workspace_bytes[i]), workspace_lifetimes[i], &plan.workspace_offsets[i]});
    }
  }
  plan.transient_bytes = place_requests(requests);
  return plan;
}

}  // namespace tessera

#include "model/dispatch/dispatchers.h"

#include "model/dispatch/dispatch_bounds.h"
#include "model/dispatch/dispatch_phases.h"
#include "ops/collective/collective.h"
#include "ops/permute/permute.h"
#include "ops/route_map/capacity_limit.h"

namespace tessera {

IndexRange DispatchSpec::local_experts() const {
  if (kind == DispatcherKind::kLocal) return {0, num_experts};
  const int64_t count = num_experts / ep->size();
  return {ep->rank() * count, count};
}

DispatchPhases::LaidOut DispatchPhases::lay_out(const RouteMapSpec& layout, const RowSet& tokens,
                                                const std::string& stage) {
  std::vector<ValueId> inputs = {tokens.expert_idx};
  if (layout.capacity_factor > 0) inputs.push_back(tokens.probs);
  std::vector<std::string> names = {"row_of",   "source",  "offsets",
                                    "num_rows", "dropped", "counts_kept"};
  for (std::string& name : names) name = fmt::format("{}_{}", stage, name);
  const auto map = program_.add(make_route_map(layout), inputs, names);
  LaidOut result{.map = {map[RouteMapOutput::kRowOfTK], map[RouteMapOutput::kSourceR]},
                 .rows = {.counts = map[RouteMapOutput::kCountsKept]},
                 .offsets = map[RouteMapOutput::kOffsets],
                 .dropped = map[RouteMapOutput::kDropped]};
  const auto& [row_of, source] = result.map;
  result.rows.rows = program_.add1(make_permute(), {tokens.rows, source, row_of}, stage + "_in");
  if (spec_.early_probs) {
    result.rows.probs =
        program_.add1(make_permute_probs(), {tokens.probs, source, row_of}, stage + "_probs");
  }
  return result;
}

void DispatchPhases::deliver(const LaidOut& laid_out, DispatchedRows& result) {
  result.rows_RH = laid_out.rows.rows;
  result.probs_R = laid_out.rows.probs;
  result.offsets = laid_out.offsets;
  result.at_experts = laid_out.map;
  if (result.dropped < 0) result.dropped = laid_out.dropped;
}

RouteMapSpec DispatchPhases::source_layout(int64_t num_tokens) const {
  if (!spec_.shared_capacity) return drop_rule(spec_);
  return {.num_experts = spec_.num_experts,
          .top_k = spec_.top_k,
          .rows_limit = shared_expert_capacity(spec_, num_tokens)};
}

RouteMapSpec DispatchPhases::arrival_layout(RouteMapSpec layout, int64_t num_tokens) const {
  layout.alignment = spec_.alignment;
  layout.rows_limit = expert_limit(spec_, num_tokens);
  layout.pad_to_capacity = spec_.pad_to_capacity;
  return layout;
}

ValueId DispatchPhases::add_up(const RowMap& map, ValueId rows, ValueId probs,
                               const std::string& name) {
  if (probs < 0) return program_.add1(make_unpermute(), {rows, map.row_of, map.source}, name);
  return program_.add1(make_unpermute_weighted(), {rows, probs, map.row_of, map.source}, name);
}

namespace {

/// All experts are here: one layout of the tokens, no exchange.
class LocalPhases final : public DispatchPhases {
 public:
  using DispatchPhases::DispatchPhases;

  RowSet pack(const RowSet& tokens, DispatchedRows& result) override {
    RouteMapSpec layout{.num_experts = spec_.num_experts, .top_k = spec_.top_k};
    if (spec_.shared_capacity) {
      layout = arrival_layout(layout, num_tokens(tokens));
    } else {
      layout = drop_rule(spec_);
      layout.pad_to_capacity = spec_.pad_to_capacity;
      layout.alignment = spec_.alignment;
    }
    const LaidOut laid_out = lay_out(layout, tokens, "expert");
    deliver(laid_out, result);
    return laid_out.rows;
  }
  RowSet exchange(const RowSet& packed, DispatchedRows& /*result*/) override { return packed; }
  void unpack(const RowSet& /*arrived*/, DispatchedRows& /*result*/) override {}

  ValueId pack_back(const DispatchedRows& /*dispatched*/, ValueId expert_out) override {
    return expert_out;
  }
  ValueId exchange_back(const DispatchedRows& /*dispatched*/, ValueId packed) override {
    return packed;
  }
  ValueId unpack_back(const DispatchedRows& dispatched, ValueId arrived) override {
    return add_up(dispatched.at_experts, arrived, dispatched.probs_TK, "moe_out");
  }
};

void check_groups(const DispatchSpec& spec) {
  if (spec.shared_capacity) {
    ensure(spec.shared_capacity->micro_batch != nullptr, "dispatch: a capacity shared by nobody");
  }
  if (spec.kind == DispatcherKind::kLocal) return;
  ensure(spec.ep && spec.etp && spec.experts, "dispatch: a group is missing");
  ensure(spec.experts->size() == spec.ep->size() * spec.etp->size() &&
             spec.experts->rank() == spec.ep->rank() * spec.etp->size() + spec.etp->rank(),
         "dispatch: rank {} of {} holds the experts, {} of {} in EP and {} of {} in ETP",
         spec.experts->rank(), spec.experts->size(), spec.ep->rank(), spec.ep->size(),
         spec.etp->rank(), spec.etp->size());
  if (spec.by_node) {
    const NodeGroups& node = *spec.by_node;
    ensure(node.nodes && node.ep && node.experts &&
               node.nodes->size() * node.ep->size() == spec.ep->size() &&
               node.experts->size() == node.ep->size() * spec.etp->size(),
           "dispatch: the groups of nodes do not make up EP {}", spec.ep->size());
  }
  require(spec.num_experts % spec.ep->size() == 0,
          "{} experts do not spread evenly over {} expert-parallel ranks; choose a number of ranks "
          "that divides them",
          spec.num_experts, spec.ep->size());
}

void check_capacity(const DispatchSpec& spec) {
  require(!spec.pad_to_capacity || spec.capacity_factor > 0,
          "padding to the capacity needs a capacity factor above 0");
  require(
      !spec.pad_to_capacity || spec.capacity_group_size == 1,
      "groups of {} experts share their capacity, so no expert can be padded to its own; switch "
      "padding to the capacity off",
      spec.capacity_group_size);
}

std::unique_ptr<DispatchPhases> make_phases(Program& program, const DispatchSpec& spec) {
  check_groups(spec);
  check_capacity(spec);
  switch (spec.kind) {
    case DispatcherKind::kLocal:
      return std::make_unique<LocalPhases>(program, spec);
    case DispatcherKind::kAllToAll:
      return spec.exchange == ExchangeSizes::kBounded ? make_bounded_phases(program, spec)
                                                      : make_all_to_all_phases(program, spec);
    case DispatcherKind::kAllGather:
      return make_all_gather_phases(program, spec);
    case DispatcherKind::kDeduplicated:
    case DispatcherKind::kHierarchical:
      return make_deduplicated_phases(program, spec);
  }
  throw InternalError("unknown dispatcher");
}

/// Adds capacity_limit over the tokens of `group` (null: this rank's own): the experts of this
/// rank's tokens after it.
ValueId add_capacity_limit(Program& program, const DispatchSpec& spec, const RowSet& tokens,
                           Communicator* group, DispatchedRows& result) {
  const int64_t num_tokens = program.type(tokens.rows).shape[0];
  CapacityLimitSpec limit{.route = drop_rule(spec), .tokens = {0, num_tokens}};
  std::vector<ValueId> inputs = {tokens.expert_idx, tokens.probs};
  if (group != nullptr) {
    const CommunicatorPtr& shared = spec.shared_capacity->micro_batch;
    inputs = {program.add1(make_all_gather(shared), {tokens.expert_idx}, "expert_idx_of_all"),
              program.add1(make_all_gather(shared), {tokens.probs}, "probs_of_all")};
    limit.tokens.begin = group->rank() * num_tokens;
    limit.has_positions = spec.shared_capacity->positions >= 0;
    if (limit.has_positions) inputs.push_back(spec.shared_capacity->positions);
  }
  const auto limited =
      program.add(make_capacity_limit(limit), inputs, {"expert_idx_kept", "dropped"});
  result.dropped = limited[1];
  return limited[0];
}

/// Gives up what exceeds the capacity, unless the layout of this rank's own tokens will: where
/// ranks share it, and where the tokens leave before they are laid out.
RowSet limit_capacity(Program& program, const DispatchSpec& spec, RowSet tokens,
                      DispatchedRows& result) {
  if (spec.capacity_factor == 0) return tokens;
  if (spec.shared_capacity) {
    tokens.expert_idx =
        add_capacity_limit(program, spec, tokens, spec.shared_capacity->micro_batch.get(), result);
  } else if (spec.kind == DispatcherKind::kAllGather ||
             spec.kind == DispatcherKind::kDeduplicated ||
             spec.kind == DispatcherKind::kHierarchical) {
    tokens.expert_idx = add_capacity_limit(program, spec, tokens, nullptr, result);
  }
  return tokens;
}

}  // namespace

DispatchedRows dispatch(Program& program, const DispatchSpec& spec, ValueId normed_TH,
                        ValueId probs_TK, ValueId expert_idx_TK) {
  const auto phases = make_phases(program, spec);
  DispatchedRows result;
  if (!spec.early_probs) result.probs_TK = probs_TK;
  const RowSet tokens = limit_capacity(
      program, spec, {.rows = normed_TH, .probs = probs_TK, .expert_idx = expert_idx_TK}, result);
  const RowSet packed = phases->pack(tokens, result);
  const RowSet arrived = phases->exchange(packed, result);
  phases->unpack(arrived, result);
  return result;
}

ValueId combine(Program& program, const DispatchSpec& spec, const DispatchedRows& dispatched,
                ValueId expert_out_RH) {
  const auto phases = make_phases(program, spec);
  const ValueId packed = phases->pack_back(dispatched, expert_out_RH);
  const ValueId arrived = phases->exchange_back(dispatched, packed);
  return phases->unpack_back(dispatched, arrived);
}

}  // namespace tessera

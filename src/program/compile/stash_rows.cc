#include "program/compile/stash_rows.h"

#include <algorithm>
#include <map>
#include <string>

#include "ops/page_stash/page_stash.h"
#include "program/compile/copy_backward.h"

namespace tessera {
namespace {

/// The pool as accumulators of a program, in the order of the operators' outputs.
std::vector<ValueId> add_pool(Program& program, int64_t page_bytes) {
  return {
      program.add_accumulator(std::string(kStashPages), {DType::kU8, {page_bytes}}),
      program.add_accumulator(std::string(kStashFree), {DType::kI32, {1}}),
      program.add_accumulator(std::string(kStashState), {DType::kI64, {kPoolStates}}),
  };
}

/// Node `idx` touches the value.
bool touches(const Program& program, size_t idx, ValueId id) {
  const Node& node = program.nodes()[idx];
  return std::ranges::find(node.inputs, id) != node.inputs.end() ||
         std::ranges::find(node.outputs, id) != node.outputs.end();
}

/// The order in which each of the last nodes, one a value, stands behind the others that touch it.
std::vector<int> order_behind_uses(const Program& program, const std::vector<ValueId>& values) {
  const size_t num_others = program.nodes().size() - values.size();
  std::multimap<size_t, int> behind;
  for (size_t i = 0; i < values.size(); ++i) {
    size_t last = num_others;
    while (last > 0 && !touches(program, last - 1, values[i])) --last;
    behind.emplace(last, static_cast<int>(num_others + i));
  }
  std::vector<int> order;
  for (size_t idx = 0; idx <= num_others; ++idx) {
    const auto [first, last] = behind.equal_range(idx);
    for (auto at = first; at != last; ++at) order.push_back(at->second);
    if (idx < num_others) order.push_back(static_cast<int>(idx));
  }
  return order;
}

/// Whether the host learns of fewer rows than the bound.
bool has_memory_by_rows(const ValueType& type, const RowPlan& rows) {
  const ValueId extent = type.extent.value();
  return rows.find_source(extent) != nullptr && rows.balanced().at(extent) < type.shape[0];
}

/// Reloads what is stashed in front of its first use.
class Reloader final : public BackwardCopier {
 public:
  /// `tables`: of the values that are stashed.
  Reloader(const Program& forward, const Backward& old, const std::map<ValueId, ValueId>& tables,
           int64_t page_bytes)
      : BackwardCopier(forward, old),
        tables_(tables),
        page_bytes_(page_bytes),
        pool_(add_pool(program(), page_bytes)) {}

 protected:
  ValueId obtain(ValueId id) override {
    const auto table = tables_.find(id);
    if (importer().knows(id) || table == tables_.end()) return importer().import(id);
    const Value& value = forward().value(id);
    const ValueId rows = importer().import(value.type.extent.value());
    const auto outputs =
        program().add(make_reload_pages(page_bytes_, value.type),
                      {rows, importer().import(table->second)}, {"", "", "", value.name}, pool_);
    importer().provide(id, outputs[ReloadPages::kValue]);
    return outputs[ReloadPages::kValue];
  }

 private:
  const std::map<ValueId, ValueId>& tables_;
  int64_t page_bytes_;
  std::vector<ValueId> pool_;
};

}  // namespace

std::vector<ValueId> choose_stashed(const Program& forward, const std::vector<ValueId>& saved,
                                    const RowPlan& rows, const StashRule& rule) {
  std::vector<ValueId> chosen;
  for (const ValueId id : saved) {
    const ValueType& type = forward.type(id);
    if (type.ragged_dim != 0 || type.scale != ScaleLayout()) continue;
    if (has_memory_by_rows(type, rows) || forward.is_output(id)) continue;
    const int64_t planned = pages_of_rows(type, rule.rows, rule.page_bytes);
    if (planned < most_pages(type, rule.page_bytes)) chosen.push_back(id);
  }
  return chosen;
}

void stash_rows(Program& forward, Backward& backward, const std::vector<ValueId>& stashed,
                const StashRule& rule) {
  if (stashed.empty()) return;
  const std::vector<ValueId> pool = add_pool(forward, rule.page_bytes);
  std::map<ValueId, ValueId> tables;
  for (const ValueId id : stashed) {
    const auto outputs = forward.add(make_stash_pages(rule.page_bytes), {id},
                                     {"", "", "", forward.value(id).name + ".pages"}, pool);
    tables[id] = outputs[StashPages::kTable];
  }
  forward = forward.reordered(order_behind_uses(forward, stashed));
  backward = Reloader(forward, backward, tables, rule.page_bytes).run();
}

}  // namespace tessera

#include "program/row_plan.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

/// The types of a node's inputs, no larger than what is known of their extents.
std::vector<ValueType> tight_types(const Program& program, const Node& node,
                                   const std::map<ValueId, int64_t>& rows) {
  std::vector<ValueType> types = program.types(node.inputs);
  for (ValueType& type : types) {
    if (!type.ragged()) continue;
    const auto known = rows.find(type.extent.value());
    int64_t& bound = type.shape[type.ragged_dim];
    if (known != rows.end()) bound = std::min(bound, known->second);
  }
  return types;
}

int position(const std::vector<ValueId>& ids, ValueId id) {
  return static_cast<int>(std::ranges::find(ids, id) - ids.begin());
}

/// An output of the node that is ragged with this extent, another of its outputs; -1 where none is.
ValueId find_bounded(const Program& program, const Node& node, ValueId extent) {
  ValueId bounded = -1;
  for (const ValueId id : node.outputs) {
    const ValueType& type = program.type(id);
    if (type.ragged() && type.extent.value() == extent) bounded = id;
  }
  return bounded;
}

}  // namespace

std::vector<bool> find_tellers(const Program& program, const Backend& backend) {
  std::vector<bool> tells;
  for (const Node& node : program.nodes())
    tells.push_back(backend.is_host() || backend.kernel(*node.op).tells_the_host());
  return tells;
}

int64_t bytes_of_rows(const ValueType& type, int64_t rows) {
  const int64_t bound = type.shape[0];
  if (rows >= bound) return type.num_bytes();
  ValueType part = type;
  part.shape[0] = std::max<int64_t>(rows, 0);
  return part.num_bytes();
}

std::vector<ByteRange> ranges_at_bound(const ValueType& type, int64_t rows) {
  Shape part = type.shape;
  part[0] = std::clamp<int64_t>(rows, 0, type.shape[0]);
  const std::vector<ScaleTensor> at_bound = type.format().scales(type.shape);
  // Kernels of a device that the host stands for see the rows that came, and have scales behind
  // these.
  const int64_t behind_elements = at_bound.empty() ? type.num_bytes() : at_bound[0].offset;
  std::vector<ByteRange> ranges = {{0, std::min(bytes_of_rows(type, rows), behind_elements)}};
  const std::vector<ScaleTensor> of_rows = type.format().scales(part);
  for (size_t i = 0; i < at_bound.size(); ++i)
    ranges.push_back({at_bound[i].offset, of_rows[i].num_bytes()});
  return ranges;
}

int64_t bound_rows(const Program& program, const Node& node, ValueId out,
                   const std::map<ValueId, int64_t>& rows) {
  const std::vector<ValueType> types = node.op->infer(tight_types(program, node, rows));
  const ValueType& type = program.type(out);
  const int64_t bound = types.at(position(node.outputs, out)).shape[type.ragged_dim];
  return std::min(bound, type.shape[type.ragged_dim]);
}

RowPlan::RowPlan(const Program& program, const MemoryPlan& plan, const std::vector<bool>& tells,
                 const std::map<ValueId, int64_t>& given,
                 const std::map<ValueId, int64_t>& expected)
    : balanced_(given),
      expected_(expected),
      elastic_(program.num_values()),
      written_(program.nodes().size()) {
  expected_.insert(given.begin(), given.end());
  for (size_t i = 0; i < program.nodes().size(); ++i) expect_node(program, i);
  for (const auto& [extent, rows] : given) sources_[extent] = {ExtentSource::Kind::kInput};
  for (size_t i = 0; i < program.nodes().size(); ++i) find_node(program, i, tells[i]);
  for (size_t i = 0; i < program.nodes().size(); ++i) {
    const std::vector<ValueId>& outputs = program.nodes()[i].outputs;
    for (const ValueId id : outputs) {
      const ValueType& type = program.type(id);
      const bool is_own = plan.values[id].storage != Storage::kBound;
      if (!is_own || type.ragged_dim != 0 || !sources_.contains(type.extent.value())) continue;
      if (balanced_.at(type.extent.value()) >= type.shape[0]) continue;
      if (position(outputs, type.extent.value()) < std::ssize(outputs)) continue;
      elastic_[id] = true;
      ++num_elastic_;
      written_[i].push_back(id);
    }
  }
}

/// Finds the extents that a node writes.
void RowPlan::find_node(const Program& program, size_t idx, bool tells) {
  const Node& node = program.nodes()[idx];
  const auto is_known = [&](ValueId id) {
    const ValueType& type = program.type(id);
    return type.ragged() && sources_.contains(type.extent.value());
  };
  for (int i = 0; i < std::ssize(node.outputs); ++i) {
    const ValueId extent = node.outputs[i];
    const ValueId bounded = find_bounded(program, node, extent);
    const std::vector<ValueType> types = tight_types(program, node, balanced_);
    const int64_t balanced = node.op->balanced_extent(i, types);
    if (balanced < 0 && !bounded.is_set()) continue;
    const bool is_found = bounded.is_set() && std::ranges::any_of(node.inputs, is_known);
    if (!tells && !is_found) continue;
    balanced_[extent] = balanced >= 0 ? balanced : bound_rows(program, node, bounded, balanced_);
    using Kind = ExtentSource::Kind;
    sources_[extent] = {tells ? Kind::kTold : Kind::kFound, idx, bounded};
  }
}

/// What the extents that a node writes are where routing is balanced.
void RowPlan::expect_node(const Program& program, size_t idx) {
  const Node& node = program.nodes()[idx];
  const auto is_expected = [&](ValueId id) {
    const ValueType& type = program.type(id);
    return type.ragged() && expected_.contains(type.extent.value());
  };
  for (int i = 0; i < std::ssize(node.outputs); ++i) {
    const ValueId extent = node.outputs[i];
    const ValueId bounded = find_bounded(program, node, extent);
    const int64_t balanced = node.op->balanced_extent(i, tight_types(program, node, expected_));
    if (balanced >= 0) {
      expected_[extent] = balanced;
    } else if (bounded.is_set() && std::ranges::any_of(node.inputs, is_expected)) {
      expected_[extent] = bound_rows(program, node, bounded, expected_);
    }
  }
}

const ExtentSource* RowPlan::find_source(ValueId extent) const {
  const auto found = sources_.find(extent);
  return found == sources_.end() ? nullptr : &found->second;
}

int64_t RowPlan::skewed_rows(const Program& program, ValueId id, double skew) const {
  const ValueType& type = program.type(id);
  ensure(elastic_[id], "'{}' has as many rows as its bound", program.value(id).name);
  const auto balanced = static_cast<double>(balanced_.at(type.extent.value()));
  return static_cast<int64_t>(
      std::min(std::ceil(balanced * skew), static_cast<double>(type.shape[0])));
}

}  // namespace tessera

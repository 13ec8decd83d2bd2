// The memory of elastic slabs that a run asks for, and what it left there.
#include <algorithm>
#include <limits>

#include "core/out_of_memory.h"
#include "runtime/executable.h"
#include "runtime/slab_of.h"

namespace tessera {

std::vector<ByteRange> Executable::ranges_of(const ValueType& type, int64_t rows) const {
  if (backend_.is_host()) return {{0, bytes_of_rows(type, rows)}};
  return ranges_at_bound(type, rows);
}

void Executable::list_memory(double skew, const MemoryUse& use) const {
  const int64_t behind = backend_.device().rows_read_behind();
  for (size_t i = 0; i < program_.nodes().size(); ++i) {
    for (const ValueId id : program_.nodes()[i].outputs) {
      const Placement& placement = plan_.values[id];
      if (placement.storage == Storage::kBound) continue;
      if (!rows_.is_elastic(id)) {
        use(placement.storage, placement.offset, program_.type(id).num_bytes());
        continue;
      }
      const int64_t rows = rows_.skewed_rows(program_, id, skew) + behind;
      for (const ByteRange& range : ranges_of(program_.type(id), rows))
        use(placement.storage, placement.offset + range.offset, range.num_bytes);
    }
    use(Storage::kTransient, plan_.workspace_offsets[i], plan_.workspace_bytes[i]);
  }
}

void Executable::commit(const Bindings& bindings) const {
  if (bindings.elastic == nullptr) return;
  list_memory(1, [&](Storage storage, int64_t offset, int64_t num_bytes) {
    bindings.elastic->commit(slab_of(bindings, storage) + offset, num_bytes);
  });
}

Executable::OffloadedRows Executable::find_offloaded(const Bindings& bindings) const {
  OffloadedRows found;
  std::map<int64_t, OffloadedRows::Part> by_offset;
  for (ValueId id = 0; id < program_.num_values(); ++id) {
    const auto& [storage, offset] = plan_.values[id];
    const ValueType& type = program_.type(id);
    if (storage != Storage::kOffloaded || type.num_bytes() == 0) continue;
    if (!rows_.is_elastic(id)) {
      by_offset[offset] = {offset, type.num_bytes(), type.num_bytes()};
    } else {
      const void* const extent = at_bound(bindings, type.extent.value()).data;
      const int64_t bound = type.shape[0];
      const int64_t rows = std::min(bindings.elastic->find_rows(extent).value_or(bound), bound);
      const auto written = ranges_of(type, rows);
      const auto read = ranges_of(type, rows + backend_.device().rows_read_behind());
      for (size_t i = 0; i < written.size(); ++i) {
        const int64_t at = offset + written[i].offset;
        by_offset[at] = {at, written[i].num_bytes, read[i].num_bytes};
      }
    }
    const void* const address = at_bound(bindings, id).data;
    if (rows_.find_source(id) == nullptr) continue;
    if (const auto rows = bindings.elastic->find_rows(address))
      found.extents.emplace_back(address, *rows);
  }
  for (const auto& [offset, part] : by_offset) {
    auto& parts = found.parts;
    if (parts.empty() || parts.back().offset + align_up(parts.back().num_bytes) != offset) {
      parts.push_back(part);
      continue;
    }
    parts.back().num_bytes = offset + part.num_bytes - parts.back().offset;
    parts.back().read_bytes = offset + part.read_bytes - parts.back().offset;
  }
  return found;
}

/// What an extent is, or on a device the most that it can be; noted for whoever asks later.
int64_t Executable::find_rows(const Bindings& bindings, ValueId extent, RowCounts& rows) const {
  const auto known = rows.find(extent);
  if (known != rows.end()) return known->second;
  if (backend_.is_host()) {
    const Tensor count = at_bound(bindings, extent);
    bindings.elastic->note_rows(count.data, *count.as<int64_t>());
    return *count.as<int64_t>();
  }
  const ExtentSource& source = *rows_.find_source(extent);
  const Tensor address = at_bound(bindings, extent);
  int64_t found = std::numeric_limits<int64_t>::max();
  if (source.kind == ExtentSource::Kind::kTold) {
    Tensor count = address;
    count.device = &backend_.device();
    found = backend_.context()->read_count(count);
  } else if (source.kind == ExtentSource::Kind::kInput) {
    found = bindings.elastic->find_rows(address.data).value_or(found);
  } else {
    const Node& node = program_.nodes()[source.node];
    for (const ValueId id : node.inputs) {
      const ValueType& type = program_.type(id);
      if (type.ragged() && rows_.find_source(type.extent.value()) != nullptr)
        find_rows(bindings, type.extent.value(), rows);
    }
    found = bound_rows(program_, node, source.bounded, rows);
  }
  bindings.elastic->note_rows(address.data, found);
  rows[extent] = found;
  return found;
}

/// Gives what node `idx` writes memory for the rows that came.
void Executable::commit_outputs(size_t idx, const Bindings& bindings, RowCounts& rows) const {
  if (bindings.elastic == nullptr) return;
  for (const ValueId id : rows_.written_by(idx)) {
    const Tensor tensor = at_bound(bindings, id);
    const ValueType& type = program_.type(id);
    const ValueId extent = type.extent.value();
    const int64_t came = find_rows(bindings, extent, rows);
    const int64_t behind = backend_.device().rows_read_behind();
    const int64_t wanted = std::min(came, type.shape[0]) + behind;
    try {
      for (const ByteRange& range : ranges_of(type, wanted))
        bindings.elastic->commit(static_cast<const std::byte*>(tensor.data) + range.offset,
                                 range.num_bytes);
    } catch (const OutOfMemory& error) {
      throw OutOfMemory(fmt::format(
          "program '{}', '{}': {} rows of experts came to this rank, where balanced routing brings "
          "{}: {}; or a capacity (moe.capacity_factor), or a balance loss of more weight",
          program_.name(), program_.value(id).name, std::min(came, type.shape[0]),
          rows_.balanced().at(extent), error.what()));
    }
  }
}

}  // namespace tessera

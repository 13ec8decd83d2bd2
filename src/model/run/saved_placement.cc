#include "model/run/saved_placement.h"

#include <algorithm>
#include <cmath>

#include "ops/page_stash/page_stash.h"

namespace tessera {
namespace {

/// The most that `count` says of the programs of any degree of context parallelism.
template <typename Count>
int64_t most_of_degrees(const StagePrograms& programs, const Count& count) {
  int64_t most = count(programs);
  for (const auto& of_degree : programs.of_degrees) most = std::max(most, count(*of_degree));
  return most;
}

}  // namespace

StashNeed& StashNeed::operator+=(const StashNeed& other) {
  balanced += other.balanced;
  planned += other.planned;
  most += other.most;
  return *this;
}

StashNeed& StashNeed::operator-=(const StashNeed& other) {
  balanced -= other.balanced;
  planned -= other.planned;
  most -= other.most;
  return *this;
}

int64_t StashNeed::at(double skew) const {
  const auto pages = static_cast<int64_t>(std::ceil(static_cast<double>(balanced) * skew));
  return std::clamp(pages, planned, most);
}

StashNeed larger(const StashNeed& a, const StashNeed& b) {
  return {.balanced = std::max(a.balanced, b.balanced),
          .planned = std::max(a.planned, b.planned),
          .most = std::max(a.most, b.most)};
}

SavedPlacement list_saved(const StagePrograms& programs) {
  SavedPlacement placement;
  const ModelPart& part = programs.part;
  for (size_t c = 0; c < part.chunks.size(); ++c) {
    const PipelineChunk& chunk = part.chunks[c];
    const size_t num_layers = chunk.all_layers();
    const SavedOffsets offsets{
        .layers = std::vector<int64_t>(num_layers, 0),
        .kept = std::vector<int64_t>(num_layers, 0),
        .heads = std::vector<int64_t>(chunk.loss ? programs.heads.size() : 0, 0),
        .offloaded = std::vector<int64_t>(num_layers, 0),
        .host = std::vector<int64_t>(num_layers, 0)};
    placement.offsets.emplace_back(part.in_flight[c], offsets);
  }
  return placement;
}

int64_t layer_saved_bytes(const StagePrograms& programs, const PipelineChunk& chunk,
                          int64_t layer) {
  return most_of_degrees(programs, [&](const StagePrograms& of_degree) {
    return of_degree.kind_of(chunk.first_layer + layer).derived.forward.plan().saved_bytes;
  });
}

int64_t layer_offloaded_bytes(const StagePrograms& programs, const PipelineChunk& chunk,
                              int64_t layer) {
  return programs.kind_of(chunk.first_layer + layer).derived.forward.plan().offloaded_bytes;
}

int64_t layer_moved_bytes(const StagePrograms& programs, const PipelineChunk& chunk,
                          int64_t layer) {
  int64_t bytes = 0;
  const Executable& forward = programs.kind_of(chunk.first_layer + layer).derived.forward;
  forward.list_memory(1, [&](Storage storage, int64_t /*offset*/, int64_t num_bytes) {
    if (storage == Storage::kOffloaded) bytes += align_up(num_bytes);
  });
  return bytes;
}

int64_t layer_kept_bytes(const StagePrograms& programs, const PipelineChunk& chunk, int64_t layer) {
  return most_of_degrees(programs, [&](const StagePrograms& of_degree) {
    const DerivedProgram& derived = of_degree.kind_of(chunk.first_layer + layer).derived;
    return derived.weights ? derived.backward.plan().saved_bytes : 0;
  });
}

StashNeed layer_stash(const StagePrograms& programs, const PipelineChunk& chunk, int64_t layer) {
  StashNeed pages;
  const auto rule = programs.stash_rule();
  if (!rule) return pages;
  const Program& forward = programs.kind_of(chunk.first_layer + layer).derived.forward.program();
  for (const Node& node : forward.nodes()) {
    if (dynamic_cast<const StashPages*>(node.op.get()) == nullptr) continue;
    const ValueType& value = forward.type(node.inputs[StashPages::kValue]);
    pages.balanced += pages_of_rows(value, programs.balanced_rows(), rule->page_bytes);
    pages.planned += pages_of_rows(value, rule->rows, rule->page_bytes);
    pages.most += most_pages(value, rule->page_bytes);
  }
  return pages;
}

int64_t head_saved_bytes(const StagePrograms& programs, int64_t depth) {
  return most_of_degrees(programs, [&](const StagePrograms& of_degree) {
    return of_degree.heads.at(depth).derived.forward.plan().saved_bytes;
  });
}

SavedPlacement place_in_line(const StagePrograms& programs) {
  SavedPlacement placement = list_saved(programs);
  const auto place = [&](int64_t& offset, int64_t bytes) {
    offset = placement.num_bytes;
    placement.num_bytes += align_up(bytes, kSlabAlignment);
  };
  for (size_t c = 0; c < placement.offsets.size(); ++c) {
    const PipelineChunk& chunk = programs.part.chunks[c];
    for (SavedOffsets& offsets : placement.offsets[c]) {
      for (size_t i = 0; i < offsets.layers.size(); ++i) {
        const auto layer = static_cast<int64_t>(i);
        place(offsets.layers[i], layer_saved_bytes(programs, chunk, layer));
        place(offsets.offloaded[i], layer_offloaded_bytes(programs, chunk, layer));
        place(offsets.kept[i], layer_kept_bytes(programs, chunk, layer));
        placement.stash += layer_stash(programs, chunk, layer);
      }
      for (size_t depth = 0; depth < offsets.heads.size(); ++depth)
        place(offsets.heads[depth], head_saved_bytes(programs, static_cast<int64_t>(depth)));
    }
  }
  return placement;
}

}  // namespace tessera

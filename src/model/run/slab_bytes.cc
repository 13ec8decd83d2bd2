#include "model/run/slab_bytes.h"

#include "core/pages/page_set.h"

namespace tessera {
namespace {

/// Where what a program saves begins, and its working memory.
struct SlabOffsets {
  int64_t saved = 0;
  int64_t offloaded = 0;
  int64_t working = 0;
};

/// The programs of a derived one, each with its offsets.
template <typename Use>
void visit(const DerivedProgram& program, const SlabOffsets& saved, const SlabOffsets& backward,
           const Use& use) {
  use(program.forward, saved);
  use(program.backward, backward);
  if (program.weights) use(program.weights->program, SlabOffsets{.working = backward.working});
}

/// Every program that a rank runs, for each place of a micro-batch where what it saves lies.
template <typename Use>
void visit_programs(const StagePrograms& programs, const SavedPlacement& placement,
                    const Use& use) {
  const SlabOffsets backward{.working = programs.backward_working()};
  if (programs.embedding) visit(*programs.embedding, {}, backward, use);
  if (programs.evaluation_head) use(*programs.evaluation_head, SlabOffsets());
  for (size_t c = 0; c < placement.offsets.size(); ++c) {
    const PipelineChunk& chunk = programs.part.chunks[c];
    for (const SavedOffsets& offsets : placement.offsets[c]) {
      for (size_t i = 0; i < offsets.layers.size(); ++i)
        visit(programs.kind_of(chunk.first_layer + static_cast<int64_t>(i)).derived,
              {offsets.layers[i], offsets.offloaded[i]},
              {.saved = offsets.kept[i], .working = backward.working}, use);
      for (size_t depth = 0; depth < offsets.heads.size(); ++depth)
        visit(programs.heads[depth].derived, {.saved = offsets.heads[depth]}, backward, use);
    }
  }
}

bool has_elastic(const StagePrograms& programs) {
  bool found = false;
  if (programs.backend.device().page_bytes() == 0) return found;
  const auto look = [&](const Executable& program, const SlabOffsets& /*offsets*/) {
    found = found || program.rows().has_elastic();
  };
  visit_programs(programs, list_saved(programs), look);
  return found;
}

/// What some program wants, by whole pages.
SlabBytes count_pages(const StagePrograms& programs, const SavedPlacement& placement, double skew) {
  const SlabBytes most = bound_slab_bytes(programs, placement);
  const int64_t page = programs.backend.device().page_bytes();
  PageSet saved(most.saved, page);
  PageSet transient(most.transient, page);
  visit_programs(programs, placement, [&](const Executable& program, const SlabOffsets& slabs) {
    program.list_memory(skew, [&](Storage storage, int64_t offset, int64_t num_bytes) {
      if (storage == Storage::kTransient)
        return transient.add(slabs.working + offset, slabs.working + offset + num_bytes);
      const int64_t slab = storage == Storage::kSaved ? slabs.saved : slabs.offloaded;
      saved.add(slab + offset, slab + offset + num_bytes);
    });
  });
  return {.saved = saved.num_bytes(), .transient = transient.num_bytes()};
}

}  // namespace

SlabBytes bound_slab_bytes(const StagePrograms& programs, const SavedPlacement& placement) {
  return {.saved = placement.num_bytes, .transient = programs.transient_bytes()};
}

SlabBytes skewed_slab_bytes(const StagePrograms& programs, const SavedPlacement& placement,
                            double skew) {
  const SlabBytes most = bound_slab_bytes(programs, placement);
  if (!has_elastic(programs)) return most;
  const bool saves_memory = count_pages(programs, placement, 1).total() < most.total();
  return saves_memory ? count_pages(programs, placement, skew) : most;
}

bool comes_by_pages(const StagePrograms& programs, const SavedPlacement& placement) {
  return skewed_slab_bytes(programs, placement).total() <
         bound_slab_bytes(programs, placement).total();
}

}  // namespace tessera

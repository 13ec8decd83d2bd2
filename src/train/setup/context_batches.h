#pragma once

#include "data/step_documents.h"
#include "model/build/token_share.h"
#include "parallel/context_plan.h"
#include "train/setup/settings.h"

namespace tessera {

/// What ContextPlan is to know of a run on this layout, whose micro-batches have at most
/// `max_sequences` sequences.
ContextPlanSpec context_spec(const Settings& settings, const Layout& layout, int64_t max_sequences);

/// Refuses what does not go together with parallel.dynamic_cp, where that is set.
void validate_contexts(const Settings& settings);
/// The same of a layout's degrees.
void check_contexts(const Settings& settings, const Layout& layout);

/// A rank's micro-batch of a step.
struct ContextBatch {
  Batch batch;
  ContextShare share;
};

/// A rank's micro-batches with dynamic context parallelism: a pure function of step, run and
/// layout. The source must outlive it.
class ContextBatches {
 public:
  ContextBatches(const ContextPlanSpec& spec, const BatchSource& source, StageGroups groups,
                 int64_t max_sequences)
      : spec_(spec), source_(source), groups_(std::move(groups)), max_sequences_(max_sequences) {}

  ContextPlan plan(int64_t step) const;
  std::vector<ContextBatch> read(int64_t step) const;

 private:
  ContextBatch make_batch(const StepDocuments& documents, const ContextGroup& group) const;

  ContextPlanSpec spec_;
  const BatchSource& source_;
  StageGroups groups_;
  int64_t max_sequences_;
};

}  // namespace tessera

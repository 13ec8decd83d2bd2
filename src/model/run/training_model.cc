#include "model/run/training_model.h"

#include <algorithm>

#include "core/limits.h"
#include "core/out_of_memory.h"

namespace tessera {
namespace {

/// Copies between pinned memory and a device need nobody's help.
Buffer allocate_offloaded(int64_t num_bytes, Device& device) {
  try {
    return {num_bytes, "offloaded activations", device, MemoryKind::kShared};
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(fmt::format("{}, or name less in train.offload; {}", error.what(),
                                  describe_lockable_memory()));
  }
}

}  // namespace

TrainingModel::TrainingModel(const ModelConfig& config, const BatchShape& shape,
                             const SavedPolicy& policy, const Backend& backend, ModelPart part)
    : TrainingModel(
          std::make_unique<StagePrograms>(config, shape, std::move(part), policy, backend)) {}

TrainingModel::TrainingModel(std::unique_ptr<StagePrograms> programs)
    : programs_(std::move(programs)),
      tokens_(std::make_unique<TokenShare>(share_tokens(programs_->shape, programs_->part.groups))),
      placement_(place_in_line(*programs_)) {}

ActivationBytes TrainingModel::activation_bytes() const {
  const SlabBytes most = bound_slab_bytes(*programs_, placement_);
  const SlabBytes slabs = skewed_slab_bytes(*programs_, placement_);
  ActivationBytes bytes{.saved = slabs.saved,
                        .transient = slabs.transient,
                        .copies = LayerCopies::count_bytes(*programs_),
                        .stash = stash_bytes(1),
                        .offloaded = placement_.host_bytes,
                        .worst = std::max<int64_t>(most.total() - slabs.total(), 0)};
  const StashNeed& stash = placement_.stash;
  bytes.worst += StashPool::count_bytes(*programs_, stash, stash.most) - bytes.stash;
  bytes.inputs = RoundingTables::count_bytes(*programs_);
  const ModelPart& part = programs_->part;
  for (size_t chunk = 0; chunk < part.chunks.size(); ++chunk) {
    const ChunkRun::Bytes one = ChunkRun::count_bytes(*programs_, part.chunks[chunk]);
    bytes.hidden += one.hidden * part.in_flight[chunk];
    bytes.inputs += one.inputs * part.in_flight[chunk];
  }
  return bytes;
}

int64_t TrainingModel::stash_bytes(double skew) const {
  const StashNeed& need = placement_.stash;
  return StashPool::count_bytes(*programs_, need, need.at(skew));
}

/// Of what routing makes larger.
int64_t TrainingModel::skewed_total(double skew) const {
  return skewed_slab_bytes(*programs_, placement_, skew).total() + stash_bytes(skew);
}

double TrainingModel::find_skew(int64_t more_bytes) const {
  const int64_t limit = skewed_total(1) + more_bytes;
  double fits = 1;
  double too_much = static_cast<double>(programs_->config.moe.num_experts);
  constexpr double kExact = 0.01;
  while (too_much - fits > kExact) {
    const double middle = (fits + too_much) / 2;
    const bool has_room = skewed_total(middle) <= limit;
    (has_room ? fits : too_much) = middle;
  }
  return fits;
}

int64_t TrainingModel::skewed_bytes(double skew) const {
  return skewed_total(skew) - skewed_total(1);
}

SlabBytes TrainingModel::slab_bytes() const {
  ensure(slabs_ != nullptr, "TrainingModel::slab_bytes before bind");
  return {.saved = slabs_->saved().committed_bytes(),
          .transient = slabs_->transient().committed_bytes()};
}

int64_t TrainingModel::elastic_bytes() const {
  const int64_t stash =
      stash_ ? StashPool::count_bytes(*programs_, placement_.stash, stash_->num_pages()) : 0;
  return slab_bytes().total() + stash;
}

void TrainingModel::bind(ParameterSet& parameters, std::vector<ExpertState>& experts,
                         WeightStore* store) {
  experts_ = &experts;
  runs_.clear();
  const auto kind = comes_by_pages(*programs_, placement_) ? ElasticMemory::Kind::kByPage
                                                           : ElasticMemory::Kind::kWhole;
  slabs_ = std::make_unique<ElasticSlabs>(
      ElasticMemory(kind, placement_.num_bytes, "saved activations", device()),
      ElasticMemory(kind, programs_->transient_bytes(), "working memory of the layers", device()),
      device());
  copies_ = std::make_unique<HostCopies>();
  copies_->memory = allocate_offloaded(placement_.host_bytes, device());
  if (placement_.host_bytes > 0) {
    copies_->stores = device().make_copy_lane();
    copies_->reloads = device().make_copy_lane();
  }
  stash_.reset();
  if (placement_.stash.most > 0) stash_ = std::make_unique<StashPool>(*programs_, placement_.stash);
  ensure(store == nullptr || LayerCopies::count_bytes(*programs_) == 0,
         "copies are made of weights that come and go");
  weight_copies_ = std::make_unique<LayerCopies>(*programs_);
  roundings_ = std::make_unique<RoundingTables>(*programs_);
  const ChunkState state{.parameters = parameters,
                         .weight_copies = *weight_copies_,
                         .roundings = *roundings_,
                         .experts = experts,
                         .slabs = *slabs_,
                         .copies = *copies_,
                         .stash = stash_.get(),
                         .store = store};
  const ModelPart& part = programs_->part;
  runs_.resize(part.chunks.size());
  for (size_t chunk = 0; chunk < part.chunks.size(); ++chunk) {
    for (int64_t place = 0; place < part.in_flight[chunk]; ++place) {
      const SavedOffsets& offsets = placement_.offsets[chunk][place];
      runs_[chunk].push_back(
          std::make_unique<ChunkRun>(*programs_, part.chunks[chunk], *tokens_, state, offsets));
    }
  }
  slabs_->keep();
}

void TrainingModel::begin_step() {
  ensure(experts_ != nullptr, "TrainingModel::begin_step before bind");
  for (const auto& places : runs_) {
    for (const auto& run : places) run->forget_results();
  }
  slabs_->leave_saved();
  weight_copies_->forget();
  roundings_->begin_step();
  if (stash_) stash_->begin_step();
  const bool counts_earlier = config().moe.balance_scope == BalanceTokens::kGlobalBatch;
  for (ExpertState& state : *experts_) {
    std::ranges::fill(state.step_counts.get().span<float>(), 0.0F);
    if (counts_earlier) std::ranges::fill(state.earlier_counts.get().span<float>(), 0.0F);
  }
}

ChunkRun& TrainingModel::run_at(const RunSlot& at) {
  return *runs_.at(at.chunk).at(at.place);
}

ChunkRun& TrainingModel::only_run() const {
  ensure(!runs_.empty(), "the model runs before bind");
  const PipelineChunk& chunk = programs_->part.chunks[0];
  ensure(runs_.size() == 1 && chunk.embedding && chunk.loss, "the model is no single chunk");
  return *runs_[0][0];
}

MicroBatchResult TrainingModel::run(const MicroBatch& batch, const LossScales& scales,
                                    const NodeObserver& observer) {
  ChunkRun& run = only_run();
  run.load(batch, scales);
  run.run_pass(PassDirection::kForward, observer);
  if (balances_whole_model(config())) run.sum_balance();
  run.run_pass(PassDirection::kBackward, observer);
  run.run_pass(PassDirection::kWeights, observer);
  run.finish();
  device().synchronize();
  MicroBatchResult result = run.collect();
  if (stash_) result.missing_pages = stash_->missing();
  return result;
}

double TrainingModel::evaluate(const MicroBatch& batch, const NodeObserver& observer) {
  ChunkRun& run = only_run();
  weight_copies_->forget();
  run.load(batch, {.loss = 1});
  for (const ProgramRef& program : list_evaluation(run.chunk())) run.run(program, observer);
  run.finish();
  device().synchronize();
  return run.collect_loss();
}

std::vector<std::vector<double>> TrainingModel::last_counts() const {
  return only_run().counts();
}

std::vector<LayerKind> TrainingModel::layer_kinds() const {
  std::vector<LayerKind> result;
  for (const auto& [key, program] : programs_->kinds) {
    if (result.empty() || result.back() != key.kind) result.push_back(key.kind);
  }
  return result;
}

const DerivedProgram& TrainingModel::layer_program(LayerKind kind) const {
  const auto found = std::ranges::find_if(
      programs_->kinds, [&](const auto& program) { return program.first.kind == kind; });
  ensure(found != programs_->kinds.end(), "the model has no such layer");
  return found->second->derived;
}

}  // namespace tessera

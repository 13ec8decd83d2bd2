#include "optim/sharded/held_state.h"

#include <numeric>
#include <utility>

#include "ops/adamw/moment_blocks.h"
#include "optim/replicas.h"

namespace tessera {
namespace {

std::vector<Parameter> plain(const std::vector<HeldParameter>& parameters) {
  std::vector<Parameter> result;
  for (const HeldParameter& p : parameters) {
    ensure(p.parameter.weight.shape == p.slice.shape(), "optimizer: '{}' has weight {} but {}",
           p.parameter.name, p.parameter.weight.shape.to_string(), p.slice.to_string());
    result.push_back(p.parameter);
  }
  return result;
}

}  // namespace

HeldState::HeldState(std::vector<HeldParameter> parameters, CommunicatorPtr world,
                     const OptimizerOptions& options, const Backend& backend, UpdateGroups groups)
    : parameters_(std::move(parameters)),
      world_(std::move(world)),
      optimizer_(plain(parameters_), options, backend, std::move(groups)) {}

std::vector<Tensor> HeldState::owned_gradients() const {
  std::vector<Tensor> grads;
  for (const HeldParameter& p : parameters_) grads.push_back(take_rows(p.parameter.grad, p.owned));
  return grads;
}

void HeldState::give_clip(std::span<const Tensor> losses, const UpdateObserver& observer) {
  ensure(is_alone(), "the norm of {} ranks' gradients is asked of one", world_->size());
  optimizer_.give_clip(owned_gradients(), losses, observer);
}

// Summed rank by rank, and not by an all-reduce, so that all ranks have the same bits in every back
// end.
double HeldState::sum_over_ranks(const std::vector<double>& sums) const {
  double own = std::accumulate(sums.begin(), sums.end(), 0.0);
  std::vector<double> all(world_->size());
  world_->all_gather(view(std::span(&own, 1), {1}), view(std::span(all), {world_->size()})).wait();
  return std::accumulate(all.begin(), all.end(), 0.0);
}

StepResult HeldState::judge_updated(const StepInput& input) {
  return Optimizer::judge(sum_over_ranks(optimizer_.group_sums()), input);
}

StepResult HeldState::judge(const StepInput& input) {
  const double sum = sum_over_ranks(optimizer_.sums_of_squares(owned_gradients(), input.observer));
  const auto result = Optimizer::judge(sum, input);
  optimizer_.prepare(input);
  optimizer_.give_factors(input.grad_scale, result);
  return result;
}

void HeldState::append(std::vector<NamedSlice>& slices, size_t idx, HeldPart part,
                       const NamedTensor& tensor) const {
  const HeldParameter& p = parameters_[idx];
  const IndexRange rows = part == HeldPart::kOwned ? p.owned : IndexRange{0, p.slice.num_rows()};
  const Slice whole = names_scales(tensor.name) ? slice_of_scales(p.slice) : p.slice;
  const Slice slice = whole.take_rows(rows.begin, rows.count);
  const bool names_empty = p.names_empty && whole.global.num_elements() == 0;
  if (slice.shape().num_elements() == 0 && !names_empty) return;
  slices.push_back({tensor.name, take_rows(tensor.tensor, rows), slice});
}

std::vector<NamedSlice> HeldState::state_slices(HeldPart part) const {
  std::vector<NamedSlice> slices;
  size_t at = 0;
  const std::vector<NamedTensor> state = optimizer_.state();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    for (int t = 0; t < optimizer_.num_state_tensors(i); ++t) append(slices, i, part, state[at++]);
  }
  return slices;
}

void HeldState::change_masters(const std::function<void(const NamedSlice& master)>& change) const {
  optimizer_.change_masters([&](size_t idx, const Tensor& master) {
    std::vector<NamedSlice> slices;
    append(slices, idx, HeldPart::kHeld, {parameters_[idx].parameter.name, master});
    for (const NamedSlice& slice : slices) change(slice);
  });
}

void HeldState::set_row_factors(const FillRowFactors& fill) {
  optimizer_.set_row_factors([&](size_t idx, std::span<float> factors) {
    const HeldParameter& p = parameters_[idx];
    int64_t first = 0;
    for (const IndexRange& run : p.slice.rows) {
      fill(p.parameter.name, run.begin, factors.subspan(first, run.count));
      first += run.count;
    }
  });
}

std::vector<NamedSlice> HeldState::weight_slices(HeldPart part) const {
  std::vector<NamedSlice> slices;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i].parameter;
    append(slices, i, part, {p.name, optimizer_.weight(i)});
  }
  return slices;
}

std::vector<NamedSlice> HeldState::gradient_slices(HeldPart part) const {
  std::vector<NamedSlice> slices;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i].parameter;
    append(slices, i, part, {p.name, p.grad});
  }
  return slices;
}

}  // namespace tessera

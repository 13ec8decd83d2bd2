// What an optimizer does for matrices that Muon updates.
#include <algorithm>
#include <limits>

#include "ops/newton_schulz/newton_schulz.h"
#include "optim/optimizer.h"
#include "optim/replicas.h"

namespace tessera {
namespace {

/// In place of the kind of a matrix without elements.
constexpr size_t kNoKind = std::numeric_limits<size_t>::max();

}  // namespace

/// The kind of each matrix, which may be a new one. Those without elements have none of their own.
std::vector<size_t> Optimizer::find_muon(const Parameter& parameter,
                                         const OptimizerOptions& options, const Backend& backend,
                                         std::vector<Kind>& kinds) {
  const MuonSpec spec = {
      .momentum = options.muon.momentum,
      .nesterov = options.muon.nesterov,
      .weight_decay = parameter.is_decayed(options.decay_all) ? options.weight_decay : 0.0,
      .bf16_weight = parameter.weight.dtype == DType::kBF16,
      .formats = options.formats};
  const int64_t columns = parameter.weight.shape[1];
  std::vector<size_t> result;
  for (const int64_t rows : parameter.matrix_rows) {
    if (rows == 0 || columns == 0) {
      result.push_back(kNoKind);
      continue;
    }
    auto found = std::ranges::find_if(kinds, [&](const Kind& kind) {
      return kind.muon && kind.muon->is_of(spec, rows, columns, parameter.cut) &&
             kind.lr_multiplier == parameter.lr_multiplier;
    });
    if (found == kinds.end())
      found = kinds.insert(
          kinds.end(),
          Kind{nullptr, MuonKind(spec, options.muon, rows, columns, parameter.cut, backend),
               parameter.lr_multiplier});
    ++found->num_matrices;
    result.push_back(found - kinds.begin());
  }
  return result;
}

/// A slot's matrices of this kind.
void Optimizer::append_matrices(const Slot& slot, size_t kind, std::vector<MuonMatrix>& matrices) {
  IndexRange rows;
  const auto part = [&](const Tensor& tensor) { return flat(take_rows(tensor, rows)); };
  for (size_t i = 0; i < slot.parameter.matrix_rows.size(); ++i) {
    rows = {rows.end(), slot.parameter.matrix_rows[i]};
    if (slot.kinds[i] != kind) continue;
    matrices.push_back({.grad = part(slot.parameter.grad),
                        .m = part(slot.m),
                        .m_scale = slot.m_scale ? take_rows(slot.m_scale, rows) : Tensor(),
                        .master = part(slot.master),
                        .weight = part(slot.parameter.weight)});
  }
}

void Optimizer::update_by_muon(size_t kind, std::span<const size_t> parameters,
                               const UpdateObserver& observer) const {
  std::vector<MuonMatrix> matrices;
  for (const size_t idx : parameters) append_matrices(at_work(idx), kind, matrices);
  if (matrices.empty()) return;
  kinds_[kind].muon->update(matrices, factors_of(kind, own_.factors), own_.grad_scale,
                            muon_workspace_,
                            [&](const Operator& op, auto inputs, auto outputs, auto workspace) {
                              run_kernel(op, inputs, outputs, workspace, observer);
                            });
}

/// Kinds take turns in it.
int64_t Optimizer::workspace_bytes(std::span<const Kind> kinds) {
  int64_t bytes = 0;
  for (const Kind& kind : kinds) {
    if (kind.muon) bytes = std::max(bytes, kind.muon->workspace_bytes(kind.num_matrices));
  }
  return bytes;
}

int64_t Optimizer::workspace_bytes(std::span<const Parameter> parameters,
                                   const OptimizerOptions& options, const Backend& backend) {
  std::vector<Kind> kinds;
  for (const Parameter& parameter : parameters) {
    if (!parameter.has_second_moment()) find_muon(parameter, options, backend, kinds);
  }
  return workspace_bytes(kinds);
}

double Optimizer::update_flops(std::span<const Parameter> parameters,
                               const OptimizerOptions& options) {
  const OperatorPtr op = make_newton_schulz(options.muon.ns_steps);
  double flops = 0;
  for (const Parameter& parameter : parameters) {
    for (const int64_t rows : parameter.matrix_rows) {
      const Shape whole = parameter.cut.whole(rows, parameter.weight.shape[1]);
      const ValueType matrix{parameter.weight.dtype, {1, whole[0], whole[1]}};
      flops += op->cost(std::span(&matrix, 1), std::span(&matrix, 1)).flops /
               static_cast<double>(parameter.cut.num_parts());
    }
  }
  return flops;
}

}  // namespace tessera

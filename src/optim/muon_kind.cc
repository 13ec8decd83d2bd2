#include "optim/muon_kind.h"

#include <algorithm>

#include "ops/newton_schulz/newton_schulz.h"

namespace tessera {
namespace {

/// Elements of a batch: on the host few, which stay in caches; a GPU's products of one matrix of
/// an expert alone would leave most of its SMs idle.
constexpr int64_t kHostBatch = int64_t{1} << 20;
constexpr int64_t kGpuBatch = int64_t{1} << 25;
/// Matrices of a batch: what one launch can count.
constexpr int64_t kMaxBatch = int64_t{1} << 15;

}  // namespace

MuonKind::MuonKind(const MuonSpec& spec, const MuonOptions& options, int64_t rows, int64_t columns,
                   const Backend& backend)
    : spec_(spec),
      rows_(rows),
      columns_(columns),
      max_elements_(backend.is_host() ? kHostBatch : kGpuBatch),
      backend_(backend),
      momentum_(make_muon_momentum(spec)),
      newton_schulz_(make_newton_schulz(options.ns_steps)),
      update_(make_muon_update(spec)) {
  ensure(rows > 0 && columns > 0, "muon: a matrix of {} x {}", rows, columns);
}

bool MuonKind::is_of(const MuonSpec& spec, int64_t rows, int64_t columns) const {
  return spec_.weight_decay == spec.weight_decay && spec_.bf16_weight == spec.bf16_weight &&
         rows_ == rows && columns_ == columns;
}

int64_t MuonKind::batch(int64_t count) const {
  return std::min(count, std::clamp<int64_t>(max_elements_ / elements(), 1, kMaxBatch));
}

/// The matrices that are orthogonalized, in place.
int64_t MuonKind::update_bytes(int64_t batch) const {
  return align_up(batch * elements() * dtype_size(spec_.weight_dtype()));
}

int64_t MuonKind::workspace_bytes(int64_t count) const {
  const int64_t num_matrices = batch(count);
  const ValueType type{spec_.weight_dtype(), {num_matrices, rows_, columns_}};
  return update_bytes(num_matrices) +
         align_up(backend_.workspace_bytes(*newton_schulz_, std::span(&type, 1)));
}

void MuonKind::update(std::span<const MuonMatrix> matrices, const Tensor& factors,
                      const Tensor& grad_scale, const Buffer& workspace,
                      const RunKernel& run) const {
  const int64_t size = batch(std::ssize(matrices));
  for (int64_t first = 0; first < std::ssize(matrices); first += size) {
    const int64_t count = std::min(size, std::ssize(matrices) - first);
    update_batch(matrices.subspan(first, count), factors, grad_scale, workspace, run);
  }
}

void MuonKind::update_batch(std::span<const MuonMatrix> matrices, const Tensor& factors,
                            const Tensor& grad_scale, const Buffer& workspace,
                            const RunKernel& run) const {
  const int64_t count = std::ssize(matrices);
  const Tensor flat = workspace.tensor(0, spec_.weight_dtype(), {count, elements()});
  std::vector<Tensor> inputs, outputs;
  for (const MuonMatrix& matrix : matrices) {
    inputs.push_back(matrix.grad);
    outputs.push_back(matrix.m);
  }
  inputs.insert(inputs.end(), {factors, grad_scale});
  outputs.push_back(flat);
  run(*momentum_, inputs, outputs, {});

  const Tensor batch = workspace.tensor(0, spec_.weight_dtype(), {count, rows_, columns_});
  run(*newton_schulz_, std::span(&batch, 1), std::span(&batch, 1),
      workspace.bytes().subspan(static_cast<size_t>(update_bytes(count))));

  outputs.clear();
  for (const MuonMatrix& matrix : matrices) {
    outputs.push_back(matrix.master);
    if (spec_.master() != MasterKind::kNone) outputs.push_back(matrix.weight);
  }
  const Tensor last[] = {flat, factors, grad_scale};
  run(*update_, last, outputs, {});
}

}  // namespace tessera

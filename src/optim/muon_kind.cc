#include "optim/muon_kind.h"

#include <algorithm>

#include "ops/collective/head_exchange.h"
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
                   const MatrixCut& cut, const Backend& backend)
    : spec_(spec),
      rows_(rows),
      columns_(columns),
      cut_(cut),
      whole_(cut.whole(rows, columns)),
      max_elements_(backend.is_host() ? kHostBatch : kGpuBatch),
      backend_(backend),
      momentum_(make_muon_momentum(spec)),
      newton_schulz_(make_newton_schulz(options.ns_steps)),
      update_(make_muon_update(spec)) {
  ensure(rows > 0 && columns > 0, "muon: a matrix of {} x {}", rows, columns);
  if (cut.num_parts() == 1) return;
  // What a rank has of a row is to this exchange a head of it.
  join_ = make_scatter_heads(cut.parts, cut.num_parts());
  part_ = make_gather_heads(cut.parts, cut.num_parts());
}

bool MuonKind::is_of(const MuonSpec& spec, int64_t rows, int64_t columns,
                     const MatrixCut& cut) const {
  return spec_.weight_decay == spec.weight_decay && spec_.bf16_weight == spec.bf16_weight &&
         rows_ == rows && columns_ == columns && cut_ == cut;
}

int64_t MuonKind::batch(int64_t count) const {
  const int64_t by_rank = std::clamp<int64_t>(max_elements_ / whole_.num_elements(), 1, kMaxBatch);
  return std::min(count, by_rank * cut_.num_parts());
}

Shape MuonKind::parts_shape(const Scratch& scratch) const {
  if (cut_.by_columns) return {scratch.num_parts * rows_, columns_};
  return {scratch.num_parts, elements()};
}

Shape MuonKind::whole_shape(const Scratch& scratch) const {
  const Shape parts = parts_shape(scratch);
  return {parts[0] / cut_.num_parts(), parts[1] * cut_.num_parts()};
}

MuonKind::Scratch MuonKind::scratch(int64_t count) const {
  Scratch scratch;
  scratch.num_whole = (count + cut_.num_parts() - 1) / cut_.num_parts();
  scratch.num_parts = scratch.num_whole * cut_.num_parts();
  const DType dtype = spec_.weight_dtype();
  const int64_t bytes = align_up(scratch.num_parts * elements() * dtype_size(dtype));
  scratch.whole = join_ ? bytes : 0;
  scratch.kernels = scratch.whole + bytes;
  const auto needed = [&](const Operator& op, const Shape& shape) {
    const ValueType type{dtype, shape};
    return align_up(backend_.workspace_bytes(op, std::span(&type, 1)));
  };
  int64_t kernels = needed(*newton_schulz_, {scratch.num_whole, whole_[0], whole_[1]});
  if (join_) {
    kernels = std::max(
        {kernels, needed(*join_, parts_shape(scratch)), needed(*part_, whole_shape(scratch))});
  }
  scratch.num_bytes = scratch.kernels + kernels;
  return scratch;
}

int64_t MuonKind::workspace_bytes(int64_t count) const {
  return scratch(batch(count)).num_bytes;
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

/// The parts that begin the scratch memory, in place.
void MuonKind::orthogonalize(const Scratch& scratch, const Buffer& workspace,
                             const RunKernel& run) const {
  const DType dtype = spec_.weight_dtype();
  const auto kernels = workspace.bytes().subspan(static_cast<size_t>(scratch.kernels));
  const auto apply = [&](const OperatorPtr& op, const Tensor& from, const Tensor& to) {
    run(*op, std::span(&from, 1), std::span(&to, 1), kernels);
  };
  const Tensor batch =
      workspace.tensor(scratch.whole, dtype, {scratch.num_whole, whole_[0], whole_[1]});
  if (!join_) return apply(newton_schulz_, batch, batch);
  const Tensor parts = workspace.tensor(0, dtype, parts_shape(scratch));
  const Tensor whole = workspace.tensor(scratch.whole, dtype, whole_shape(scratch));
  apply(join_, parts, whole);
  apply(newton_schulz_, batch, batch);
  apply(part_, whole, parts);
}

void MuonKind::update_batch(std::span<const MuonMatrix> matrices, const Tensor& factors,
                            const Tensor& grad_scale, const Buffer& workspace,
                            const RunKernel& run) const {
  const int64_t count = std::ssize(matrices);
  const Tensor flat = workspace.tensor(0, spec_.weight_dtype(), {count, elements()});
  std::vector<Tensor> inputs, outputs;
  const bool scaled = has_scales(spec_.formats.first_moment);
  const auto arranged = [&](Tensor tensor) {
    if (scaled) tensor.shape = {rows_, columns_};
    return tensor;
  };
  for (const MuonMatrix& matrix : matrices) {
    inputs.push_back(arranged(matrix.grad));
    outputs.push_back(arranged(matrix.m));
    if (scaled) outputs.push_back(matrix.m_scale);
  }
  inputs.insert(inputs.end(), {factors, grad_scale});
  outputs.push_back(flat);
  run(*momentum_, inputs, outputs, {});

  orthogonalize(scratch(count), workspace, run);

  outputs.clear();
  for (const MuonMatrix& matrix : matrices) {
    outputs.push_back(matrix.master);
    if (spec_.master() != MasterKind::kNone) outputs.push_back(matrix.weight);
  }
  const Tensor last[] = {flat, factors, grad_scale};
  run(*update_, last, outputs, {});
}

}  // namespace tessera

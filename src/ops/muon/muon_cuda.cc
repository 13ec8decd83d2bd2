#include "ops/cuda/context.h"
#include "ops/muon/muon.h"
#include "ops/muon/muon_kernels.h"

namespace tessera {
namespace {

cuda::MuonStep step_of(const Tensor& factors, const Tensor& grad_scale) {
  return {reinterpret_cast<const MuonFactors*>(factors.as<float>()),
          reinterpret_cast<const AdamWGradScale*>(grad_scale.as<float>())};
}

void scaled_momentum(const MuonMomentum& op, const KernelArgs& args, const cuda::MuonStep& step,
                     int64_t batch) {
  std::vector<cuda::MuonScaledGradient> matrices;
  for (int64_t i = 0; i < batch; ++i)
    matrices.push_back(
        {args.in(i).as<float>(), args.out(2 * i).data, args.out(2 * i + 1).as<uint8_t>()});
  const Shape& shape = args.in(0).shape;
  const Tensor& u = args.out(batch * op.num_kept());
  cuda::launch_muon_scaled_momentum(op.spec().formats.first_moment, u.dtype, step, matrices, u.data,
                                    shape[0], shape[1], cuda::stream_of(args));
}

void muon_momentum(const MuonMomentum& op, const KernelArgs& args) {
  const int64_t batch = std::ssize(args.inputs) - MuonMomentum::kNumTrailing;
  const cuda::MuonStep step =
      step_of(args.in(batch + MuonMomentum::kFactors), args.in(batch + MuonMomentum::kGradScale));
  if (op.scaled()) return scaled_momentum(op, args, step, batch);
  std::vector<cuda::MuonGradient> matrices;
  for (int64_t i = 0; i < batch; ++i)
    matrices.push_back({args.in(i).as<float>(), args.out(i).data});
  const Tensor& u = args.out(batch);
  cuda::launch_muon_momentum(moment_dtype(op.spec().formats.first_moment), u.dtype, step, matrices,
                             u.data, u.shape[1], cuda::stream_of(args));
}

void muon_update(const MuonUpdate& op, const KernelArgs& args) {
  const Tensor& o = args.in(MuonUpdate::kOrthogonal);
  const bool has_weight = op.num_outputs() == 2;
  std::vector<cuda::MuonWeight> matrices;
  for (size_t i = 0; i < args.outputs.size(); i += op.num_outputs()) {
    const auto out = args.outputs.subspan(i, op.num_outputs());
    matrices.push_back(
        {out[MuonUpdate::kMaster].data, has_weight ? out[MuonUpdate::kWeight].data : nullptr});
  }
  if (matrices.empty()) return;
  cuda::launch_muon_update(args.out(MuonUpdate::kMaster).dtype, has_weight, o.dtype,
                           step_of(args.in(MuonUpdate::kFactors), args.in(MuonUpdate::kGradScale)),
                           matrices, o.data, o.shape[1], cuda::stream_of(args));
}

}  // namespace

void add_muon_cuda(KernelTable& table) {
  add_kernel<MuonMomentum>(table, muon_momentum);
  add_kernel<MuonUpdate>(table, muon_update);
}

}  // namespace tessera

#include "ops/adamw/adamw.h"
#include "ops/adamw/adamw_kernels.h"
#include "ops/cuda/context.h"

namespace tessera {
namespace {

cuda::AdamWSlice slice_of(const AdamW& op, const Tensor& grad, std::span<const Tensor> out) {
  return {.count = grad.num_elements(),
          .grad = grad.data,
          .master = out[AdamW::kMaster].data,
          .m = out[AdamW::kFirstMoment].data,
          .v = out[AdamW::kSecondMoment].data,
          .weight = op.has_weight() ? out[AdamW::kWeight].data : nullptr};
}

cuda::AdamWRows rows_of(const AdamW& op, const Tensor& grad, std::span<const Tensor> out) {
  const StateFormats& formats = op.spec().formats;
  const auto scales = [&](MomentKind kind, int place) {
    return has_scales(kind) ? out[place].as<uint8_t>() : nullptr;
  };
  return {.rows = grad.shape[0],
          .columns = grad.shape[1],
          .elements = slice_of(op, grad, out),
          .m_scale = scales(formats.first_moment, op.first_scales()),
          .v_scale = scales(formats.second_moment, op.second_scales())};
}

void adamw(const AdamW& op, const KernelArgs& args) {
  const size_t num_slices = args.inputs.size() - AdamW::kNumTrailing;
  const StateFormats& formats = op.spec().formats;
  const float* factors = args.in(num_slices + AdamW::kFactors).as<float>();
  const float* grad_scale = args.in(num_slices + AdamW::kGradScale).as<float>();
  const cuda::AdamWStep step = {reinterpret_cast<const AdamWFactors*>(factors),
                                reinterpret_cast<const AdamWGradScale*>(grad_scale)};
  const DType grad = op.spec().bf16_grad ? DType::kBF16 : DType::kF32;
  const DType master = args.out(AdamW::kMaster).dtype;
  std::vector<cuda::AdamWSlice> slices;
  std::vector<cuda::AdamWRows> rows;
  for (size_t i = 0; i < num_slices; ++i) {
    const auto out = args.outputs.subspan(i * op.num_outputs(), op.num_outputs());
    if (formats.have_scales()) {
      rows.push_back(rows_of(op, args.in(i), out));
    } else {
      slices.push_back(slice_of(op, args.in(i), out));
    }
  }
  if (formats.have_scales())
    return cuda::launch_adamw_rows(
        {grad, master, formats.first_moment, formats.second_moment, op.has_weight()}, step, rows,
        cuda::stream_of(args));
  cuda::launch_adamw({grad, master, moment_dtype(formats.first_moment),
                      moment_dtype(formats.second_moment), op.has_weight()},
                     step, slices, cuda::stream_of(args));
}

}  // namespace

void add_adamw_cuda(KernelTable& table) {
  add_kernel<AdamW>(table, adamw);
}

}  // namespace tessera

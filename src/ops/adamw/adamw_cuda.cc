#include "ops/adamw/adamw.h"
#include "ops/adamw/adamw_kernels.h"
#include "ops/cuda/context.h"

namespace tessera {
namespace {

void adamw(const AdamW& op, const KernelArgs& args) {
  const size_t num_slices = args.inputs.size() - AdamW::kNumTrailing;
  std::vector<cuda::AdamWSlice> slices;
  for (size_t i = 0; i < num_slices; ++i) {
    const auto out = args.outputs.subspan(i * op.num_outputs(), op.num_outputs());
    slices.push_back({.count = args.in(i).num_elements(),
                      .grad = args.in(i).as<float>(),
                      .master = out[AdamW::kMaster].data,
                      .m = out[AdamW::kFirstMoment].data,
                      .v = out[AdamW::kSecondMoment].data,
                      .weight = op.num_outputs() == 4 ? out[AdamW::kWeight].data : nullptr});
  }
  const cuda::AdamWKind kind = {.master = args.out(AdamW::kMaster).dtype,
                                .m = args.out(AdamW::kFirstMoment).dtype,
                                .v = args.out(AdamW::kSecondMoment).dtype,
                                .has_weight = op.num_outputs() == 4};
  const float* factors = args.in(num_slices + AdamW::kFactors).as<float>();
  const float* grad_scale = args.in(num_slices + AdamW::kGradScale).as<float>();
  cuda::launch_adamw(kind,
                     {reinterpret_cast<const AdamWFactors*>(factors),
                      reinterpret_cast<const AdamWGradScale*>(grad_scale)},
                     slices, cuda::stream_of(args));
}

}  // namespace

void add_adamw_cuda(KernelTable& table) {
  add_kernel<AdamW>(table, adamw);
}

}  // namespace tessera

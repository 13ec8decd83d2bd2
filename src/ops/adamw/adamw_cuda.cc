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
                      .master = out[0].as<float>(),
                      .m = out[1].as<float>(),
                      .v = out[2].as<float>(),
                      .weight = op.spec().bf16_weight ? out[3].data : nullptr});
  }
  const float* factors = args.in(num_slices + AdamW::kFactors).as<float>();
  const float* grad_scale = args.in(num_slices + AdamW::kGradScale).as<float>();
  cuda::launch_adamw({reinterpret_cast<const AdamWFactors*>(factors),
                      reinterpret_cast<const AdamWGradScale*>(grad_scale)},
                     slices, cuda::stream_of(args));
}

}  // namespace

void add_adamw_cuda(KernelTable& table) {
  add_kernel<AdamW>(table, adamw);
}

}  // namespace tessera

#include "ops/adamw/adamw.h"
#include "ops/adamw/adamw_kernels.h"
#include "ops/cuda/context.h"

namespace tessera {
namespace {

void adamw(const Operator& op, const KernelArgs& args) {
  const AdamWSpec& spec = static_cast<const AdamW&>(op).spec();
  const int64_t count = args.in(0).num_elements();
  cuda::launch_adamw(make_adamw_factors(spec, args.in(1).as<float>()),
                     {.count = count,
                      .grad = args.in(0).as<float>(),
                      .master = args.out(0).as<float>(),
                      .m = args.out(1).as<float>(),
                      .v = args.out(2).as<float>(),
                      .weight = spec.bf16_weight ? args.out(3).data : nullptr},
                     cuda::stream_of(args));
}

}  // namespace

void add_adamw_cuda(KernelTable& table) {
  table["adamw"] = adamw;
}

}  // namespace tessera

#include "ops/rope/rope_args.h"

namespace tessera {
namespace {

void rope(const Operator& op, const KernelArgs& args) {
  const auto& rotation = static_cast<const Rope&>(op);
  cuda::launch_rope(cuda::rope_rows(rotation.spec(), args, args.in(1), rotation.inverse(),
                                    args.in(0).data, args.out(0).data),
                    cuda::stream_of(args));
}

}  // namespace

void add_rope_cuda(KernelTable& table) {
  table["rope"] = rope;
  table["rope_backward"] = rope;
}

}  // namespace tessera

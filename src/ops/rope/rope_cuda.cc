#include "ops/rope/rope_args.h"

namespace tessera {
namespace {

void rope(const Rope& rotation, const Args<Rope>& args) {
  cuda::RopeHeads second;
  if (rotation.second_heads() > 0)
    second = {.num_heads = static_cast<int>(rotation.second_heads()),
              .x = args.in(Rope::kSecondX).data,
              .y = args.out(Rope::kSecondY).data};
  cuda::launch_rope(cuda::rope_rows(rotation.spec(), args, rotation.inverse(),
                                    args.in(Rope::kX).data, args.out(Rope::kY).data),
                    second, cuda::stream_of(args));
}

}  // namespace

void add_rope_cuda(KernelTable& table) {
  add_kernel<Rope>(table, "rope", rope);
  add_kernel<Rope>(table, "rope_backward", rope);
}

}  // namespace tessera

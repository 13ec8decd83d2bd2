#include "ops/cuda/context.h"
#include "ops/destinations/destinations.h"
#include "ops/destinations/destinations_kernels.h"

namespace tessera {
namespace {

using namespace cuda;

void destinations(const Destinations& op, const Args<Destinations>& args) {
  using Op = Destinations;
  const Tensor& experts = args.in(Op::kExpertIdx);
  launch_destinations({.num_tokens = experts.shape[0],
                       .token_extent = args.in_extent(Op::kExpertIdx),
                       .top_k = static_cast<int>(experts.shape[1]),
                       .members = op.spec().members,
                       .experts_each = op.spec().experts_each,
                       .first_expert = op.spec().first_expert,
                       .expert_idx = experts.as<int32_t>(),
                       .members_TK = args.out(Op::kMembers).as<int32_t>()},
                      stream_of(args));
}

void permute_choices(const PermuteChoices& /*op*/, const Args<PermuteChoices>& args) {
  using Op = PermuteChoices;
  launch_permute_choices({.num_rows = args.in(Op::kSource).shape[0],
                          .row_extent = args.in_extent(Op::kSource),
                          .top_k = static_cast<int>(args.in(Op::kExpertIdx).shape[1]),
                          .expert_idx = args.in(Op::kExpertIdx).as<int32_t>(),
                          .source_R = args.in(Op::kSource).as<int32_t>(),
                          .choices_RK = args.out(Op::kChoices).as<int32_t>()},
                         stream_of(args));
}

}  // namespace

void add_destinations_cuda(KernelTable& table) {
  add_kernel<Destinations>(table, destinations);
  add_kernel<PermuteChoices>(table, permute_choices);
}

}  // namespace tessera

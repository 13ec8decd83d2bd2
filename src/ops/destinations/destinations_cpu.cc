#include <algorithm>

#include "ops/destinations/destinations.h"

namespace tessera {
namespace {

int32_t member_of(const DestinationsSpec& spec, int64_t expert) {
  const int64_t offset = expert - spec.first_expert;
  if (expert < 0 || offset < 0) return -1;
  const int64_t member = offset / spec.experts_each;
  return member < spec.members ? static_cast<int32_t>(member) : -1;
}

void destinations(const Destinations& op, const Args<Destinations>& args) {
  const Tensor& experts = args.in(Destinations::kExpertIdx);
  const int64_t top_k = experts.shape[1];
  const int32_t* expert_idx = experts.as<int32_t>();
  int32_t* members = args.out(Destinations::kMembers).as<int32_t>();
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < experts.shape[0]; ++t) {
    int32_t* of_token = members + t * top_k;
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t member = member_of(op.spec(), expert_idx[t * top_k + k]);
      const bool repeats = std::find(of_token, of_token + k, member) != of_token + k;
      of_token[k] = repeats ? -1 : member;
    }
  }
}

void permute_choices(const PermuteChoices& /*op*/, const Args<PermuteChoices>& args) {
  using Op = PermuteChoices;
  const int64_t top_k = args.in(Op::kExpertIdx).shape[1];
  const int32_t* expert_idx = args.in(Op::kExpertIdx).as<int32_t>();
  const int32_t* source = args.in(Op::kSource).as<int32_t>();
  int32_t* choices = args.out(Op::kChoices).as<int32_t>();
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < args.in(Op::kSource).shape[0]; ++r) {
    int32_t* of_row = choices + r * top_k;
    if (source[r] < 0) {
      std::fill_n(of_row, top_k, -1);
    } else {
      std::copy_n(expert_idx + source[r] / top_k * top_k, top_k, of_row);
    }
  }
}

}  // namespace

void add_destinations_cpu(KernelTable& table) {
  add_kernel<Destinations>(table, destinations);
  add_kernel<PermuteChoices>(table, permute_choices);
}

}  // namespace tessera

#include "ops/hash_experts/hash_experts.h"

namespace tessera {
namespace {

/// Numbers that are not whole name no expert either.
int32_t checked_expert(float number, int64_t num_experts, int32_t token) {
  const bool is_expert = number >= 0 && number < static_cast<float>(num_experts) &&
                         number == static_cast<float>(static_cast<int32_t>(number));
  require(is_expert, "hash_experts: the table gives token id {} to expert {}, which is none of {}",
          token, number, num_experts);
  return static_cast<int32_t>(number);
}

void hash_experts(const HashExperts& op, const Args<HashExperts>& args) {
  using Op = HashExperts;
  const Tensor& table = args.in(Op::kTable);
  const int64_t top_k = table.shape[1];
  int32_t* to = args.out(Op::kExpertIdx).as<int32_t>();
  for (const int32_t token : args.in(Op::kTokens).span<int32_t>()) {
    require(token >= 0 && token < table.shape[0],
            "hash_experts: token id {} is outside the table's vocabulary of {}", token,
            table.shape[0]);
    const float* row = table.as<float>() + token * top_k;
    for (int64_t k = 0; k < top_k; ++k) *to++ = checked_expert(row[k], op.num_experts(), token);
  }
}

}  // namespace

void add_hash_experts_cpu(KernelTable& table) {
  add_kernel<HashExperts>(table, hash_experts);
}

}  // namespace tessera

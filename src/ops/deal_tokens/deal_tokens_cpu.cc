#include <cstring>

#include "ops/deal_tokens/deal_tokens.h"

namespace tessera {
namespace {

std::byte* bytes_of(const Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data);
}

/// Calls copy(first token in the sequences, first in the ring's order, tokens) for the ring's runs.
template <typename Copy>
void for_each_dealt_run(const Zigzag& deal, const Copy& copy) {
#pragma omp parallel for schedule(static)
  for (int64_t rank = 0; rank < deal.ring; ++rank) {
    int64_t dealt = rank * deal.tokens_per_rank();
    deal.for_each_run(rank, [&](const IndexRange& run) {
      copy(run.begin, dealt, run.count);
      dealt += run.count;
    });
  }
}

int64_t bytes_of_token(const TokenDeal& op, const Tensor& x) {
  return op.deal().num_tokens() == 0 ? 0 : x.num_bytes() / op.deal().num_tokens();
}

void deal_tokens(const DealTokens& op, const Args<DealTokens>& args) {
  const Tensor& x = args.in(DealTokens::kX);
  const int64_t bytes = bytes_of_token(op, x);
  if (bytes == 0) return;
  std::byte* const to = bytes_of(args.out(DealTokens::kY));
  for_each_dealt_run(op.deal(), [&](int64_t token, int64_t dealt, int64_t count) {
    std::memcpy(to + dealt * bytes, bytes_of(x) + token * bytes, count * bytes);
  });
}

void collect_tokens(const CollectTokens& op, const Args<CollectTokens>& args) {
  const Tensor& x = args.in(CollectTokens::kX);
  const int64_t bytes = bytes_of_token(op, x);
  if (bytes == 0) return;
  std::byte* const to = bytes_of(args.out(CollectTokens::kY));
  for_each_dealt_run(op.deal(), [&](int64_t token, int64_t dealt, int64_t count) {
    std::memcpy(to + token * bytes, bytes_of(x) + dealt * bytes, count * bytes);
  });
}

}  // namespace

void add_deal_tokens_cpu(KernelTable& table) {
  add_kernel<DealTokens>(table, deal_tokens);
  add_kernel<CollectTokens>(table, collect_tokens);
}

}  // namespace tessera

#include <cstring>

#include "ops/gemm/row_products.h"
#include "ops/latent_cache/latent_cache.h"
#include "ops/latent_cache/latent_products.h"

namespace tessera {
namespace {

void copy_columns(const ColumnRows& to, const ColumnRows& from, int64_t bytes, int64_t rows) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(to.first + row * to.pitch, from.first + row * from.pitch, bytes);
}

void multiply_heads(const LatentProducts& products, int64_t num_heads) {
  for (int64_t head = 0; head < num_heads; ++head) gemm_of_rows(products.of_head(head));
}

void latent_keys(const LatentKeys& /*op*/, const Args<LatentKeys>& args) {
  const Tensor& latent = args.in(LatentKeys::kLatent);
  const Tensor& shared = args.in(LatentKeys::kShared);
  const Tensor& keys = args.out(LatentKeys::kKeys);
  const int64_t size = dtype_size(latent.dtype);
  const int64_t rank = latent.shape[1];
  copy_columns(ColumnRows::of(keys, 0, 1), ColumnRows::of(latent, 0, 1), rank * size,
               latent.shape[0]);
  copy_columns(ColumnRows::of(keys, rank, 1), ColumnRows::of(shared, 0, 1), shared.shape[1] * size,
               latent.shape[0]);
}

void latent_queries(const LatentQueries& op, const Args<LatentQueries>& args) {
  const LatentCacheSpec& s = op.spec();
  const Tensor& q = args.in(LatentQueries::kQ);
  const Tensor& queries = args.out(LatentQueries::kQueries);
  multiply_heads(query_products(s, q, args.in(LatentQueries::kUp), queries), s.num_heads);
  copy_columns(ColumnRows::of(queries, s.rank, s.num_heads),
               ColumnRows::of(q, s.nope_size, s.num_heads), s.rope_size * dtype_size(q.dtype),
               q.shape[0] * s.num_heads);
}

void latent_outputs(const LatentOutputs& op, const Args<LatentOutputs>& args) {
  multiply_heads(output_products(op.spec(), args.in(LatentOutputs::kAttended),
                                 args.in(LatentOutputs::kUp), args.out(LatentOutputs::kO)),
                 op.spec().num_heads);
}

}  // namespace

void add_latent_cache_cpu(KernelTable& table) {
  add_kernel<LatentKeys>(table, latent_keys);
  add_kernel<LatentQueries>(table, latent_queries);
  add_kernel<LatentOutputs>(table, latent_outputs);
}

}  // namespace tessera

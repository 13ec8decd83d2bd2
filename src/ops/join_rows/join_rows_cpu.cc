#include <cstring>

#include "ops/join_rows/join_rows.h"

namespace tessera {
namespace {

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void join_rows(const JoinRows& /*op*/, const Args<JoinRows>& args) {
  const Tensor& a = args.in(JoinRows::kA);
  const Tensor& b = args.in(JoinRows::kB);
  auto* const to = static_cast<std::byte*>(args.out(JoinRows::kY).data);
  copy_bytes(to, a.data, a.num_bytes());
  copy_bytes(to + a.num_bytes(), b.data, b.num_bytes());
}

void split_rows(const SplitRows& /*op*/, const Args<SplitRows>& args) {
  const auto* const from = static_cast<const std::byte*>(args.in(SplitRows::kX).data);
  const Tensor& a = args.out(SplitRows::kA);
  const Tensor& b = args.out(SplitRows::kB);
  copy_bytes(a.data, from, a.num_bytes());
  copy_bytes(b.data, from + a.num_bytes(), b.num_bytes());
}

}  // namespace

void add_join_rows_cpu(KernelTable& table) {
  add_kernel<JoinRows>(table, join_rows);
  add_kernel<SplitRows>(table, split_rows);
}

}  // namespace tessera

#include <algorithm>
#include <cstring>

#include "ops/page_stash/page_stash.h"

namespace tessera {
namespace {

int64_t pages_of(const Tensor& value, int64_t page_bytes) {
  return (value.num_bytes() + page_bytes - 1) / page_bytes;
}

/// Calls `use` with each page of the value: its bytes there, those of the pool, and how many.
template <typename Use>
void for_pages(const Tensor& value, const Tensor& pages, const int32_t* table, int64_t page_bytes,
               const Use& use) {
  const int64_t all = value.num_bytes();
  auto* const data = static_cast<std::byte*>(value.data);
  auto* const memory = static_cast<std::byte*>(pages.data);
  for (int64_t page = 0; page * page_bytes < all; ++page) {
    const int64_t at = page * page_bytes;
    use(data + at, memory + table[page] * page_bytes, std::min(page_bytes, all - at));
  }
}

void stash_pages_kernel(const StashPages& op, const Args<StashPages>& args) {
  using Op = StashPages;
  const Tensor& value = args.in(Op::kValue);
  auto* const state = args.out(Op::kState).as<int64_t>();
  auto* const table = args.out(Op::kTable).as<int32_t>();
  const int64_t wanted = pages_of(value, op.page_bytes());
  if (wanted == 0) return;
  state[kHeldPages] += wanted;
  state[kMissingPages] = std::max(state[kMissingPages], state[kHeldPages] - state[kPoolPages]);
  if (wanted > state[kFreePages]) {
    table[0] = -1;
    return;
  }
  const auto* const free = args.out(Op::kFree).as<int32_t>();
  for (int64_t i = 0; i < wanted; ++i) table[i] = free[state[kFreePages] - 1 - i];
  state[kFreePages] -= wanted;
  for_pages(value, args.out(Op::kPages), table, op.page_bytes(),
            [](const std::byte* own, std::byte* page, int64_t num_bytes) {
              std::memcpy(page, own, num_bytes);
            });
}

void reload_pages_kernel(const ReloadPages& op, const Args<ReloadPages>& args) {
  using Op = ReloadPages;
  const Tensor& value = args.out(Op::kValue);
  auto* const state = args.out(Op::kState).as<int64_t>();
  const auto* const table = args.in(Op::kTable).as<int32_t>();
  const int64_t taken = pages_of(value, op.page_bytes());
  if (taken == 0) return;
  state[kHeldPages] -= taken;
  if (table[0] < 0) {
    std::memset(value.data, is_factor(value.dtype) ? 0xFF : 0, value.num_bytes());  // 0xFF..: NaN
    return;
  }
  for_pages(value, args.out(Op::kPages), table, op.page_bytes(),
            [](std::byte* own, const std::byte* page, int64_t num_bytes) {
              std::memcpy(own, page, num_bytes);
            });
  auto* const free = args.out(Op::kFree).as<int32_t>();
  for (int64_t i = taken - 1; i >= 0; --i) free[state[kFreePages]++] = table[i];
}

}  // namespace

void add_page_stash_cpu(KernelTable& table) {
  add_kernel<StashPages>(table, stash_pages_kernel, {.takes = takes_f16});
  add_kernel<ReloadPages>(table, reload_pages_kernel, {.takes = takes_f16});
}

}  // namespace tessera

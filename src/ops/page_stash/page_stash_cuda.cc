#include "ops/cuda/context.h"
#include "ops/page_stash/page_stash.h"
#include "ops/page_stash/page_stash_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::PagedValue describe_paged(const Op& op, const Tensor& value, const int64_t* rows,
                                const Tensor& table, const Args<Op>& args) {
  const int64_t bound = value.shape[0];
  return {.value = static_cast<std::byte*>(value.data),
          .rows = rows,
          .bound = bound,
          .row_bytes = bound == 0 ? 0 : value.num_bytes() / bound,
          .pages = static_cast<std::byte*>(args.out(Op::kPages).data),
          .page_bytes = op.page_bytes(),
          .free = args.out(Op::kFree).template as<int32_t>(),
          .state = args.out(Op::kState).template as<int64_t>(),
          .table = table.as<int32_t>(),
          .is_float = is_factor(value.dtype)};
}

void stash_pages_cuda(const StashPages& op, const Args<StashPages>& args) {
  const Tensor& value = args.in(StashPages::kValue);
  cuda::launch_stash_pages(describe_paged(op, value, args.in_extent(StashPages::kValue),
                                          args.out(StashPages::kTable), args),
                           cuda::stream_of(args));
}

void reload_pages_cuda(const ReloadPages& op, const Args<ReloadPages>& args) {
  const Tensor& value = args.out(ReloadPages::kValue);
  cuda::launch_reload_pages(describe_paged(op, value, args.out_extent(ReloadPages::kValue),
                                           args.in(ReloadPages::kTable), args),
                            cuda::stream_of(args));
}

}  // namespace

void add_page_stash_cuda(KernelTable& table) {
  add_kernel<StashPages>(table, stash_pages_cuda, {.takes = takes_f16});
  add_kernel<ReloadPages>(table, reload_pages_cuda, {.takes = takes_f16});
}

}  // namespace tessera

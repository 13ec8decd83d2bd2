#include "ops/cuda/context.h"
#include "ops/paged_attention/kept_rows_cuda.h"
#include "ops/window_choice/window_choice.h"
#include "ops/window_choice/window_choice_kernels.h"

namespace tessera {
namespace {

void window_choice(const WindowChoice& op, const KernelArgs& args) {
  const WindowChoiceSpec& spec = op.spec();
  const int64_t num_tokens = args.in(WindowChoice::kPositions).shape[0];
  cuda::launch_window_choice(
      {.num_tokens = num_tokens,
       .window = static_cast<int>(spec.window),
       .rate = static_cast<int>(spec.rate),
       .entries = static_cast<int>(spec.entries),
       .tokens =
           cuda::kept_tokens(spec.kept, args, WindowChoice::kPositions, WindowChoice::kFirstKept),
       .first_entry = spec.kept == KeptRows::kPacked ? num_tokens : spec.first_entry,
       .chosen = op.chosen() ? args.in(op.chosen_input()).as<int32_t>() : nullptr,
       .rows = args.out(WindowChoice::kRows).as<int32_t>()},
      cuda::stream_of(args));
}

}  // namespace

void add_window_choice_cuda(KernelTable& table) {
  for (const KeptRows kept : {KeptRows::kPacked, KeptRows::kCached, KeptRows::kPaged})
    add_kernel<WindowChoice>(table, WindowChoice::name_of(kept), window_choice);
}

}  // namespace tessera

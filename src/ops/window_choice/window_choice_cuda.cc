#include "ops/cuda/context.h"
#include "ops/window_choice/window_choice.h"
#include "ops/window_choice/window_choice_kernels.h"

namespace tessera {
namespace {

void window_choice(const WindowChoice& op, const Args<WindowChoice>& args) {
  const WindowChoiceSpec& spec = op.spec();
  const Tensor& positions = args.in(WindowChoice::kPositions);
  cuda::launch_window_choice(
      {.num_tokens = positions.shape[0],
       .window = static_cast<int>(spec.window),
       .rate = static_cast<int>(spec.rate),
       .entries = static_cast<int>(spec.entries),
       .positions = positions.as<int32_t>(),
       .chosen = op.chosen() ? args.in(WindowChoice::kChosen).as<int32_t>() : nullptr,
       .rows = args.out(WindowChoice::kRows).as<int32_t>()},
      cuda::stream_of(args));
}

}  // namespace

void add_window_choice_cuda(KernelTable& table) {
  add_kernel<WindowChoice>(table, window_choice);
}

}  // namespace tessera

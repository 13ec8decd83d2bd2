#include "ops/router/router_workspace.h"

namespace tessera {
namespace {

RouterWorkspace common(const RouterSizes& s, WorkspaceLayout& layout) {
  RouterWorkspace result;
  result.widened = layout.add<float>(s.widened_rows() * s.hidden_size);
  result.scratch = layout.add<float>(s.num_blocks() * kRouterScratchRows * s.num_experts);
  result.fractions = layout.add<float>(s.num_segments * s.num_experts);
  return result;
}

}  // namespace

RouterWorkspace RouterWorkspace::of_forward(const RouterSizes& sizes) {
  WorkspaceLayout layout;
  RouterWorkspace result = common(sizes, layout);
  result.partials = layout.add<double>(sizes.num_blocks() * 2);
  result.num_bytes = layout.num_bytes();
  return result;
}

RouterWorkspace RouterWorkspace::of_backward(const RouterSizes& sizes) {
  WorkspaceLayout layout;
  RouterWorkspace result = common(sizes, layout);
  result.grad_logits = layout.add<float>(sizes.num_tokens * sizes.num_experts);
  result.num_bytes = layout.num_bytes();
  return result;
}

}  // namespace tessera

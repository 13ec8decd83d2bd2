#pragma once

#include <utility>
#include <vector>

#include "program/program.h"

namespace tessera {

/// The program of those of `nodes`, as they are afterwards, that `fuse(node)` does not say have
/// gone into others. It is asked of each node in order and may change the others.
template <typename Fuse>
Program fuse_nodes(const Program& program, std::vector<Node>& nodes, Fuse fuse) {
  std::vector<bool> fused(nodes.size());
  for (size_t idx = 0; idx < nodes.size(); ++idx) fused[idx] = fuse(nodes[idx]);
  std::vector<Node> left;
  for (size_t idx = 0; idx < nodes.size(); ++idx)
    if (!fused[idx]) left.push_back(std::move(nodes[idx]));
  return program.with_nodes(std::move(left));
}

}  // namespace tessera

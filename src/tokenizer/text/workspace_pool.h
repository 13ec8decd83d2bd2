#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tessera {

/// Memory that calls use and leave to later ones, from any number of threads: at most as many
/// workspaces as there were calls at once.
template <typename Workspace>
class WorkspacePool {
 public:
  std::unique_ptr<Workspace> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        std::unique_ptr<Workspace> workspace = std::move(free_.back());
        free_.pop_back();
        return workspace;
      }
    }
    return std::make_unique<Workspace>();
  }

  void give_back(std::unique_ptr<Workspace> workspace) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(workspace));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> free_;  // by mutex_
};

}  // namespace tessera

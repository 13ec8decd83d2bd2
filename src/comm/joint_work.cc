#include "comm/joint_work.h"

namespace tessera {
namespace {

class JointWork final : public Work {
 public:
  explicit JointWork(std::vector<Pending> all) : all_(std::move(all)) {}

  void wait() override {
    for (Pending& pending : all_) pending.wait();
  }
  bool done() override {
    bool are_done = true;
    for (Pending& pending : all_) are_done = pending.done() && are_done;
    return are_done;
  }
  /// The destructors that follow abandon them.
  void abandon() noexcept override {}

 private:
  std::vector<Pending> all_;
};

}  // namespace

Pending join_pending(std::vector<Pending> all) {
  return Pending(std::make_unique<JointWork>(std::move(all)));
}

}  // namespace tessera

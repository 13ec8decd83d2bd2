#include "comm/testing/device_world.h"

#include "core/memory.h"

namespace tessera {
namespace {

using Rows = std::span<const int64_t>;

/// Memory of the device, taken once: what is given back frees nothing until all of it is, and
/// nothing is allocated while ranks wait for one another.
class Arena {
 public:
  Arena(Device& device, int64_t num_bytes) : device_(device), memory_(num_bytes, "tests", device) {}

  Device& device() const { return device_; }
  Tensor take(const Tensor& like) {
    ++num_taken_;
    const int64_t at = used_;
    used_ += align_up(like.num_bytes());
    return memory_.tensor(at, like.dtype, like.shape);
  }
  void give_back() {
    if (--num_taken_ == 0) used_ = 0;
  }

 private:
  Device& device_;
  Buffer memory_;
  int64_t used_ = 0;
  int64_t num_taken_ = 0;
};

/// A tensor of the host beside its copy in the device's memory.
class Mirror {
 public:
  Mirror(std::shared_ptr<Arena> arena, const Tensor& host)
      : arena_(std::move(arena)), host_(host), copy_(arena_->take(host)) {
    arena_->device().copy(copy_.data, host_.data, host_.num_bytes());
  }
  ~Mirror() { arena_->give_back(); }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  const Tensor& get() const { return copy_; }
  /// The same part of the copy as `part` is of the tensor; null where it is none.
  Tensor part(const Tensor& part) const {
    const auto* const begin = static_cast<const std::byte*>(host_.data);
    const auto* const data = static_cast<const std::byte*>(part.data);
    if (data < begin || data + part.num_bytes() > begin + host_.num_bytes()) return {};
    return {static_cast<std::byte*>(copy_.data) + (data - begin), part.dtype, part.shape,
            copy_.device};
  }
  void bring_back() const { arena_->device().copy(host_.data, copy_.data, host_.num_bytes()); }

 private:
  std::shared_ptr<Arena> arena_;
  Tensor host_;
  Tensor copy_;
};
using MirrorPtr = std::shared_ptr<Mirror>;

class MirroredWork final : public Work {
 public:
  MirroredWork(Pending inner, MirrorPtr in, MirrorPtr out)
      : in_(std::move(in)), out_(std::move(out)), inner_(std::move(inner)) {}
  void wait() override {
    inner_.wait();
    if (out_) out_->bring_back();
    out_.reset();
  }
  bool done() override { return inner_.done(); }
  /// The destructor of inner_ abandons it: an exception is unwinding.
  void abandon() noexcept override {}

 private:
  MirrorPtr in_;
  MirrorPtr out_;
  Pending inner_;
};

class DeviceCommunicator final : public Communicator {
 public:
  DeviceCommunicator(CommunicatorPtr inner, std::shared_ptr<Arena> arena,
                     std::shared_ptr<CommStatistics> statistics)
      : Communicator(inner->name(), inner->ranks(), inner->rank(), std::move(statistics)),
        inner_(std::move(inner)),
        arena_(std::move(arena)) {}
  void connect_neighbours() override { inner_->connect_neighbours(); }

 private:
  Pending do_all_gather_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return run(in, out, [&](auto from, auto to) { return inner_->all_gather_v(from, to, rows); });
  }
  Pending do_reduce_scatter_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return run(in, out,
               [&](auto from, auto to) { return inner_->reduce_scatter_v(from, to, rows); });
  }
  Pending do_all_reduce(const Tensor& in, const Tensor& out, ReduceOp op) override {
    return run(in, out, [&](auto from, auto to) { return inner_->all_reduce(from, to, op); });
  }
  Pending do_all_to_all_v(const Tensor& in, const Tensor& out, Rows send, Rows receive) override {
    return run(in, out,
               [&](auto from, auto to) { return inner_->all_to_all_v(from, to, send, receive); });
  }
  Pending do_send(const Tensor& tensor, int64_t to) override {
    const MirrorPtr mirror = make(tensor);
    return work(inner_->send(mirror->get(), to), mirror, nullptr);
  }
  Pending do_receive(const Tensor& tensor, int64_t from) override {
    const MirrorPtr mirror = make(tensor);
    return work(inner_->receive(mirror->get(), from), nullptr, mirror);
  }
  Pending do_broadcast(const Tensor& tensor, int64_t root) override {
    const MirrorPtr mirror = make(tensor);
    return work(inner_->broadcast(mirror->get(), root), nullptr, mirror);
  }
  void do_barrier() override { inner_->barrier(); }

  MirrorPtr make(const Tensor& host) { return std::make_shared<Mirror>(arena_, host); }
  template <typename Start>
  Pending run(const Tensor& in, const Tensor& out, const Start& start) {
    const MirrorPtr to = make(out);
    const Tensor part = to->part(in);
    const MirrorPtr from = part ? nullptr : make(in);
    return work(start(part ? part : from->get(), to->get()), from, to);
  }
  static Pending work(Pending inner, MirrorPtr in, MirrorPtr out) {
    return Pending(std::make_unique<MirroredWork>(std::move(inner), std::move(in), std::move(out)));
  }

  CommunicatorPtr inner_;
  std::shared_ptr<Arena> arena_;
};

class DeviceWorld final : public World {
 public:
  DeviceWorld(World& inner, Device& device, int64_t num_bytes)
      : inner_(inner), arena_(std::make_shared<Arena>(device, num_bytes)) {}

  int64_t rank() const override { return inner_.rank(); }
  int64_t size() const override { return inner_.size(); }
  CommunicatorPtr make_group(const std::string& name, const std::vector<int64_t>& ranks) override {
    CommunicatorPtr inner = inner_.make_group(name, ranks);
    if (ranks.size() == 1) return make_single_communicator(name, rank(), statistics_);
    return std::make_shared<DeviceCommunicator>(std::move(inner), arena_, statistics_);
  }
  const CommStatistics& statistics() const override { return *statistics_; }
  CommStatistics& statistics() override { return *statistics_; }

 private:
  World& inner_;
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<CommStatistics> statistics_ = std::make_shared<CommStatistics>();
};

}  // namespace

std::unique_ptr<World> make_device_world(World& inner, Device& device, int64_t num_bytes) {
  return std::make_unique<DeviceWorld>(inner, device, num_bytes);
}

}  // namespace tessera

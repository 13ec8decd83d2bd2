#include "comm/shm/shm_transport.h"

#include <utility>

#include "comm/process_world.h"
#include "comm/shm/shm_join.h"
#include "core/random.h"

namespace tessera {
namespace {

class ShmExchange : public Exchange {
 public:
  explicit ShmExchange(std::shared_ptr<ShmMesh> mesh) : mesh_(std::move(mesh)) {}
  ~ShmExchange() override {
    if (!is_done()) mesh_->give_up();
  }
  ShmExchange(const ShmExchange&) = delete;
  ShmExchange& operator=(const ShmExchange&) = delete;

  /// Before it is started; `rank` is the other's in the world.
  void add(const Message& message, int64_t rank, const ShmEnvelope& envelope) {
    parts_.push_back({{message}, rank, envelope});
  }
  void start() {
    for (Part& part : parts_) {
      ShmLink& link = *mesh_->link(part.rank);
      if (part.transfer.message.is_send) {
        link.send(part.envelope, part.transfer);
      } else {
        link.receive(part.envelope, part.transfer);
      }
    }
  }
  /// The messages that go by the transport.
  void set_rest(std::unique_ptr<Exchange> rest) { rest_ = std::move(rest); }

  bool test() override {
    rest_done_ = rest_done_ || !rest_ || rest_->test();
    if (!is_done()) mesh_->progress();
    return is_done() && rest_done_;
  }
  std::vector<int64_t> unfinished() const override {
    std::vector<int64_t> peers;
    if (rest_ && !rest_done_) peers = rest_->unfinished();
    for (const Part& part : parts_) {
      if (!part.transfer.done) peers.push_back(part.transfer.message.peer);
    }
    return peers;
  }

 private:
  struct Part {
    ShmTransfer transfer;
    int64_t rank = 0;
    ShmEnvelope envelope;
  };

  bool is_done() {
    while (num_done_ < parts_.size() && parts_[num_done_].transfer.done) ++num_done_;
    return num_done_ == parts_.size();
  }

  std::shared_ptr<ShmMesh> mesh_;
  std::vector<Part> parts_;
  size_t num_done_ = 0;  ///< how many of the first are
  std::unique_ptr<Exchange> rest_;
  bool rest_done_ = false;
};

/// Two ranks make the groups that hold both in the same order, so they count them alike without
/// asking; should they not, the hash shows it.
class ShmChannel : public Channel {
 public:
  ShmChannel(std::shared_ptr<ShmMesh> mesh, std::unique_ptr<Channel> rest, const std::string& name,
             const std::vector<int64_t>& ranks, int64_t shared_bytes)
      : mesh_(std::move(mesh)),
        rest_(std::move(rest)),
        group_(hash_text(name.data(), name.size())),
        shared_bytes_(shared_bytes) {
    for (const int64_t rank : ranks) {
      group_ = mix(group_, static_cast<uint64_t>(rank));
      members_.push_back({rank, mesh_->num_channels(rank)++});
    }
  }

  std::unique_ptr<Exchange> start(std::span<const Message> messages, int64_t tag) override {
    auto exchange = std::make_unique<ShmExchange>(mesh_);
    std::vector<Message> rest;
    for (const Message& message : messages) {
      const Member& member = members_[message.peer];
      if (message.bytes < shared_bytes_ || mesh_->link(member.rank) == nullptr) {
        rest.push_back(message);
      } else {
        exchange->add(message, member.rank, {member.channel, static_cast<uint32_t>(tag), group_});
      }
    }
    if (rest.size() == messages.size()) return rest_->start(messages, tag);
    exchange->start();
    if (!rest.empty()) exchange->set_rest(rest_->start(rest, tag));
    return exchange;
  }

 private:
  struct Member {
    int64_t rank = 0;
    uint32_t channel = 0;
  };

  std::shared_ptr<ShmMesh> mesh_;
  std::unique_ptr<Channel> rest_;
  std::vector<Member> members_;  ///< by rank in the channel
  uint64_t group_;
  int64_t shared_bytes_;
};

class ShmTransport : public Transport {
 public:
  ShmTransport(std::shared_ptr<Transport> rest, const CommOptions& options)
      : rest_(std::move(rest)),
        mesh_(std::make_shared<ShmMesh>(rest_->size())),
        shared_bytes_(options.shared_bytes) {}

  ShmMesh& mesh() { return *mesh_; }
  int64_t rank() const override { return rest_->rank(); }
  int64_t size() const override { return rest_->size(); }
  std::unique_ptr<Channel> make_channel(const std::string& name,
                                        const std::vector<int64_t>& ranks) override {
    return std::make_unique<ShmChannel>(mesh_, rest_->make_channel(name, ranks), name, ranks,
                                        shared_bytes_);
  }
  // A process that ends is seen by the engine.
  std::optional<std::string> lost() override { return rest_->lost(); }
  void give_up() override {
    mesh_->give_up();
    rest_->give_up();
  }
  void abort(int exit_code) override { rest_->abort(exit_code); }

 private:
  std::shared_ptr<Transport> rest_;
  std::shared_ptr<ShmMesh> mesh_;
  int64_t shared_bytes_;
};

}  // namespace

std::unique_ptr<World> make_shared_world(std::shared_ptr<Transport> transport,
                                         const CommOptions& options, bool owns_process) {
  const auto shared = std::make_shared<ShmTransport>(std::move(transport), options);
  auto world = make_process_world(shared, options, owns_process);
  if (world->size() > 1) join_by_memory(*world, options, shared->mesh());
  world->statistics().clear();
  return world;
}

}  // namespace tessera

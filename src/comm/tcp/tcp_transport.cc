#include "comm/tcp/tcp_transport.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <optional>

#include "comm/tcp/link.h"
#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

/// The links of a rank to all others; its transport, channels and exchanges share it.
class Mesh {
 public:
  explicit Mesh(std::vector<TcpPeer> peers);

  bool has_link(size_t rank) const { return entries_[rank].link.has_value(); }
  Link& link(int64_t rank) { return *entries_[rank].link; }
  /// How many channels were made with a rank: the number of the next.
  uint32_t& num_channels(int64_t rank) { return entries_[rank].num_channels; }

  void send(int64_t rank, const Envelope& envelope, Transfer& transfer);
  void receive(int64_t rank, const Envelope& envelope, Transfer& transfer);
  /// Moves on what can be moved on; waits up to `milliseconds` until something can be.
  void progress(int milliseconds = 0);
  /// Afterwards no memory of a transfer is touched.
  void give_up() { gave_up_ = true; }
  bool gave_up() const { return gave_up_; }
  std::optional<std::string> lost() const;
  void say_abort(int exit_code);
  /// Until all ranks have said goodbye, or are lost.
  void part(TcpClock::time_point deadline);

 private:
  struct Entry {
    std::optional<Link> link;
    uint32_t num_channels = 0;
    uint32_t events = 0;  ///< that are waited for
  };

  /// Waits for what the link waits for.
  void watch(size_t rank);
  bool is_parting_over() const;

  Socket poll_;
  std::vector<Entry> entries_;  ///< by rank
  bool gave_up_ = false;
};

Mesh::Mesh(std::vector<TcpPeer> peers)
    : poll_(epoll_create1(EPOLL_CLOEXEC)), entries_(peers.size()) {
  require(static_cast<bool>(poll_), "epoll_create1: {}", system_error());
  for (size_t rank = 0; rank < peers.size(); ++rank) {
    if (!peers[rank].socket) continue;
    entries_[rank].link.emplace(std::move(peers[rank]), static_cast<int64_t>(rank));
    watch(rank);
  }
}

void Mesh::watch(size_t rank) {
  Entry& entry = entries_[rank];
  const uint32_t events =
      entry.link->closed() ? 0 : EPOLLIN | (entry.link->wants_to_write() ? EPOLLOUT : 0U);
  if (events == entry.events) return;
  const int action = events == 0         ? EPOLL_CTL_DEL
                     : entry.events == 0 ? EPOLL_CTL_ADD
                                         : EPOLL_CTL_MOD;
  epoll_event event{};
  event.events = events;
  event.data.u64 = rank;
  const int code = epoll_ctl(poll_.get(), action, entry.link->descriptor(), &event);
  ensure(code == 0, "epoll_ctl: {}", system_error());
  entry.events = events;
}

void Mesh::send(int64_t rank, const Envelope& envelope, Transfer& transfer) {
  link(rank).send(envelope, transfer);
  watch(rank);
}

void Mesh::receive(int64_t rank, const Envelope& envelope, Transfer& transfer) {
  link(rank).receive(envelope, transfer);
  watch(rank);
}

void Mesh::progress(int milliseconds) {
  constexpr size_t kEvents = 64;
  if (gave_up_) return;
  std::array<epoll_event, kEvents> events{};
  const int count = epoll_wait(poll_.get(), events.data(), kEvents, milliseconds);
  for (size_t i = 0; i < static_cast<size_t>(std::max(count, 0)); ++i) {
    const size_t rank = events[i].data.u64;
    Link& link = *entries_[rank].link;
    if ((events[i].events & EPOLLOUT) != 0) link.write_some();
    if ((events[i].events & ~uint32_t{EPOLLOUT}) != 0) link.read_some();
    watch(rank);
  }
}

std::optional<std::string> Mesh::lost() const {
  std::vector<const Link*> talking;
  std::vector<int> descriptors;
  for (const Entry& entry : entries_) {
    if (!entry.link || entry.link->said_goodbye()) continue;
    if (!entry.link->lost().empty()) return entry.link->lost();
    talking.push_back(&*entry.link);
    descriptors.push_back(entry.link->descriptor());
  }
  // The end is seen here before what was sent last has been read.
  if (const std::optional<size_t> closed = find_closed(descriptors))
    return talking[*closed]->name() + " closed its connection";
  // Where reading does not tell why.
  for (const Link* link : talking) {
    if (!link->unwritable().empty()) return link->unwritable();
  }
  return std::nullopt;
}

void Mesh::say_abort(int exit_code) {
  for (Entry& entry : entries_) {
    if (entry.link) entry.link->say_abort(exit_code);
  }
}

bool Mesh::is_parting_over() const {
  return std::ranges::all_of(entries_, [](const Entry& entry) {
    return !entry.link || entry.link->closed() ||
           (entry.link->said_goodbye() && !entry.link->wants_to_write());
  });
}

void Mesh::part(TcpClock::time_point deadline) {
  constexpr int kLookMilliseconds = 100;
  for (size_t rank = 0; rank < entries_.size(); ++rank) {
    if (!has_link(rank)) continue;
    entries_[rank].link->say_goodbye();
    watch(rank);
  }
  while (!is_parting_over() && TcpClock::now() < deadline) progress(kLookMilliseconds);
}

class TcpExchange : public Exchange {
 public:
  TcpExchange(std::shared_ptr<Mesh> mesh, std::span<const Message> messages)
      : mesh_(std::move(mesh)) {
    for (const Message& message : messages) transfers_.push_back({message});
  }
  ~TcpExchange() override {
    if (num_done_ < transfers_.size()) mesh_->give_up();
  }
  TcpExchange(const TcpExchange&) = delete;
  TcpExchange& operator=(const TcpExchange&) = delete;

  std::vector<Transfer>& transfers() { return transfers_; }
  bool test() override {
    if (!is_done()) mesh_->progress();
    return is_done();
  }
  std::vector<int64_t> unfinished() const override {
    std::vector<int64_t> peers;
    for (const Transfer& transfer : transfers_) {
      if (!transfer.done) peers.push_back(transfer.message.peer);
    }
    return peers;
  }

 private:
  bool is_done() {
    while (num_done_ < transfers_.size() && transfers_[num_done_].done) ++num_done_;
    return num_done_ == transfers_.size();
  }

  std::shared_ptr<Mesh> mesh_;
  std::vector<Transfer> transfers_;
  size_t num_done_ = 0;  ///< how many of the first are
};

class TcpChannel : public Channel {
 public:
  TcpChannel(std::shared_ptr<Mesh> mesh, const std::string& name,
             const std::vector<int64_t>& ranks);
  std::unique_ptr<Exchange> start(std::span<const Message> messages, int64_t tag) override;

 private:
  struct Member {
    int64_t rank = 0;
    uint32_t channel = 0;
  };

  std::shared_ptr<Mesh> mesh_;
  std::vector<Member> members_;  ///< by rank in the channel
  uint64_t group_;
};

// Two ranks make the groups that hold both in the same order, so they count them alike without
// asking; should they not, the hash shows it.
TcpChannel::TcpChannel(std::shared_ptr<Mesh> mesh, const std::string& name,
                       const std::vector<int64_t>& ranks)
    : mesh_(std::move(mesh)), group_(hash_text(name.data(), name.size())) {
  for (const int64_t rank : ranks) {
    group_ = mix(group_, static_cast<uint64_t>(rank));
    members_.push_back({rank, mesh_->num_channels(rank)++});
  }
}

std::unique_ptr<Exchange> TcpChannel::start(std::span<const Message> messages, int64_t tag) {
  auto exchange = std::make_unique<TcpExchange>(mesh_, messages);
  for (Transfer& transfer : exchange->transfers()) {
    const Member& member = members_[transfer.message.peer];
    const Envelope envelope = {member.channel, static_cast<uint32_t>(tag), group_};
    if (transfer.message.is_send) {
      mesh_->send(member.rank, envelope, transfer);
    } else {
      mesh_->receive(member.rank, envelope, transfer);
    }
  }
  return exchange;
}

class TcpTransport : public Transport {
 public:
  explicit TcpTransport(const TcpJoin& join)
      : join_(join), mesh_(std::make_shared<Mesh>(join_ranks(join))) {}
  ~TcpTransport() override {
    if (mesh_->gave_up()) return;
    try {
      mesh_->part(TcpClock::now() + to_duration(join_.timeout_seconds));
    } catch (const std::exception&) {
      // All that this rank had to do is done.
    }
  }
  TcpTransport(const TcpTransport&) = delete;
  TcpTransport& operator=(const TcpTransport&) = delete;

  int64_t rank() const override { return join_.rank; }
  int64_t size() const override { return join_.num_ranks; }
  std::unique_ptr<Channel> make_channel(const std::string& name,
                                        const std::vector<int64_t>& ranks) override {
    return std::make_unique<TcpChannel>(mesh_, name, ranks);
  }
  std::optional<std::string> lost() override { return mesh_->lost(); }
  void give_up() override { mesh_->give_up(); }
  // The others end themselves at their next wait, and whoever started them ends those that do not
  // come to one.
  void abort(int exit_code) override { mesh_->say_abort(exit_code); }

 private:
  const TcpJoin join_;
  std::shared_ptr<Mesh> mesh_;
};

}  // namespace

std::unique_ptr<Transport> connect_tcp(const TcpJoin& join) {
  return std::make_unique<TcpTransport>(join);
}

}  // namespace tessera

#include "comm/tcp/rendezvous.h"

#include <fmt/ranges.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <optional>
#include <thread>

#include "comm/error.h"
#include "comm/tcp/hello.h"
#include "comm/tcp/reception.h"

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kRetry{100};
// Something other than a rank may accept a connection and never answer.
constexpr std::chrono::seconds kPatience{10};
// What is waited for so long is told, once.
constexpr std::chrono::seconds kUntilNote{15};
// Waits are looked at this often for whether they can still end.
constexpr std::chrono::milliseconds kCheckInterval{500};

/// Someone who answered, and what.
struct Answer {
  TcpPeer peer;
  Reply reply;
};

class Joining {
 public:
  explicit Joining(const TcpJoin& join);
  std::vector<TcpPeer> take() && { return std::move(peers_); }

  /// Rank 0: waits for all others and sends them the addresses.
  void gather();
  /// The others: connect to rank 0 and to one another.
  void find_first();
  void connect_lower();
  void await_higher();
  void hear_lower();

 private:
  std::string place_of_first() const;
  TcpPeer reach_first();
  std::vector<Address> addresses_of_first() const;
  Reception listen_like(const Address& local) const;
  TcpPeer reach(int64_t rank, const Address& address);
  void await(Reception& reception, int64_t first);
  void admit(Reception& reception, Guest guest, int64_t first);
  Answer greet(TcpPeer peer) const;
  Reply hear_reply(const TcpPeer& peer) const;
  void check_others() const;
  std::vector<int> descriptors() const;
  std::vector<int64_t> missing(int64_t first) const;
  void note(const std::string& awaited);
  [[noreturn]] void fail(const std::string& awaited, const std::string& why) const;
  template <typename Attempt>
  auto retry(const std::string& awaited, Attempt&& attempt);

  const TcpJoin& join_;
  const pid_t launcher_ = getppid();
  const TcpClock::time_point begin_ = TcpClock::now();
  TcpClock::time_point deadline_;
  Hello own_;
  std::vector<TcpPeer> peers_;        ///< by rank
  std::vector<Address> listeners_;    ///< by rank; rank 0's is not used
  std::optional<Reception> waiting_;  ///< for the higher ranks
  bool noted_ = false;
};

Joining::Joining(const TcpJoin& join)
    : join_(join),
      deadline_(begin_ + to_duration(join.timeout_seconds)),
      peers_(join.num_ranks),
      listeners_(join.num_ranks) {
  own_.num_ranks = static_cast<uint32_t>(join.num_ranks);
  own_.rank = static_cast<uint32_t>(join.rank);
  own_.run = make_run_name(join.run);
}

std::string Joining::place_of_first() const {
  return fmt::format("{}:{}", join_.one_machine ? "this machine" : join_.host, join_.port);
}

std::vector<int> Joining::descriptors() const {
  std::vector<int> all;
  for (const TcpPeer& peer : peers_) {
    if (peer.socket) all.push_back(peer.socket.get());
  }
  return all;
}

std::vector<int64_t> Joining::missing(int64_t first) const {
  std::vector<int64_t> ranks;
  for (int64_t rank = first; rank < join_.num_ranks; ++rank) {
    if (rank != join_.rank && !peers_[rank].socket) ranks.push_back(rank);
  }
  return ranks;
}

void Joining::fail(const std::string& awaited, const std::string& why) const {
  const std::chrono::duration<double> waited = TcpClock::now() - begin_;
  throw CommError(fmt::format("rank {} waited {:.1f} s for {} and gave up: {}", join_.rank,
                              waited.count(), awaited, why));
}

/// Tells who is missing long before the time limit, once.
void Joining::note(const std::string& awaited) {
  if (noted_ || TcpClock::now() - begin_ < kUntilNote) return;
  noted_ = true;
  std::cerr << fmt::format("tessera: rank {} has waited {} s for {}; the time limit is {} s\n",
                           join_.rank, kUntilNote.count(), awaited, join_.timeout_seconds);
}

/// Throws CommError where a rank that had joined is gone, or who started this one.
void Joining::check_others() const {
  if (getppid() != launcher_) {
    throw CommError(
        fmt::format("rank {}: the launcher (process {}) ended while the ranks were joining",
                    join_.rank, launcher_));
  }
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (!peers_[rank].socket) continue;
    const int descriptor = peers_[rank].socket.get();
    if (!find_closed({&descriptor, 1})) continue;
    throw CommError(fmt::format("rank {}: rank {} at {} ended while the ranks were joining",
                                join_.rank, rank, peers_[rank].address.to_string()));
  }
}

/// Attempts, which throw UserError, until one succeeds.
template <typename Attempt>
auto Joining::retry(const std::string& awaited, Attempt&& attempt) {
  std::string why;
  while (true) {
    check_others();
    if (join_.rank == 1) note(awaited);  // the others wait for the same
    try {
      return attempt();
    } catch (const CommError&) {
      throw;
    } catch (const UserError& error) {
      // The deadline may have cut the last attempt short; the one before says more.
      if (why.empty() || TcpClock::now() < deadline_) why = error.what();
    }
    if (TcpClock::now() + kRetry > deadline_) fail(awaited, why);
    std::this_thread::sleep_for(kRetry);
  }
}

Reply Joining::hear_reply(const TcpPeer& peer) const {
  Reply reply;
  receive_all(peer.socket, writable_bytes_of(reply),
              std::min(deadline_, TcpClock::now() + kPatience));
  require(reply.magic == kTcpMagic, "what answers at {} is not a rank of Tessera",
          peer.address.to_string());
  return reply;
}

Answer Joining::greet(TcpPeer peer) const {
  send_all(peer.socket, bytes_of(own_), deadline_);
  const Reply reply = hear_reply(peer);
  // Another run may be about to leave the port.
  require(reply.verdict != Verdict::kOtherRun, "{}: {}", peer.address.to_string(),
          describe_refusal(reply.verdict, own_));
  return {std::move(peer), reply};
}

// The port is the only one that is known before; any other is free to choose.
void Joining::gather() {
  std::optional<Reception> reception;
  const std::vector<Address> own =
      join_.one_machine ? loopback_addresses(join_.port) : any_addresses(join_.port);
  try {
    reception.emplace(listen_on(own), join_.rank);
  } catch (const UserError& error) {
    throw CommError(fmt::format(
        "rank 0 {}; the other ranks look for it there: set TESSERA_PORT to a free port for all",
        error.what()));
  }
  await(*reception, 1);
  TcpToken token{};
  ensure(getrandom(token.data(), token.size(), 0) == std::ssize(token), "getrandom: {}",
         system_error());
  for (int64_t rank = 1; rank < join_.num_ranks; ++rank) {
    const TcpPeer& peer = peers_[rank];
    try {
      send_all(peer.socket, bytes_of(token), deadline_);
      send_all(peer.socket, std::as_bytes(std::span(listeners_)), deadline_);
    } catch (const UserError& error) {
      fail(fmt::format("rank {} at {}", rank, peer.address.to_string()), error.what());
    }
  }
}

/// Until all ranks from `first` on are there.
void Joining::await(Reception& reception, int64_t first) {
  while (!missing(first).empty()) {
    const std::vector<int> watched = descriptors();
    std::optional<Guest> guest =
        reception.next(std::min(deadline_, TcpClock::now() + kCheckInterval), watched);
    if (guest) {
      admit(reception, std::move(*guest), first);
      continue;
    }
    check_others();
    const std::string awaited =
        fmt::format("rank {} to connect to {}", fmt::join(missing(first), " "),
                    reception.address().to_string());
    if (join_.rank == 0) note(awaited);
    if (TcpClock::now() < deadline_) continue;
    fail(awaited, fmt::format("the time limit is {} s", join_.timeout_seconds));
  }
}

void Joining::admit(Reception& reception, Guest guest, int64_t first) {
  Reply reply;
  reply.verdict = judge(guest.hello, own_);
  const std::vector<int64_t> expected = missing(first);
  if (reply.verdict == Verdict::kWelcome &&
      std::ranges::find(expected, int64_t{guest.hello.rank}) == expected.end())
    reply.verdict = Verdict::kRankTaken;
  try {
    send_all(guest.socket, bytes_of(reply), TcpClock::now() + kPatience);
  } catch (const UserError&) {
    return;  // it has gone again
  }
  if (reply.verdict != Verdict::kWelcome) {
    reception.report_stranger(guest.address, describe_refusal(reply.verdict, guest.hello));
    return;
  }
  const size_t rank = guest.hello.rank;
  listeners_[rank] = guest.address;
  listeners_[rank].port = static_cast<uint16_t>(guest.hello.port);
  peers_[rank] = {std::move(guest.socket), guest.address};
}

std::vector<Address> Joining::addresses_of_first() const {
  if (join_.one_machine) return loopback_addresses(join_.port);
  try {
    return resolve_host(join_.host, join_.port);
  } catch (const UserError& error) {
    user_error("host {}: {}", join_.host, error.what());
  }
}

// Where rank 0 is on this machine, the others come from elsewhere all the same.
Reception Joining::listen_like(const Address& local) const {
  if (!join_.one_machine && local.is_loopback()) return {listen_on(any_addresses(0)), join_.rank};
  Address any_port = local;
  any_port.port = 0;
  return {listen_on({any_port}), join_.rank};
}

TcpPeer Joining::reach_first() {
  std::string problems;
  for (const Address& address : addresses_of_first()) {
    try {
      TcpPeer peer{connect_to(address, std::min(deadline_, TcpClock::now() + kPatience)), address};
      waiting_.emplace(listen_like(local_address(peer.socket)));
      own_.port = waiting_->address().port;
      Answer answer = greet(std::move(peer));
      if (answer.reply.verdict == Verdict::kWelcome) return std::move(answer.peer);
      throw CommError(fmt::format("rank {} was turned away by rank 0 at {}: {}", join_.rank,
                                  address.to_string(),
                                  describe_refusal(answer.reply.verdict, own_)));
    } catch (const CommError&) {
      throw;
    } catch (const UserError& error) {
      problems +=
          fmt::format("{}{}: {}", problems.empty() ? "" : "; ", address.to_string(), error.what());
    }
  }
  user_error("{}", problems);
}

void Joining::find_first() {
  peers_[0] = retry("rank 0 at " + place_of_first(), [&] { return reach_first(); });
  // Rank 0 knows who is missing, so it is the one to give up first, whenever it started.
  deadline_ = TcpClock::now() + to_duration(join_.timeout_seconds) + kPatience;
  while (TcpClock::now() < deadline_ &&
         !wait_readable(peers_[0].socket, TcpClock::now() + kCheckInterval))
    check_others();
  try {
    receive_all(peers_[0].socket, writable_bytes_of(own_.token), deadline_);
    receive_all(peers_[0].socket, std::as_writable_bytes(std::span(listeners_)), deadline_);
  } catch (const UserError& error) {
    fail(fmt::format("the ranks' addresses from rank 0 at {}", peers_[0].address.to_string()),
         error.what());
  }
}

TcpPeer Joining::reach(int64_t rank, const Address& address) {
  return retry(fmt::format("rank {} at {}", rank, address.to_string()), [&] {
    TcpPeer peer{connect_to(address, deadline_), address};
    send_all(peer.socket, bytes_of(own_), deadline_);
    return peer;
  });
}

// Nobody waits for answers before it has greeted all: then none waits for another in a circle.
void Joining::connect_lower() {
  for (int64_t rank = 1; rank < join_.rank; ++rank) {
    Address address = listeners_[rank];
    // Rank 0 sees ranks on its own machine at an address that means another machine elsewhere.
    if (address.is_loopback() && !join_.one_machine) {
      address = peers_[0].address;
      address.port = listeners_[rank].port;
    }
    peers_[rank] = reach(rank, address);
  }
}

void Joining::await_higher() {
  await(*waiting_, join_.rank + 1);
}

void Joining::hear_lower() {
  for (int64_t rank = 1; rank < join_.rank; ++rank) {
    const TcpPeer& peer = peers_[rank];
    try {
      Reply reply;
      receive_all(peer.socket, writable_bytes_of(reply), deadline_);
      require(reply.magic == kTcpMagic && reply.verdict == Verdict::kWelcome, "{}",
              describe_refusal(reply.verdict, own_));
    } catch (const UserError& error) {
      fail(fmt::format("rank {} at {}", rank, peer.address.to_string()), error.what());
    }
  }
}

}  // namespace

std::vector<TcpPeer> join_ranks(const TcpJoin& join) {
  Joining joining(join);
  if (join.rank == 0) {
    joining.gather();
  } else {
    joining.find_first();
    joining.connect_lower();
    joining.await_higher();
    joining.hear_lower();
  }
  return std::move(joining).take();
}

}  // namespace tessera

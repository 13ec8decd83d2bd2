#include "comm/tcp/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <mutex>
#include <thread>

#include "comm/error.h"
#include "comm/tcp/hello.h"
#include "comm/testing/torch_agent.h"

namespace tessera {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

TcpClock::time_point soon() {
  return TcpClock::now() + std::chrono::seconds(10);
}

/// A run whose rank 0 is under way.
class Rendezvous : public testing::Test {
 protected:
  TcpJoin join(int64_t rank, double seconds = 20) const {
    return {.rank = rank,
            .num_ranks = num_ranks_,
            .one_machine = true,
            .host = "",
            .port = static_cast<uint16_t>(port_),
            .run = "test",
            .timeout_seconds = seconds};
  }

  /// Joins in a thread; the message of the error, or "". Connections last as long as the test.
  std::future<std::string> start(const TcpJoin& join) {
    return std::async(std::launch::async, [this, join]() -> std::string {
      try {
        std::vector<TcpPeer> peers = join_ranks(join);
        for (size_t rank = 0; rank < peers.size(); ++rank) {
          EXPECT_EQ(static_cast<bool>(peers[rank].socket), rank != static_cast<size_t>(join.rank));
        }
        const std::lock_guard lock(mutex_);
        kept_.push_back(std::move(peers));
        return "";
      } catch (const CommError& error) {
        return error.what();
      }
    });
  }

  Socket connect_to_first() const {
    while (true) {
      for (const Address& address : loopback_addresses(static_cast<uint16_t>(port_))) {
        try {
          return connect_to(address, soon());
        } catch (const UserError&) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
      }
    }
  }

  Hello hello(uint32_t rank) const {
    Hello hello;
    hello.num_ranks = static_cast<uint32_t>(num_ranks_);
    hello.rank = rank;
    hello.run = make_run_name("test");
    return hello;
  }

  static Verdict say(const Socket& socket, const Hello& hello) {
    send_all(socket, bytes_of(hello), soon());
    Reply reply;
    receive_all(socket, writable_bytes_of(reply), soon());
    return reply.verdict;
  }

  int64_t num_ranks_ = 2;
  const int64_t port_ = find_free_port();

 private:
  std::mutex mutex_;
  std::vector<std::vector<TcpPeer>> kept_;
};

TEST_F(Rendezvous, ManyRanksMeet) {
  num_ranks_ = 12;
  std::vector<std::future<std::string>> ranks;
  for (int64_t rank = num_ranks_ - 1; rank >= 0; --rank) ranks.push_back(start(join(rank)));
  for (auto& rank : ranks) EXPECT_EQ(rank.get(), "");
}

TEST_F(Rendezvous, StrangersAreTurnedAwayWithOneMessage) {
  testing::internal::CaptureStderr();
  auto first = start(join(0));
  const Socket silent = connect_to_first();
  for (int i = 0; i < 2; ++i) {
    const Socket stranger = connect_to_first();
    const std::string request = "GET / HTTP/1.1\r\n\r\n";
    send_all(stranger, std::as_bytes(std::span(request)), soon());
    std::array<std::byte, 1> answer{};
    EXPECT_THROW(receive_all(stranger, answer, soon()), UserError);
  }
  auto second = start(join(1));
  EXPECT_EQ(first.get(), "");
  EXPECT_EQ(second.get(), "");
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_THAT(told, ContainsRegex("^tessera: rank 0 turned away .*:[0-9]+, which connected to .*: "
                                  "it does not say what a rank says"));
  EXPECT_EQ(std::ranges::count(told, '\n'), 1) << told;
}

TEST_F(Rendezvous, RanksOfAnotherRunAreTurnedAway) {
  testing::internal::CaptureStderr();
  auto first = start(join(0));
  TcpJoin other = join(1, 0.5);
  other.run = "another";
  EXPECT_THAT(start(other).get(), ContainsRegex("rank 1 waited 0\\.[0-9] s for rank 0 .*: it "
                                                "belongs to another run"));
  EXPECT_EQ(start(join(1)).get(), "");
  EXPECT_EQ(first.get(), "");
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("belongs to another run"));
}

TEST_F(Rendezvous, AnotherNumberOfRanksIsRefused) {
  testing::internal::CaptureStderr();
  auto first = start(join(0));
  TcpJoin other = join(1);
  other.num_ranks = 3;
  EXPECT_THAT(start(other).get(),
              ContainsRegex("rank 1 was turned away by rank 0 at .*: its run does not have 3 "
                            "ranks: set the same WORLD_SIZE"));
  EXPECT_EQ(start(join(1)).get(), "");
  EXPECT_EQ(first.get(), "");
  testing::internal::GetCapturedStderr();
}

TEST_F(Rendezvous, ARankIsTakenOnce) {
  num_ranks_ = 3;
  testing::internal::CaptureStderr();
  auto first = start(join(0));
  const Socket socket = connect_to_first();
  EXPECT_EQ(say(socket, hello(1)), Verdict::kWelcome);
  EXPECT_EQ(say(connect_to_first(), hello(1)), Verdict::kRankTaken);
  EXPECT_EQ(say(connect_to_first(), hello(0)), Verdict::kRankTaken);
  EXPECT_EQ(say(connect_to_first(), hello(3)), Verdict::kRankTaken);
  Hello other = hello(2);
  ++other.version;
  EXPECT_EQ(say(connect_to_first(), other), Verdict::kOtherVersion);
  testing::internal::GetCapturedStderr();
  { const Socket gone = connect_to_first(); }
  const Socket last = connect_to_first();
  EXPECT_EQ(say(last, hello(2)), Verdict::kWelcome);
  EXPECT_EQ(first.get(), "");
}

TEST_F(Rendezvous, ARankThatEndsEarlyIsNamed) {
  num_ranks_ = 4;
  auto first = start(join(0));
  auto third = start(join(2, 2));
  {
    const Socket socket = connect_to_first();
    EXPECT_EQ(say(socket, hello(1)), Verdict::kWelcome);
  }
  EXPECT_THAT(first.get(),
              ContainsRegex("rank 0: rank 1 at .* ended while the ranks were joining"));
  EXPECT_THAT(third.get(), ContainsRegex("rank 2 waited .* rank 0 at "));
}

TEST_F(Rendezvous, WhatIsNoRankIsNotBelieved) {
  const Socket listener = listen_on(loopback_addresses(static_cast<uint16_t>(port_)));
  auto second = start(join(1, 1));
  const std::string greeting = "220 mail.example.org ESMTP ready\r\n";
  while (second.wait_for(std::chrono::milliseconds(10)) != std::future_status::ready) {
    if (std::optional<Accepted> accepted = accept_one(listener))
      send_all(accepted->socket, std::as_bytes(std::span(greeting)), soon());
  }
  EXPECT_THAT(second.get(), ContainsRegex("rank 1 waited [01]\\.[0-9] s for rank 0 at this "
                                          "machine:[0-9]+ and gave up: .*(is not a rank of "
                                          "Tessera|Connection reset)"));
}

TEST(Address, TextAndBytes) {
  const auto one = [](const std::string& host) { return resolve_host(host, 80).at(0); };
  EXPECT_EQ(one("10.0.0.3").to_string(), "10.0.0.3:80");
  EXPECT_EQ(one("fe80::1").to_string(), "[fe80::1]:80");
  // As an IPv6 socket sees who comes by IPv4.
  EXPECT_EQ(one("::ffff:10.0.0.3"), one("10.0.0.3"));
  for (const std::string host : {"127.0.0.1", "127.0.1.1", "::1"})
    EXPECT_TRUE(one(host).is_loopback()) << host;
  for (const std::string host : {"10.0.0.3", "::", "fe80::1"})
    EXPECT_FALSE(one(host).is_loopback()) << host;
  EXPECT_THROW(resolve_host("no.such.host.invalid", 80), UserError);
}

}  // namespace
}  // namespace tessera

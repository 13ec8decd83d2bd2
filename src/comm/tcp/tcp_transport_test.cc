#include "comm/tcp/tcp_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <thread>

#include "comm/error.h"
#include "comm/process_world.h"
#include "comm/tcp/link.h"
#include "comm/testing/collective_checks.h"
#include "comm/testing/torch_agent.h"
#include "core/memory.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using Bytes = std::vector<uint8_t>;

TcpJoin make_join(int64_t rank, int64_t num_ranks, int64_t port) {
  return {.rank = rank,
          .num_ranks = num_ranks,
          .one_machine = true,
          .host = "",
          .port = static_cast<uint16_t>(port),
          .run = "test",
          .timeout_seconds = 20};
}

/// Ranks as threads, each with a transport of its own.
void run_transports(int64_t num_ranks,
                    const std::function<void(std::unique_ptr<Transport>)>& body) {
  const int64_t port = find_free_port();
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(connect_tcp(make_join(rank, num_ranks, port)));
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void finish(Exchange& exchange) {
  while (!exchange.test()) std::this_thread::yield();
}

Bytes make_bytes(int64_t count, uint8_t seed) {
  Bytes bytes(static_cast<size_t>(count));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(seed + i % 251);
  return bytes;
}

std::unique_ptr<Exchange> start(Channel& channel, bool is_send, int64_t peer, Bytes& bytes,
                                int64_t tag) {
  const Message message = {is_send, peer, bytes.data(), std::ssize(bytes)};
  return channel.start({&message, 1}, tag);
}

class TcpTransports : public testing::TestWithParam<int64_t> {};

TEST_P(TcpTransports, PassAllChecks) {
  run_transports(GetParam(), [](std::unique_ptr<Transport> transport) {
    const auto world = make_process_world(std::move(transport), {}, false);
    check_random_collectives(*world, 12, 30);
    check_messages(*world, 5);
    check_wait_order(*world, 3);
    check_large(*world, 1 << 20);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TcpTransports, testing::Values(2, 3, 5));

/// Sizes on both sides of what is short and of what is one piece.
const std::vector<int64_t>& sizes() {
  static const std::vector<int64_t> all = {1,       40,      65535,         65536, 65537,
                                           1 << 20, 1 << 16, (1 << 20) + 1, 1,     (3 << 20) + 7};
  return all;
}

TEST(TcpTransport, MessagesAreTakenInAnyOrderOfTags) {
  run_transports(2, [](std::unique_ptr<Transport> transport) {
    const bool sends = transport->rank() == 0;
    const auto channel = transport->make_channel("pair", {1, 0});
    std::vector<Bytes> buffers;
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (size_t i = 0; i < sizes().size(); ++i) {
      const size_t which = sends ? i : sizes().size() - 1 - i;
      buffers.push_back(sends ? make_bytes(sizes()[which], static_cast<uint8_t>(which))
                              : Bytes(static_cast<size_t>(sizes()[which])));
      exchanges.push_back(
          start(*channel, sends, sends ? 0 : 1, buffers.back(), static_cast<int64_t>(which)));
      // The receiver asks for one after another, the last sent first.
      if (!sends) finish(*exchanges.back());
    }
    for (const auto& exchange : exchanges) finish(*exchange);
    for (size_t i = 0; i < sizes().size() && !sends; ++i) {
      const size_t which = sizes().size() - 1 - i;
      EXPECT_EQ(buffers[i], make_bytes(sizes()[which], static_cast<uint8_t>(which))) << which;
    }
  });
}

TEST(TcpTransport, MessagesOfOneTagKeepTheirOrder) {
  run_transports(2, [](std::unique_ptr<Transport> transport) {
    const bool sends = transport->rank() == 0;
    const auto channel = transport->make_channel("pair", {0, 1});
    for (int round = 0; round < 20; ++round) {
      std::vector<Bytes> buffers;
      std::vector<Message> messages;
      for (size_t i = 0; i < 10; ++i) {
        const int64_t size = i % 2 == 0 ? 70000 : 100;
        buffers.push_back(sends ? make_bytes(size, static_cast<uint8_t>(i))
                                : Bytes(static_cast<size_t>(size)));
        messages.push_back({sends, sends ? 1 : 0, buffers.back().data(), size});
      }
      finish(*channel->start(messages, 3));
      for (size_t i = 0; i < 10; ++i)
        EXPECT_EQ(buffers[i], make_bytes(std::ssize(buffers[i]), static_cast<uint8_t>(i)));
    }
  });
}

/// Neither rank receives before both have sent more than any connection holds.
TEST(TcpTransport, LongMessagesPassBothWays) {
  run_transports(2, [](std::unique_ptr<Transport> transport) {
    const auto channel = transport->make_channel("pair", {0, 1});
    const auto looked = transport->make_channel("looked", {0, 1});
    const int64_t other = 1 - transport->rank();
    Bytes out = make_bytes(50'000'001, static_cast<uint8_t>(transport->rank()));
    Bytes in(out.size());
    const auto sending = start(*channel, true, other, out, 0);
    for (int i = 0; i < 100; ++i) EXPECT_FALSE(sending->test());
    EXPECT_THAT(sending->unfinished(), testing::ElementsAre(other));
    Bytes token(1);
    finish(*start(*looked, true, other, token, 0));
    finish(*start(*looked, false, other, token, 0));
    finish(*start(*channel, false, other, in, 0));
    finish(*sending);
    EXPECT_TRUE(in == make_bytes(50'000'001, static_cast<uint8_t>(other)));
  });
}

/// A receiver that asks for the last of many messages first takes the others in meanwhile.
TEST(TcpTransport, ShortMessagesWaitAtTheReceiver) {
  run_transports(2, [](std::unique_ptr<Transport> transport) {
    constexpr int64_t kMessages = 500;
    const auto early = transport->make_channel("early", {0, 1});
    const auto late = transport->make_channel("late", {0, 1});
    Bytes token(1);
    if (transport->rank() == 0) {
      Bytes bytes = make_bytes(60000, 7);
      for (int64_t i = 0; i < kMessages; ++i) finish(*start(*early, true, 1, bytes, i));
      finish(*start(*late, true, 1, token, 0));
      return;
    }
    finish(*start(*late, false, 0, token, 0));
    for (int64_t i = kMessages; i > 0; --i) {
      Bytes bytes(60000);
      const auto exchange = start(*early, false, 0, bytes, i - 1);
      EXPECT_TRUE(exchange->test());
      EXPECT_TRUE(bytes == make_bytes(60000, 7));
    }
  });
}

/// The ranks are threads of one process, so nothing but their connections shows that one is gone.
TEST(TcpTransport, AClosedConnectionEndsWaits) {
  std::atomic<int> told = 0;
  run_transports(3, [&](std::unique_ptr<Transport> transport) {
    const int64_t rank = transport->rank();
    Transport* raw = transport.get();
    const auto world = make_process_world(std::move(transport), {}, false);
    const CommunicatorPtr group = world->make_group("tp", {2, 0, 1});
    if (rank == 1) return raw->give_up();
    try {
      group->barrier();
      FAIL() << "nobody noticed";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(),
                  ContainsRegex("rank " + std::to_string(rank) +
                                " waited [0-9.]+ s for barrier 0 of group \"tp\" \\(ranks 2 0 "
                                "1\\), missing rank .*: rank 1 at .*closed its connection"));
      EXPECT_TRUE(world->ending());
      ++told;
    }
  });
  EXPECT_EQ(told, 2);
}

TEST(TcpTransport, AnAbortIsKnownByItsRankAndCode) {
  run_transports(2, [](std::unique_ptr<Transport> transport) {
    const auto channel = transport->make_channel("pair", {0, 1});
    if (transport->rank() == 1) {
      transport->give_up();
      return transport->abort(7);
    }
    Bytes bytes(1);
    const auto exchange = start(*channel, false, 1, bytes, 0);
    std::optional<std::string> lost;
    while (!lost || lost->find("closed") != std::string::npos) {
      EXPECT_FALSE(exchange->test());
      lost = transport->lost();
    }
    EXPECT_THAT(*lost, ContainsRegex("rank 1 at .* ended the job with exit code 7"));
  });
}

TEST(TcpLink, TellsThatNothingGoesAnyMore) {
  const Socket listener = listen_on(loopback_addresses(0));
  const Address address = local_address(listener);
  Link link({connect_to(address, TcpClock::now() + std::chrono::seconds(10)), address}, 3);
  link.say_goodbye();
  EXPECT_EQ(link.unwritable(), "");
  ASSERT_EQ(shutdown(link.descriptor(), SHUT_WR), 0);
  link.say_goodbye();
  EXPECT_THAT(link.unwritable(), AllOf(HasSubstr("rank 3 at"), HasSubstr("Broken pipe")));
  EXPECT_FALSE(link.wants_to_write());
  EXPECT_EQ(link.lost(), "") << "something may still come";
}

TEST(TcpTransport, GroupsMadeInOtherOrdersAreFound) {
  run_transports(2, [](std::unique_ptr<Transport> transport) {
    const bool sends = transport->rank() == 0;
    const auto channel = transport->make_channel(sends ? "tp" : "ep", {0, 1});
    Bytes bytes(8);
    const auto exchange = start(*channel, sends, sends ? 1 : 0, bytes, 0);
    if (sends) return finish(*exchange);
    EXPECT_THAT([&] { finish(*exchange); },
                testing::ThrowsMessage<InternalError>(HasSubstr("message of another group")));
  });
}

TEST(TcpTransport, ATimeLimitMayBeAnyNumber) {
  const int64_t port = find_free_port();
  std::atomic<int> num_met = 0;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      TcpJoin join = make_join(rank, 2, port);
      join.timeout_seconds = 1e300;
      try {
        num_met += connect_tcp(join)->size() == 2 ? 1 : 0;
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_met, 2);
}

TEST(TcpTransport, RanksPartTogether) {
  std::atomic<bool> late_one_left = false;
  run_transports(3, [&](std::unique_ptr<Transport> transport) {
    if (transport->rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      late_one_left = true;
    }
    transport.reset();
    EXPECT_TRUE(late_one_left);
  });
}

}  // namespace
}  // namespace tessera

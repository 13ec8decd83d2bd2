#include "comm/shm/shm_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <vector>

#include "comm/shm/shm_mesh.h"
#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

using testing::HasSubstr;
using Bytes = std::vector<uint8_t>;

/// Two ranks of one process, which reads its own memory as that of another.
class Pair {
 public:
  Pair() {
    for (int64_t rank = 0; rank < 2; ++rank) mesh(rank).set_own(ShmSegment(2));
    for (int64_t rank = 0; rank < 2; ++rank) join(rank);
  }

  ShmMesh& mesh(int64_t rank) { return meshes_[static_cast<size_t>(rank)]; }
  ShmLink& link(int64_t rank) { return *mesh(rank).link(1 - rank); }
  void progress() {
    for (ShmMesh& mesh : meshes_) mesh.progress();
  }

 private:
  void join(int64_t rank) {
    const ShmSegment& theirs = mesh(1 - rank).own();
    FileDescriptor process(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
    mesh(rank).add(1 - rank, rank,
                   ShmSegment::open(getpid(), theirs.descriptor(), 2, theirs.header().token),
                   PeerMemory(getpid(), std::move(process)));
  }

  std::array<ShmMesh, 2> meshes_ = {ShmMesh(2), ShmMesh(2)};
};

ShmTransfer sends(Bytes& bytes) {
  return {{true, 0, bytes.data(), std::ssize(bytes)}};
}
ShmTransfer receives(Bytes& bytes) {
  return {{false, 0, bytes.data(), std::ssize(bytes)}};
}

ShmEnvelope tagged(uint32_t tag, uint32_t channel = 0) {
  return {channel, tag, 99};
}

TEST(ShmLink, AMessageIsDoneOnBothSidesOnceItWasFetched) {
  Pair pair;
  Bytes from(100'000, 3);
  Bytes to(100'000);
  ShmTransfer send = sends(from);
  ShmTransfer receive = receives(to);
  pair.link(0).send(tagged(1), send);
  pair.progress();
  EXPECT_FALSE(send.done);
  pair.link(1).receive(tagged(1), receive);
  pair.mesh(1).progress();
  EXPECT_TRUE(receive.done);
  EXPECT_FALSE(send.done);
  pair.mesh(0).progress();
  EXPECT_TRUE(send.done);
  EXPECT_TRUE(to == from);
}

/// Many more than the ring holds, in random orders of tags; those of one tag keep their order.
TEST(ShmLink, MessagesMeetByChannelAndTag) {
  constexpr size_t kMessages = 500;
  Pair pair;
  Random random(3, 0);
  std::vector<Bytes> from(kMessages);
  std::vector<Bytes> to(kMessages);
  std::vector<ShmEnvelope> envelopes(kMessages);
  std::vector<ShmTransfer> sending;
  std::vector<ShmTransfer> receiving;
  for (size_t i = 0; i < kMessages; ++i) {
    envelopes[i] = tagged(static_cast<uint32_t>(random.next_below(7)),
                          static_cast<uint32_t>(random.next_below(3)));
    // Of one envelope all have one size, since nothing but their order tells them apart.
    const size_t size = 1 + envelopes[i].tag * 1000 + envelopes[i].channel;
    from[i] = Bytes(size, static_cast<uint8_t>(i % 251));
    to[i] = Bytes(size);
    sending.push_back(sends(from[i]));
    receiving.push_back(receives(to[i]));
  }
  size_t sent = 0;
  size_t received = 0;
  while (sent < kMessages || received < kMessages) {
    const size_t kind = random.next_below(3);
    if (kind == 0 && sent < kMessages) pair.link(0).send(envelopes[sent], sending[sent]), ++sent;
    if (kind == 1 && received < kMessages) {
      pair.link(1).receive(envelopes[received], receiving[received]);
      ++received;
    }
    if (kind == 2) pair.mesh(static_cast<int64_t>(random.next_below(2))).progress();
  }
  for (int i = 0; i < 100; ++i) pair.progress();
  for (size_t i = 0; i < kMessages; ++i) {
    EXPECT_TRUE(sending[i].done && receiving[i].done) << i;
    EXPECT_TRUE(to[i] == from[i]) << i;
  }
}

TEST(ShmLink, AnotherSizeIsFound) {
  Pair pair;
  Bytes from(10);
  Bytes to(11);
  ShmTransfer send = sends(from);
  ShmTransfer receive = receives(to);
  pair.link(0).send(tagged(1), send);
  pair.link(1).receive(tagged(1), receive);
  EXPECT_THAT([&] { pair.progress(); },
              testing::ThrowsMessage<InternalError>(
                  HasSubstr("10 bytes came from member 0 of the group where 11 were expected")));
}

TEST(ShmLink, AnotherGroupIsFound) {
  Pair pair;
  Bytes bytes(10);
  ShmTransfer send = sends(bytes);
  ShmTransfer receive = receives(bytes);
  pair.link(0).send({0, 1, 5}, send);
  pair.progress();
  EXPECT_THAT(
      [&] {
        pair.link(1).receive({0, 1, 6}, receive);
      },
      testing::ThrowsMessage<InternalError>(HasSubstr("message of another group")));
}

/// Its memory may be anything by then.
TEST(ShmLink, WhatARankOfferedThatGaveUpIsNotTaken) {
  Pair pair;
  Bytes bytes(10, 1);
  Bytes to(10);
  ShmTransfer send = sends(bytes);
  ShmTransfer receive = receives(to);
  pair.link(0).send(tagged(1), send);
  pair.mesh(0).give_up();
  pair.link(1).receive(tagged(1), receive);
  for (int i = 0; i < 3; ++i) pair.progress();
  EXPECT_FALSE(receive.done);
  EXPECT_FALSE(send.done);
}

TEST(ShmSegment, IsOpenedByItsTokenAlone) {
  ShmSegment own(3);
  const int descriptor = own.descriptor();
  const uint64_t token = own.header().token;
  EXPECT_TRUE(static_cast<bool>(ShmSegment::open(getpid(), descriptor, 3, token)));
  EXPECT_FALSE(static_cast<bool>(ShmSegment::open(getpid(), descriptor, 3, token + 1)));
  EXPECT_FALSE(static_cast<bool>(ShmSegment::open(getpid(), descriptor, 4, token)));
  own.close_file();
  EXPECT_FALSE(static_cast<bool>(ShmSegment::open(getpid(), descriptor, 3, token)));
}

TEST(ShmRing, HoldsSoManyAndKeepsTheirOrder) {
  const auto ring = std::make_unique<ShmRing<int, 4>>();
  int value = 0;
  EXPECT_FALSE(ring->take(value));
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(ring->push(10 * round + i));
    EXPECT_FALSE(ring->push(99));
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(ring->take(value));
      EXPECT_EQ(value, 10 * round + i);
    }
  }
}

}  // namespace
}  // namespace tessera

#pragma once

#include <deque>
#include <list>
#include <map>
#include <span>
#include <vector>

#include "comm/tcp/frame.h"
#include "comm/tcp/rendezvous.h"
#include "comm/transport.h"

namespace tessera {

/// One message of an exchange and how far it is. Must stay where it is until it is done.
struct Transfer {
  Message message;
  bool done = false;
};

/// Messages between this rank and another, over one connection. Short ones go at once, and wait at
/// the receiver in memory of its own until they are asked for. Long ones are announced, go when the
/// receiver has said where to, straight into its memory, and in pieces, so that others pass between
/// them. So reading never waits for a receive, writing never waits for reading, and no order of
/// waits can block two ranks.
class Link {
 public:
  Link(TcpPeer peer, int64_t rank);

  int descriptor() const { return peer_.socket.get(); }
  void send(const Envelope& envelope, Transfer& transfer);
  void receive(const Envelope& envelope, Transfer& transfer);
  /// Says that nothing comes any more.
  void say_goodbye();
  /// Tells the other rank, where the connection is between two frames, that the job ends.
  void say_abort(int exit_code);

  /// Takes what has come and writes what can go; neither blocks. Throws InternalError where a
  /// message has another size than its receiver expects.
  void read_some();
  void write_some();
  bool wants_to_write() const { return !outgoing_.empty() && unwritable_.empty(); }

  bool said_goodbye() const { return said_goodbye_; }
  /// Why nothing comes any more, although the other rank did not say goodbye; empty while it may.
  const std::string& lost() const { return lost_; }
  /// Why nothing can be sent any more, though something may still come; empty while it can.
  const std::string& unwritable() const { return unwritable_; }
  /// The other end was closed, with or without goodbye.
  bool closed() const { return closed_; }
  /// "rank 3 at 10.0.0.3:4711".
  std::string name() const;

 private:
  /// A frame that goes out; `transfer` is done, or goes on, when it has gone.
  struct Outgoing {
    FrameHeader header;
    const std::byte* data = nullptr;
    Transfer* transfer = nullptr;
    uint64_t sent = 0;  ///< of header and data

    /// An offer counts bytes that it does not bring.
    uint64_t data_bytes() const { return data == nullptr ? 0 : header.bytes; }
  };
  /// A long message under way; `moved` bytes of it are in frames that went or came.
  struct Long {
    Transfer* transfer = nullptr;
    int64_t moved = 0;
  };
  /// A receive that its message has not come for.
  struct Expected {
    Envelope envelope;
    Transfer* transfer = nullptr;
  };
  /// A message, or the offer of one, that came before its receive.
  struct Arrived {
    FrameHeader header;
    std::vector<std::byte> bytes = {};
    Transfer* taker = nullptr;  ///< who asked for it while it was coming
  };

  void say(FrameKind kind, uint64_t id);
  void push(const Outgoing& outgoing);
  Outgoing next_piece(uint64_t id);
  uint64_t write_front();
  void finish_outgoing(const Outgoing& outgoing);

  void take(size_t count);
  void parse();
  void fill_payload(const std::byte* bytes, size_t count);
  void begin_frame(const FrameHeader& header);
  void begin_message(const FrameHeader& header);
  void begin_offer(const FrameHeader& header);
  void begin_piece(const FrameHeader& header);
  void finish_payload();
  Transfer* take_expected(const FrameHeader& header);
  void accept(const FrameHeader& offer, Transfer& transfer);
  void lose(const std::string& why);

  TcpPeer peer_;
  int64_t rank_;

  std::deque<Outgoing> outgoing_;
  std::map<uint64_t, Long> offered_;  ///< by the id that this rank gave
  uint64_t num_offered_ = 0;

  std::list<Expected> expected_;
  std::list<Arrived> arrived_;
  std::map<uint64_t, Long> accepted_;  ///< by the id that the other rank gave

  std::vector<std::byte> staging_;  ///< bytes that came and are not yet understood
  size_t num_staged_ = 0;
  FrameHeader current_;           ///< the frame whose payload comes
  std::byte* payload_ = nullptr;  ///< where its next byte goes
  size_t payload_left_ = 0;
  Transfer* direct_ = nullptr;   ///< a short message's receiver, where it was expected
  Arrived* arriving_ = nullptr;  ///< where it was not

  std::string lost_;
  bool closed_ = false;
  bool said_goodbye_ = false;
  std::string unwritable_;
};

}  // namespace tessera

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// One message of an exchange; its memory must live until the exchange is complete.
struct Message {
  bool is_send = false;
  int64_t peer = 0;  ///< its rank in the channel
  void* data = nullptr;
  int64_t bytes = 0;  ///< > 0, the same on both sides
};

/// Messages under way. Destroying it before it is complete is allowed only when nothing of the
/// transport is used any more.
class Exchange {
 public:
  virtual ~Exchange() = default;
  /// Moves on what can be moved on; true once all messages are complete. Never blocks. Throws
  /// CommError where a peer is lost or a message has another size.
  virtual bool test() = 0;
  /// Peers, by their rank in the channel, with whom a message is not complete; some may be named
  /// twice.
  virtual std::vector<int64_t> unfinished() const = 0;
};

/// Tags are below it: the rest of a message's name, 2^13 groups at least, is the back end's.
inline constexpr int64_t kNumTags = int64_t{1} << 17;

/// Messages among the ranks of one group, which those of other groups never meet.
class Channel {
 public:
  virtual ~Channel() = default;
  /// Starts all messages and does not block. Between two ranks, messages of one tag arrive in the
  /// order in which they were sent. 0 <= tag < kNumTags.
  virtual std::unique_ptr<Exchange> start(std::span<const Message> messages, int64_t tag) = 0;
};

/// What a back end whose ranks are processes has to give; collectives are composed from it (see
/// comm/schedule.h), so they are the same, to the bit, in all. Used by one thread at a time.
/// The destructor ends the communication of all ranks in an orderly way; where another rank does
/// not come to that within the time limit, it may end this process.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  /// As World::make_group. Sends nothing and never blocks.
  virtual std::unique_ptr<Channel> make_channel(const std::string& name,
                                                const std::vector<int64_t>& ranks) = 0;
  /// Which rank is gone, and how that shows; nothing while all are there, or where the back end
  /// does not learn it. Never blocks or throws, also after give_up().
  virtual std::optional<std::string> lost() = 0;
  /// Something failed: no exchange is used any more, and the destructor only frees what is this
  /// rank's own.
  virtual void give_up() = 0;
  /// Ends the processes of all ranks, as far as they are within reach or still wait for this one;
  /// may return, or end this one.
  virtual void abort(int exit_code) = 0;
};

}  // namespace tessera

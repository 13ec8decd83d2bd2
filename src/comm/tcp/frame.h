#pragma once

#include <cstdint>
#include <type_traits>

namespace tessera {

/// What ranks send to one another once they have joined: frames, each a header and bytes.
enum class FrameKind : uint32_t {
  kMessage = 1,  ///< a short message
  kOffer,        ///< announces a long one, `bytes` in all, which its sender calls `id`
  kAccept,       ///< the receiver has memory for the long message `id`
  kPiece,        ///< the next bytes of the long message `id`
  kGoodbye,      ///< the sender has no more to say
  kAbort,        ///< the sender ends the job with the exit code `id`
};

/// Whom a message is for.
struct Envelope {
  uint32_t channel = 0;  ///< counts the groups that both ranks are in
  uint32_t tag = 0;
  uint64_t group = 0;  ///< a hash of the group, which must be the same on both sides

  /// Whether a receive is for a message, as far as either has to know.
  bool matches(const Envelope& other) const { return channel == other.channel && tag == other.tag; }
};

struct FrameHeader {
  FrameKind kind = FrameKind::kMessage;
  uint32_t reserved = 0;
  Envelope envelope = {};
  uint64_t id = 0;
  uint64_t bytes = 0;
};
static_assert(sizeof(FrameHeader) == 40 && std::is_trivially_copyable_v<FrameHeader>);

}  // namespace tessera

#include "comm/tcp/link.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "comm/tcp/hello.h"
#include "core/error.h"

namespace tessera {
namespace {

// Up to here a copy in the receiver's memory costs less than asking first.
constexpr int64_t kShort = int64_t{64} << 10;
constexpr int64_t kPiece = int64_t{1} << 20;
constexpr size_t kStaging = size_t{64} << 10;
// One rank's messages must not keep this one from the others'.
constexpr uint64_t kBytesAtOnce = uint64_t{4} << 20;

void check_size(const FrameHeader& header, const Transfer& transfer) {
  const Message& message = transfer.message;
  ensure(header.bytes == static_cast<uint64_t>(message.bytes),
         "{} bytes came from member {} of the group where {} were expected", header.bytes,
         message.peer, message.bytes);
}

void check_group(const Envelope& sent, const Envelope& expected) {
  ensure(sent.group == expected.group,
         "a message of another group came: ranks made groups in different orders");
}

/// Whether an error of sending is one of the moment.
bool passes(int error) {
  return error == EAGAIN || error == EINTR || error == ENOBUFS || error == ENOMEM;
}

void copy(const std::vector<std::byte>& bytes, const Transfer& transfer) {
  if (!bytes.empty()) std::memcpy(transfer.message.data, bytes.data(), bytes.size());
}

}  // namespace

Link::Link(TcpPeer peer, int64_t rank) : peer_(std::move(peer)), rank_(rank), staging_(kStaging) {
  tune(peer_.socket);
}

std::string Link::name() const {
  return fmt::format("rank {} at {}", rank_, peer_.address.to_string());
}

void Link::lose(const std::string& why) {
  closed_ = true;
  if (lost_.empty() && !said_goodbye_) lost_ = fmt::format("{} {}", name(), why);
}

// --- What goes out.

void Link::push(const Outgoing& outgoing) {
  outgoing_.push_back(outgoing);
  // What stands before it waits for the connection to have room.
  if (outgoing_.size() == 1) write_some();
}

void Link::say(FrameKind kind, uint64_t id) {
  Outgoing outgoing;
  outgoing.header.kind = kind;
  outgoing.header.id = id;
  push(outgoing);
}

void Link::say_goodbye() {
  say(FrameKind::kGoodbye, 0);
}

void Link::say_abort(int exit_code) {
  // What waits here refers to memory that may be gone.
  if (closed_ || !unwritable_.empty() || (!outgoing_.empty() && outgoing_.front().sent > 0)) return;
  FrameHeader header;
  header.kind = FrameKind::kAbort;
  header.id = static_cast<uint64_t>(exit_code);
  const std::span<const std::byte> bytes = bytes_of(header);
  ::send(descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

void Link::send(const Envelope& envelope, Transfer& transfer) {
  Outgoing outgoing;
  outgoing.header.envelope = envelope;
  outgoing.header.bytes = static_cast<uint64_t>(transfer.message.bytes);
  if (transfer.message.bytes <= kShort) {
    outgoing.header.kind = FrameKind::kMessage;
    outgoing.data = static_cast<const std::byte*>(transfer.message.data);
    outgoing.transfer = &transfer;
  } else {
    outgoing.header.kind = FrameKind::kOffer;
    outgoing.header.id = num_offered_++;
    offered_[outgoing.header.id] = {&transfer, 0};
  }
  push(outgoing);
}

Link::Outgoing Link::next_piece(uint64_t id) {
  Long& message = offered_.at(id);
  Outgoing outgoing;
  outgoing.header.kind = FrameKind::kPiece;
  outgoing.header.id = id;
  outgoing.header.bytes =
      static_cast<uint64_t>(std::min(kPiece, message.transfer->message.bytes - message.moved));
  outgoing.data = static_cast<const std::byte*>(message.transfer->message.data) + message.moved;
  outgoing.transfer = message.transfer;
  message.moved += static_cast<int64_t>(outgoing.header.bytes);
  return outgoing;
}

void Link::finish_outgoing(const Outgoing& outgoing) {
  if (outgoing.transfer == nullptr) return;
  if (outgoing.header.kind == FrameKind::kPiece) {
    const uint64_t id = outgoing.header.id;
    if (offered_.at(id).moved < outgoing.transfer->message.bytes) {
      outgoing_.push_back(next_piece(id));
      return;
    }
    offered_.erase(id);
  }
  outgoing.transfer->done = true;
}

/// Writes of the first frame what the connection takes; the bytes, 0 where it takes none.
uint64_t Link::write_front() {
  Outgoing& front = outgoing_.front();
  const uint64_t header_sent = std::min<uint64_t>(front.sent, sizeof(FrameHeader));
  const uint64_t data_sent = front.sent - header_sent;
  std::array<iovec, 2> parts{};
  size_t num_parts = 0;
  if (header_sent < sizeof(FrameHeader)) {
    auto* begin = reinterpret_cast<std::byte*>(&front.header) + header_sent;
    parts[num_parts++] = {begin, sizeof(FrameHeader) - header_sent};
  }
  if (data_sent < front.data_bytes()) {
    parts[num_parts++] = {const_cast<std::byte*>(front.data) + data_sent,
                          front.data_bytes() - data_sent};
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = num_parts;
  const ssize_t count = sendmsg(descriptor(), &message, MSG_NOSIGNAL);
  if (count < 0 && !passes(errno)) {
    const std::string why = system_error();
    unwritable_ = fmt::format("{} can be sent nothing any more: {}", name(), why);
  }
  return static_cast<uint64_t>(std::max<ssize_t>(count, 0));
}

void Link::write_some() {
  for (uint64_t written = 0; written < kBytesAtOnce && wants_to_write();) {
    const uint64_t count = write_front();
    if (count == 0) return;
    written += count;
    outgoing_.front().sent += count;
    if (outgoing_.front().sent < sizeof(FrameHeader) + outgoing_.front().data_bytes()) continue;
    const Outgoing gone = outgoing_.front();
    outgoing_.pop_front();
    finish_outgoing(gone);
  }
}

// --- What comes in.

void Link::receive(const Envelope& envelope, Transfer& transfer) {
  const auto found = std::ranges::find_if(arrived_, [&](const Arrived& arrived) {
    return arrived.taker == nullptr && arrived.header.envelope.matches(envelope);
  });
  if (found == arrived_.end()) {
    expected_.push_back({envelope, &transfer});
    return;
  }
  check_group(found->header.envelope, envelope);
  check_size(found->header, transfer);
  if (&*found == arriving_) {
    found->taker = &transfer;
    return;
  }
  if (found->header.kind == FrameKind::kOffer) {
    accept(found->header, transfer);
  } else {
    copy(found->bytes, transfer);
    transfer.done = true;
  }
  arrived_.erase(found);
}

Transfer* Link::take_expected(const FrameHeader& header) {
  const auto found = std::ranges::find_if(expected_, [&](const Expected& expected) {
    return expected.envelope.matches(header.envelope);
  });
  if (found == expected_.end()) return nullptr;
  Transfer* transfer = found->transfer;
  check_group(header.envelope, found->envelope);
  check_size(header, *transfer);
  expected_.erase(found);
  return transfer;
}

void Link::accept(const FrameHeader& offer, Transfer& transfer) {
  accepted_[offer.id] = {&transfer, 0};
  say(FrameKind::kAccept, offer.id);
}

void Link::begin_message(const FrameHeader& header) {
  ensure(header.bytes > 0 && header.bytes <= static_cast<uint64_t>(kShort),
         "{} sent a short message of {} bytes", name(), header.bytes);
  payload_left_ = header.bytes;
  direct_ = take_expected(header);
  if (direct_ != nullptr) {
    payload_ = static_cast<std::byte*>(direct_->message.data);
    return;
  }
  arrived_.push_back({header, std::vector<std::byte>(header.bytes)});
  arriving_ = &arrived_.back();
  payload_ = arriving_->bytes.data();
}

void Link::begin_offer(const FrameHeader& header) {
  if (Transfer* transfer = take_expected(header)) {
    accept(header, *transfer);
  } else {
    arrived_.push_back({header});
  }
}

void Link::begin_piece(const FrameHeader& header) {
  const auto found = accepted_.find(header.id);
  ensure(found != accepted_.end(), "{} sent a part of a message that nobody accepted", name());
  const Message& message = found->second.transfer->message;
  ensure(header.bytes > 0 &&
             header.bytes <= static_cast<uint64_t>(message.bytes - found->second.moved),
         "{} sent {} bytes after {} of a message of {}", name(), header.bytes, found->second.moved,
         message.bytes);
  payload_ = static_cast<std::byte*>(message.data) + found->second.moved;
  payload_left_ = header.bytes;
}

void Link::begin_frame(const FrameHeader& header) {
  current_ = header;
  switch (header.kind) {
    case FrameKind::kMessage:
      return begin_message(header);
    case FrameKind::kOffer:
      return begin_offer(header);
    case FrameKind::kAccept:
      ensure(offered_.contains(header.id), "{} accepted what nobody offered", name());
      return push(next_piece(header.id));
    case FrameKind::kPiece:
      return begin_piece(header);
    case FrameKind::kGoodbye:
      said_goodbye_ = true;
      return;
    case FrameKind::kAbort:
      lost_ = fmt::format("{} ended the job with exit code {}", name(), header.id);
      return;
  }
  ensure(false, "{} sent a frame of kind {}", name(), static_cast<uint32_t>(header.kind));
}

void Link::finish_payload() {
  if (current_.kind == FrameKind::kPiece) {
    Long& message = accepted_.at(current_.id);
    message.moved += static_cast<int64_t>(current_.bytes);
    if (message.moved < message.transfer->message.bytes) return;
    message.transfer->done = true;
    accepted_.erase(current_.id);
    return;
  }
  if (direct_ != nullptr) direct_->done = true;
  if (arriving_ != nullptr && arriving_->taker != nullptr) {
    copy(arriving_->bytes, *arriving_->taker);
    arriving_->taker->done = true;
    std::erase_if(arrived_, [&](const Arrived& arrived) { return &arrived == arriving_; });
  }
  direct_ = nullptr;
  arriving_ = nullptr;
}

void Link::fill_payload(const std::byte* bytes, size_t count) {
  if (bytes != payload_) std::memcpy(payload_, bytes, count);
  payload_ += count;
  payload_left_ -= count;
  if (payload_left_ == 0) finish_payload();
}

/// `count` bytes were read, first into the payload, then into what is staged.
void Link::take(size_t count) {
  const size_t filled = std::min(count, payload_left_);
  if (filled > 0) fill_payload(payload_, filled);
  num_staged_ += count - filled;
  parse();
}

void Link::parse() {
  size_t at = 0;
  while (true) {
    const size_t left = num_staged_ - at;
    if (payload_left_ > 0) {
      if (left == 0) break;
      const size_t count = std::min(payload_left_, left);
      fill_payload(staging_.data() + at, count);
      at += count;
    } else {
      if (left < sizeof(FrameHeader)) break;
      FrameHeader header;
      std::memcpy(&header, staging_.data() + at, sizeof(header));
      at += sizeof(header);
      begin_frame(header);
    }
  }
  if (at > 0 && at < num_staged_)
    std::memmove(staging_.data(), staging_.data() + at, num_staged_ - at);
  num_staged_ -= at;
}

void Link::read_some() {
  for (uint64_t taken = 0; taken < kBytesAtOnce && !closed_;) {
    std::array<iovec, 2> parts{};
    size_t num_parts = 0;
    if (payload_left_ > 0) parts[num_parts++] = {payload_, payload_left_};
    parts[num_parts++] = {staging_.data() + num_staged_, staging_.size() - num_staged_};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = num_parts;
    const size_t room = payload_left_ + staging_.size() - num_staged_;
    const ssize_t count = recvmsg(descriptor(), &message, 0);
    // A peer that leaves with messages unread resets the connection.
    if (count == 0 || (count < 0 && errno == ECONNRESET)) return lose("closed its connection");
    if (count < 0) {
      if (errno != EAGAIN && errno != EINTR)
        lose(fmt::format("cannot be reached: {}", system_error()));
      return;
    }
    take(count);
    taken += static_cast<uint64_t>(count);
    if (static_cast<size_t>(count) < room) return;
  }
}

}  // namespace tessera

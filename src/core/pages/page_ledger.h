#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// Which pages of some addresses have memory, in what pieces it came, and whether anybody needs
/// what is there. Pieces are taken back as they came: whole.
class PageLedger {
 public:
  /// Bytes, by whole pages.
  struct Piece {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t left_at = 0;  ///< of one that nobody needs: when the last of it was left
    int64_t num_bytes() const { return end - begin; }
  };

  /// page_bytes > 0.
  PageLedger(int64_t num_bytes, int64_t page_bytes);

  /// Says that the pages that meet [begin, end), which must lie within num_bytes, are needed, and
  /// returns the unbroken runs of those without memory, cut where `most_pages` of a piece end.
  std::vector<Piece> need(int64_t begin, int64_t end, int64_t most_pages);
  /// A piece that need() returned has memory now.
  void add(const Piece& piece);
  /// Nobody needs the pages wholly within [begin, end) any more. `now` never decreases.
  void leave(int64_t begin, int64_t end, int64_t now);
  /// What has memory now is never idle.
  void keep();
  /// The pieces that nobody needs.
  std::vector<Piece> idle() const;
  /// An idle piece has no memory any more.
  void remove(const Piece& piece);

  /// Of all pages with memory, and of those that nobody needs.
  int64_t num_bytes() const { return num_pages_ * page_bytes_; }
  int64_t idle_bytes() const { return num_idle_ * page_bytes_; }

 private:
  enum class State : uint8_t { kNone, kKept, kNeeded, kIdle };
  struct Page {
    State state = State::kNone;
    bool begins_piece = false;
    int64_t left_at = 0;
  };
  void check_range(int64_t begin, int64_t end) const;
  int64_t find_end(int64_t page) const;

  int64_t page_bytes_;
  int64_t limit_;
  int64_t num_pages_ = 0;
  int64_t num_idle_ = 0;
  int64_t num_needed_ = 0;
  std::vector<Page> pages_;
};

}  // namespace tessera

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera {

/// What an exchange passes, which others of the rank that are under way pass too.
enum class LinkKind : uint8_t { kOwn, kNode, kNetwork };

/// An exchange on the clock: it begins once all ranks came and the one before it ended.
struct ExchangeTime {
  double came = 0;  ///< the last of the ranks
  double begin = 0;
  double end = 0;
};

/// The exchanges of one rank with groups of which no other rank has a plan. Those of a group follow
/// one another; groups that exchange over one link at the same time have equal parts of it, as
/// flows through a network card do. What is started later makes those under way end later, so
/// exchanges are started in the order of time.
class LinkQueues {
 public:
  /// For the exchanges of one more group.
  size_t add_queue();
  /// Of `seconds` where it has the link to itself; returns its number.
  size_t start(size_t queue, LinkKind link, double now, double seconds);
  /// When it is over if nothing else is started.
  ExchangeTime find(size_t number) const;

 private:
  struct Transfer {
    size_t number = 0;
    size_t queue = 0;
    LinkKind link = LinkKind::kOwn;
    double left = 0;  ///< seconds with the link to itself
  };
  struct State {
    double now = 0;
    std::vector<Transfer> waiting;  ///< and under way, in the order in which they were started

    /// Goes on to `until`, but not beyond the end of a transfer; what ended is told in `times`.
    void advance(double until, std::vector<ExchangeTime>& times);
    /// The first of each queue, which alone are under way; of those that begin now, `times` is
    /// told.
    std::vector<Transfer*> find_heads(std::vector<ExchangeTime>& times);
  };

  State state_;
  size_t num_queues_ = 0;
  std::vector<ExchangeTime> times_;  ///< by number; begin and end are negative until they are known
};

}  // namespace tessera

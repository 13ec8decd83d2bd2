#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "train/infer/decoding_batch.h"

namespace tessera {

/// A request's texts at work, shared by the thread that decodes and the client's.
class DecodingTicket {
 public:
  struct Item {
    size_t choice = 0;
    DecodingEvent event;
  };
  enum class State : uint8_t {
    kOpen,
    kDone,    ///< every choice has ended, or was cancelled
    kSlow,    ///< its client left too much waiting
    kFailed,  ///< the model could not go on; `why` says so
  };
  struct Taken {
    std::vector<Item> items;
    State state = State::kOpen;
    std::string why;
  };

  /// Waits until something came, the state changed or `limit` is over; takes all that came.
  Taken take(std::chrono::milliseconds limit);

 private:
  friend class DecodingService;

  std::mutex mutex_;
  std::condition_variable changed_;
  // By the mutex:
  std::deque<Item> items_;
  State state_ = State::kOpen;
  std::string why_;
  // Of the service, by its mutex:
  size_t num_open_ = 0;
};

/// One batch for the requests of many threads. One thread runs it; all others may call the rest.
class DecodingService {
 public:
  struct Limits {
    int64_t max_open = 0;       ///< texts at a time, those that wait included
    int64_t max_unread = 1024;  ///< events that a client may leave waiting
  };
  struct Load {
    int64_t num_open = 0;    ///< texts at work or waiting
    int64_t num_tokens = 0;  ///< that were written so far
  };

  DecodingService(DecodingBatch& batch, const Limits& limits) : batch_(batch), limits_(limits) {}

  /// Null where there is no room, or no longer any service. Throws UserError for what the batch
  /// cannot write.
  std::shared_ptr<DecodingTicket> submit(std::vector<DecodingRequest> requests);
  /// Ends one choice of a ticket, or all.
  void cancel(const std::shared_ptr<DecodingTicket>& ticket, size_t choice);
  void cancel(const std::shared_ptr<DecodingTicket>& ticket);
  Load load() const;

  /// Decodes until `is_over` says so, which is asked between passes and every 50 ms. Afterwards
  /// nothing is taken any more and what is open has failed.
  void run(const std::function<bool()>& is_over);

 private:
  struct Place {
    std::shared_ptr<DecodingTicket> ticket;
    size_t choice = 0;
  };
  struct Arrival {
    Place place;
    DecodingRequest request;
  };
  struct Departure {
    std::shared_ptr<DecodingTicket> ticket;
    std::optional<size_t> choice;
  };

  void take_arrivals();
  void leave(const Departure& departure);
  void deliver(const DecodingEvent& event);
  void close(const Place& place, DecodingTicket::State state, const std::string& why = "");
  void fail_all(const std::string& why);

  DecodingBatch& batch_;
  Limits limits_;
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  // By the mutex:
  std::deque<Arrival> arrivals_;
  std::deque<Departure> departures_;
  Load load_;
  bool over_ = false;
  // Of the thread that runs:
  std::map<int64_t, Place> places_;  ///< by the batch's number of the sequence
};

}  // namespace tessera

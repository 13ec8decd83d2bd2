#include "serve/decoding_service.h"

#include <algorithm>
#include <exception>

namespace tessera {

using State = DecodingTicket::State;

DecodingTicket::Taken DecodingTicket::take(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return !items_.empty() || state_ != State::kOpen; });
  Taken taken{
      .items = {std::make_move_iterator(items_.begin()), std::make_move_iterator(items_.end())},
      .state = state_,
      .why = why_};
  items_.clear();
  return taken;
}

std::shared_ptr<DecodingTicket> DecodingService::submit(std::vector<DecodingRequest> requests) {
  for (const DecodingRequest& request : requests) batch_.check(request);
  auto ticket = std::make_shared<DecodingTicket>();
  const std::lock_guard lock(mutex_);
  const int64_t count = std::ssize(requests);
  if (over_ || load_.num_open + count > limits_.max_open) return nullptr;
  load_.num_open += count;
  ticket->num_open_ = requests.size();
  for (size_t i = 0; i < requests.size(); ++i)
    arrivals_.push_back({{ticket, i}, std::move(requests[i])});
  arrived_.notify_one();
  return ticket;
}

void DecodingService::cancel(const std::shared_ptr<DecodingTicket>& ticket, size_t choice) {
  const std::lock_guard lock(mutex_);
  departures_.push_back({ticket, choice});
}

void DecodingService::cancel(const std::shared_ptr<DecodingTicket>& ticket) {
  const std::lock_guard lock(mutex_);
  departures_.push_back({ticket, std::nullopt});
}

DecodingService::Load DecodingService::load() const {
  const std::lock_guard lock(mutex_);
  return load_;
}

void DecodingService::take_arrivals() {
  std::deque<Arrival> arrivals;
  std::deque<Departure> departures;
  {
    const std::lock_guard lock(mutex_);
    arrivals.swap(arrivals_);
    departures.swap(departures_);
  }
  for (Arrival& arrival : arrivals)
    places_.emplace(batch_.add(std::move(arrival.request)), arrival.place);
  for (const Departure& departure : departures) leave(departure);
}

void DecodingService::leave(const Departure& departure) {
  for (auto it = places_.begin(); it != places_.end();) {
    const Place place = it->second;
    const bool leaves = place.ticket == departure.ticket &&
                        (!departure.choice || *departure.choice == place.choice);
    if (!leaves) {
      ++it;
      continue;
    }
    batch_.remove(it->first);
    it = places_.erase(it);
    close(place, State::kDone);
  }
}

/// One choice of a ticket is over. A state other than kDone is the whole ticket's.
void DecodingService::close(const Place& place, State state, const std::string& why) {
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    --load_.num_open;
    last = --place.ticket->num_open_ == 0;
  }
  const std::lock_guard lock(place.ticket->mutex_);
  if (place.ticket->state_ != State::kOpen || (state == State::kDone && !last)) return;
  place.ticket->state_ = state;
  place.ticket->why_ = why;
  place.ticket->changed_.notify_all();
}

void DecodingService::deliver(const DecodingEvent& event) {
  const auto found = places_.find(event.sequence);
  if (found == places_.end()) return;
  const Place place = found->second;
  bool slow = false;
  {
    DecodingTicket& ticket = *place.ticket;
    const std::lock_guard lock(ticket.mutex_);
    slow = std::ssize(ticket.items_) >= limits_.max_unread;
    if (!slow) ticket.items_.push_back({place.choice, event});
    ticket.changed_.notify_all();
  }
  if (slow) {
    {
      const std::lock_guard lock(place.ticket->mutex_);
      place.ticket->state_ = State::kSlow;
      place.ticket->items_.clear();
    }
    leave({place.ticket, std::nullopt});
  } else if (event.end != DecodingEnd::kNot) {
    places_.erase(found);
    close(place, State::kDone);
  }
}

void DecodingService::fail_all(const std::string& why) {
  for (const auto& [number, place] : places_) {
    batch_.remove(number);
    close(place, State::kFailed, why);
  }
  places_.clear();
}

void DecodingService::run(const std::function<bool()>& is_over) {
  while (!is_over()) {
    take_arrivals();
    if (batch_.is_idle()) {
      std::unique_lock lock(mutex_);
      arrived_.wait_for(lock, std::chrono::milliseconds(50), [&] { return !arrivals_.empty(); });
      continue;
    }
    try {
      int64_t num_tokens = 0;
      for (const DecodingEvent& event : batch_.step()) {
        num_tokens += event.token ? 1 : 0;
        const bool news = event.token || !event.prompt.empty() || event.end != DecodingEnd::kNot;
        if (news) deliver(event);
      }
      const std::lock_guard lock(mutex_);
      load_.num_tokens += num_tokens;
    } catch (const UserError& error) {
      fail_all(error.what());
    }
  }
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  take_arrivals();
  fail_all("the server is stopping");
}

}  // namespace tessera

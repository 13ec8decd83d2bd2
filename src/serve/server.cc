#include "serve/server.h"

#include <arpa/inet.h>
#include <httplib.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/error.h"
#include "serve/completion_response.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using httplib::DataSink;
using httplib::Request;
using httplib::Response;
using Milliseconds = std::chrono::milliseconds;

constexpr const char* kJson = "application/json";
constexpr const char* kCompletions = "/v1/completions";
constexpr const char* kChatCompletions = "/v1/chat/completions";
constexpr const char* kModels = "/v1/models";
constexpr const char* kHealth = "/health";
constexpr int64_t kMostThreads = 1024;      // connections beyond them wait
constexpr Milliseconds kLookInterval{200};  ///< how often a waiting answer looks for its client

struct AddressListDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

bool is_loopback(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    const auto* own = reinterpret_cast<const sockaddr_in*>(address.ai_addr);
    return (ntohl(own->sin_addr.s_addr) >> 24) == 127;
  }
  const auto* own = reinterpret_cast<const sockaddr_in6*>(address.ai_addr);
  return address.ai_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&own->sin6_addr);
}

/// Whether all addresses of a host are this machine's own.
bool is_own_host(const std::string& host) {
  addrinfo* found = nullptr;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  require(error == 0, "--host {}: {}", host, gai_strerror(error));
  const std::unique_ptr<addrinfo, AddressListDeleter> list(found);
  for (const addrinfo* address = list.get(); address != nullptr; address = address->ai_next) {
    if (!is_loopback(*address)) return false;
  }
  return true;
}

/// Two servers may not share a port, as they may with httplib's own options.
void set_socket_options(int socket) {
  const int yes = 1;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
}

/// Compares in a time that does not depend on where the texts differ.
bool same_secret(const std::string& a, const std::string& b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i)
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  return difference == 0;
}

void answer(Response& response, const Json& body) {
  response.set_content(body.dump(-1, ' ', false, Json::error_handler_t::replace), kJson);
}

void answer(Response& response, const ApiError& error) {
  response.status = error.status();
  answer(response, error.body());
}

/// Answers without the request's body having been read, which would be taken for the next request:
/// so the connection ends with the answer.
void answer_and_end(Response& response, const ApiError& error) {
  response.status = error.status();
  response.set_header("Connection", "close");
  const std::string body = error.body().dump(-1, ' ', false, Json::error_handler_t::replace);
  response.set_content_provider(body.size(), kJson,
                                [body](size_t offset, size_t length, DataSink& sink) {
                                  sink.write(body.data() + offset, length);
                                  return false;  // httplib keeps connections whose answers succeed
                                });
}

bool ends_connection(const Response& response) {
  return response.get_header_value("Connection") == "close";
}

/// Throws ApiError where it cannot be told where the request's body ends; httplib would read until
/// the client goes away.
void check_length(const Request& request) {
  const size_t count = request.get_header_value_count("Content-Length");
  if (count > 0 && request.has_header("Transfer-Encoding"))
    throw ApiError(400, "invalid_request_error",
                   "there are both Content-Length and Transfer-Encoding, which say different ends");
  if (count == 0 && request.method == "POST" && !request.has_header("Transfer-Encoding"))
    throw ApiError(411, "invalid_request_error", "there is no header Content-Length");
  for (size_t i = 0; i < count; ++i) {
    const std::string text = request.get_header_value("Content-Length", i);
    uint64_t length = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
    if (count == 1 && error == std::errc() && end == text.data() + text.size()) continue;
    throw ApiError(400, "invalid_request_error",
                   count > 1 ? fmt::format("there are {} headers Content-Length", count)
                             : fmt::format("Content-Length is '{}', not a number of bytes", text));
  }
}

bool takes_body(const Request& request) {
  return request.path == kCompletions || request.path == kChatCompletions;
}

/// For a place that is not there, or not for this method.
ApiError no_such_place(const Request& request) {
  const bool posts = takes_body(request);
  if (posts || request.path == kModels || request.path == kHealth)
    return {
        405, "invalid_request_error",
        fmt::format("{} takes {}, not {}", request.path, posts ? "POST" : "GET", request.method)};
  return {404, "invalid_request_error", fmt::format("there is no '{}' here", request.path)};
}

ApiError too_long() {
  return {413, "invalid_request_error", "the body is longer than this server takes"};
}

/// Throws ApiError for what has a body where none is taken: httplib would read any length of it.
void check_place(const Request& request) {
  const bool asks = request.method == "GET" || request.method == "HEAD";
  if (!asks && !(request.method == "POST" && takes_body(request))) throw no_such_place(request);
}

/// The error for a status that httplib itself answers with.
ApiError error_of_status(const Request& request, const Response& response) {
  const auto refused = [](int status, const std::string& message) {
    return ApiError(status, "invalid_request_error", message);
  };
  switch (response.status) {
    case 404:
      return no_such_place(request);
    case 413:
      return too_long();
    case 414:
      return refused(414, "the address is longer than this server takes");
    default:
      if (response.status >= 500)
        return {response.status, "server_error", "the server could not answer"};
      return refused(response.status, "the request is not HTTP that this server understands");
  }
}

/// The answer to one request, while its client takes it.
class Answer {
 public:
  Answer(DecodingService& service, CompletionRequest request, const CompletionRules& rules,
         std::string id, std::atomic<int64_t>& num_answers)
      : num_answers_(num_answers),
        service_(service),
        request_(std::move(request)),
        response_(request_, rules.tokenizer, rules.model, std::move(id), time(nullptr)) {
    ++num_answers_;
  }
  ~Answer() {
    if (ticket_) service_.cancel(ticket_);
    --num_answers_;
  }
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  bool streams() const { return request_.stream; }

  void submit() {
    std::vector<DecodingRequest> requests;
    for (const Choice& choice : request_.choices) requests.push_back(choice.decoding);
    ticket_ = service_.submit(std::move(requests));
    if (!ticket_)
      throw ApiError(429, "rate_limit_error", "too many texts are being written; try again later",
                     "", "rate_limit_exceeded");
  }

  /// Gives the client what there is; false where the connection is to end. Throws nothing.
  bool give_or_end(DataSink& sink) {
    try {
      return give(sink);
    } catch (const std::exception&) {
      return false;
    }
  }

 private:
  bool give(DataSink& sink) {
    const auto stop = [this](size_t choice) { service_.cancel(ticket_, choice); };
    const DecodingTicket::Taken taken = ticket_->take(kLookInterval);
    std::string bytes;
    for (const DecodingTicket::Item& item : taken.items) bytes += response_.take(item, stop);
    if (response_.is_complete()) {
      bytes += response_.finish();
    } else if (taken.state != DecodingTicket::State::kOpen) {
      return fail(sink, taken);
    }
    if (!bytes.empty() && !sink.write(bytes.data(), bytes.size())) return false;
    if (response_.is_complete()) sink.done();
    return response_.is_complete() || sink.is_writable();
  }

  bool fail(DataSink& sink, const DecodingTicket::Taken& taken) const {
    const bool slow = taken.state == DecodingTicket::State::kSlow;
    const std::string why = slow ? "the client takes its answer too slowly" : taken.why;
    const std::string event = CompletionResponse::error_event(ApiError(500, "server_error", why));
    if (request_.stream) sink.write(event.data(), event.size());
    return false;
  }

  std::atomic<int64_t>& num_answers_;
  DecodingService& service_;
  CompletionRequest request_;
  CompletionResponse response_;
  std::shared_ptr<DecodingTicket> ticket_;
};

}  // namespace

void validate(const ServerOptions& options) {
  require(options.port >= 0 && options.port <= 65535,
          "--port {}; it must be from 0 (any that is free) to 65535", options.port);
  require(options.any_host || is_own_host(options.host),
          "--host {} can be reached from other machines; --any-host allows that", options.host);
}

struct CompletionServer::Impl {
  Impl(const ServerOptions& own_options, const CompletionRules& own_rules,
       DecodingService& own_service)
      : options(own_options), rules(own_rules), service(own_service) {}

  ServerOptions options;
  CompletionRules rules;
  DecodingService& service;
  httplib::Server http;
  std::thread listener;
  std::atomic<int64_t> next_id{1};
  std::atomic<int64_t> num_answers{0};
  std::atomic<bool> draining{false};
  int64_t port = 0;
  int listening = -1;  ///< the socket, of the last address that was tried

  void set_limits() {
    http.set_socket_options([this](int socket) {
      set_socket_options(socket);
      listening = socket;
    });
    http.set_tcp_nodelay(true);
    http.set_payload_max_length(static_cast<size_t>(options.max_body));
    http.set_read_timeout(options.client_seconds);
    http.set_write_timeout(options.client_seconds);
    // A connection more than texts can be at work finds a thread to be told so.
    const int64_t wanted = rules.max_choices + options.max_waiting + 16;
    const auto threads = static_cast<size_t>(std::min(wanted, kMostThreads));
    http.new_task_queue = [threads] { return new httplib::ThreadPool(threads); };
  }

  void set_handlers() {
    http.set_pre_routing_handler([this](const Request& request, Response& response) {
      try {
        check_length(request);
        check_key(request);
        check_place(request);
      } catch (const ApiError& error) {
        answer_and_end(response, error);
        return httplib::Server::HandlerResponse::Handled;
      }
      return httplib::Server::HandlerResponse::Unhandled;
    });
    http.set_post_routing_handler([](const Request& /*request*/, Response& response) {
      if (ends_connection(response)) response.headers.erase("Keep-Alive");
    });
    http.set_error_handler([](const Request& request, Response& response) {
      if (!response.body.empty() || ends_connection(response)) return;
      answer(response, error_of_status(request, response));
    });
    http.set_exception_handler([](const Request& /*request*/, Response& response,
                                  std::exception_ptr error) { refuse(response, error); });
    http.Get(kHealth, [this](const Request& /*request*/, Response& response) {
      const DecodingService::Load load = service.load();
      answer(response,
             Json{{"status", "ok"}, {"open", load.num_open}, {"tokens", load.num_tokens}});
    });
    http.Get(kModels, [this](const Request& /*request*/, Response& response) {
      answer(response, Json{{"object", "list"}, {"data", Json::array({model_card()})}});
    });
    http.Get(std::string(kModels) + "/(.+)", [this](const Request& request, Response& response) {
      if (request.matches[1] != rules.model) throw no_such_model(request.matches[1], rules);
      answer(response, model_card());
    });
    for (const bool is_chat : {false, true}) {
      http.Post(is_chat ? kChatCompletions : kCompletions,
                [this, is_chat](const Request& request, Response& response,
                                const httplib::ContentReader& read) {
                  std::string body;
                  if (take_body(request, read, body, response))
                    complete(request, body, response, is_chat);
                });
    }
  }

  Json model_card() const {
    return {{"id", rules.model}, {"object", "model"}, {"created", 0}, {"owned_by", "tessera"}};
  }

  /// Throws ApiError where the request lacks the key.
  void check_key(const Request& request) const {
    if (options.api_key.empty() || request.path == kHealth) return;
    if (same_secret(request.get_header_value("Authorization"), "Bearer " + options.api_key)) return;
    throw ApiError(401, "invalid_request_error",
                   "the API key is missing or wrong; give it as 'Authorization: Bearer KEY'", "",
                   "invalid_api_key");
  }

  static void refuse(Response& response, const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const ApiError& refused) {
      if (refused.status() == 429 || refused.status() == 503)
        response.set_header("Retry-After", "1");
      answer(response, refused);
    } catch (const UserError& refused) {
      answer(response, ApiError(400, "invalid_request_error", refused.what()));
    } catch (const std::exception& failed) {
      answer(response, ApiError(500, "server_error", failed.what()));
    }
  }

  /// Of whatever type and however it comes: of chunks and of what is unpacked httplib counts
  /// nothing, and of forms it takes little. False where the response says what is wrong.
  bool take_body(const Request& request, const httplib::ContentReader& read, std::string& body,
                 Response& response) const {
    if (request.is_multipart_form_data()) {
      answer_and_end(response, ApiError(400, "invalid_request_error",
                                        "the body is multipart/form-data; JSON is expected"));
      return false;
    }
    bool fits = true;
    const bool whole = read([&](const char* data, size_t length) {
      fits = body.size() + length <= static_cast<size_t>(options.max_body);
      if (fits) body.append(data, length);
      return fits;
    });
    if (!fits) answer_and_end(response, too_long());
    return whole;
  }

  void complete(const Request& request, const std::string& body, Response& response, bool is_chat) {
    if (draining) throw ApiError(503, "server_error", "the server is stopping");
    const std::string id =
        fmt::format("{}-{}", is_chat ? "chatcmpl" : "cmpl", next_id.fetch_add(1));
    const auto own = std::make_shared<Answer>(service, parse_completion(body, is_chat, rules),
                                              rules, id, num_answers);
    own->submit();
    const char* type = own->streams() ? "text/event-stream" : kJson;
    const auto give = [own](size_t /*offset*/, DataSink& sink) { return own->give_or_end(sink); };
    if (request.version == "HTTP/1.0") {  // which has no chunks: the connection's end is the body's
      response.set_header("Connection", "close");
      response.set_content_provider(type, give);
    } else {
      // In chunks in either case, so that a client that goes away is noticed while it waits.
      response.set_chunked_content_provider(type, give);
    }
  }

  void bind() {
    errno = 0;
    if (options.port == 0) {
      port = http.bind_to_any_port(options.host);
    } else if (http.bind_to_port(options.host, static_cast<int>(options.port))) {
      port = options.port;
    }
    const int error = errno;
    require(port > 0, "the server cannot listen on {}, port {}: {}; give another --port (0: any)",
            options.host, options.port, error == 0 ? "refused" : std::strerror(error));
    // httplib lets five connections wait to be accepted, and more are lost when many come at once.
    ::listen(listening, SOMAXCONN);
  }
};

CompletionServer::CompletionServer(const ServerOptions& options, const CompletionRules& rules,
                                   DecodingService& service)
    : impl_(std::make_unique<Impl>(options, rules, service)) {
  validate(options);
  impl_->set_limits();
  impl_->set_handlers();
  impl_->bind();
}

CompletionServer::~CompletionServer() {
  impl_->http.stop();
  if (impl_->listener.joinable()) impl_->listener.join();
}

int64_t CompletionServer::port() const {
  return impl_->port;
}

void CompletionServer::start() {
  impl_->listener = std::thread([this] { impl_->http.listen_after_bind(); });
  while (!impl_->http.is_running()) std::this_thread::sleep_for(Milliseconds(1));
}

void CompletionServer::drain() {
  impl_->draining = true;
}

int64_t CompletionServer::num_answers() const {
  return impl_->num_answers;
}

}  // namespace tessera

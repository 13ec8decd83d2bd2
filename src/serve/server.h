#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "serve/completion_request.h"
#include "serve/decoding_service.h"

namespace tessera {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int64_t port = 8000;       ///< 0: any that is free
  bool any_host = false;     ///< whether others than this machine's own addresses are taken
  std::string api_key;       ///< that clients must give; empty: none
  int64_t max_waiting = 64;  ///< texts that wait while as many as the batch takes are written
  int64_t max_body = int64_t{4} << 20;  ///< bytes of a request's body
  int64_t client_seconds = 10;          ///< for a client to send the next bytes, or to take them
  int64_t drain_seconds = 30;           ///< for texts at work once the server is to stop
};

/// Throws UserError for options out of range, and for a host that is not this machine's own where
/// only such are taken.
void validate(const ServerOptions& options);

/// OpenAI's completions over HTTP/1.1: /v1/models, /v1/completions, /v1/chat/completions; and
/// /health. A thread for each connection; texts are written by the service's one.
class CompletionServer {
 public:
  /// Takes the port. Throws UserError where that fails. What is given must outlive it.
  CompletionServer(const ServerOptions& options, const CompletionRules& rules,
                   DecodingService& service);
  /// Lets no more connections in, and ends those that are there.
  ~CompletionServer();
  CompletionServer(const CompletionServer&) = delete;
  CompletionServer& operator=(const CompletionServer&) = delete;

  int64_t port() const;
  /// Answers in threads of its own.
  void start();
  /// Refuses new texts from now on; answers that have begun go on.
  void drain();
  /// Answers that are not yet with their clients.
  int64_t num_answers() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera

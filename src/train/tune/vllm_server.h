#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "train/setup/objective.h"

namespace tessera {

/// A vLLM server that is told to load weights from a folder that it sees, by the routes of its
/// development mode (VLLM_SERVER_DEV_MODE=1). For each version:
///
///   POST /pause?mode=...     of rl.vllm_pause
///   rl.vllm_way "reload":    POST /collective_rpc: reload_weights of weights_path
///   or "disk":               POST /start_weight_update, /update_weights {"path"},
///                            /finish_weight_update {"weight_version"};
///                            /init_weight_transfer_engine once before
///   POST /resume
///
/// Every request has a limit of time in all. What fails throws UserError with the route, what the
/// server said and what to do.
class VllmServer {
 public:
  /// Throws UserError for an address that is none.
  explicit VllmServer(const WeightExportSettings& settings);

  /// How many workers it has. Throws where nobody answers, or a server without the routes.
  int64_t find_workers();
  /// Returns when it writes with the weights in `folder`, an absolute path. Where loading fails
  /// the server is left paused: a part of its weights may be new.
  void load(const std::filesystem::path& folder, const std::string& version);

 private:
  /// The body of the answer.
  std::string ask(const std::string& method, const std::string& route, const std::string& body);
  void reload(const std::string& folder);
  void transfer(const std::string& folder, const std::string& version);
  void resume_quietly();

  WeightExportSettings settings_;
  std::string address_;  ///< "http://host:port"
  std::string prefix_;   ///< of routes, "" or "/..."
  bool has_begun_ = false;
};

}  // namespace tessera

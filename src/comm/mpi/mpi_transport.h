#pragma once

#include "comm/transport.h"

namespace tessera {

/// What the plugin gives. The version changes with comm/transport.h.
inline constexpr const char* kMpiPluginSymbol = "tessera_mpi_plugin_2";
struct MpiPlugin {
  /// Starts MPI; once in a process. Throws UserError.
  std::unique_ptr<Transport> (*connect)();
  /// "Open MPI v4.1.4, ...".
  std::string (*library_version)();
};

}  // namespace tessera

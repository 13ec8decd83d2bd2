#pragma once

#include "comm/transport.h"

namespace tessera {

struct MpiJoin {
  int64_t rank = 0;  ///< as the launcher says, for messages; MPI's own counts
  double timeout_seconds = 600;
};

/// What the plugin gives. The version changes with comm/transport.h.
inline constexpr const char* kMpiPluginSymbol = "tessera_mpi_plugin_3";
struct MpiPlugin {
  /// Starts MPI; once in a process. Throws UserError. Where another rank does not come to it within
  /// the time limit, says so and ends this process, since MPI cannot be interrupted; the same holds
  /// for the end, in the transport's destructor.
  std::unique_ptr<Transport> (*connect)(const MpiJoin& join);
  /// "Open MPI v4.1.4, ...".
  std::string (*library_version)();
};

}  // namespace tessera

#pragma once

#include <memory>
#include <string>

#include "comm/options.h"
#include "comm/transport.h"

namespace tessera {

/// Joins the ranks that an MPI launcher started, of which this is `rank`; all must call, once in a
/// process. Where one does not, the others say so and end after the time limit. The plugin
/// libtessera_mpi.so, the only file that needs MPI, is loaded from the program's folder's `lib`,
/// `../lib` or `../lib/tessera`. Throws UserError where the plugin or MPI is missing, or MPI
/// sees another number of ranks than `expected_ranks`.
std::shared_ptr<Transport> connect_mpi(const CommOptions& options, int64_t rank,
                                       int64_t expected_ranks);

/// What MPI library the plugin is linked with, or why there is none.
std::string mpi_library_version();

}  // namespace tessera

#include "comm/launch/mpi_world.h"

#include <dlfcn.h>

#include <filesystem>

#include "comm/mpi/mpi_transport.h"
#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "libtessera_mpi.so";

// Loaded for the rest of the process: MPI cannot be unloaded.
const MpiPlugin& load_plugin() {
  const fs::path folder = fs::read_symlink("/proc/self/exe").parent_path();
  std::string places;
  for (const char* place : {"lib", "../lib", "../lib/tessera"}) {
    const fs::path file = (folder / place / kFile).lexically_normal();
    places += "\n  " + file.string();
    if (!fs::exists(file)) continue;
    // Global, since Open MPI loads its components without naming what they need of it.
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
    require(library != nullptr,
            "MPI cannot be used: {}; install Open MPI (openmpi-bin, libopenmpi3)", dlerror());
    const void* plugin = dlsym(library, kMpiPluginSymbol);
    require(plugin != nullptr, "{} belongs to another version of Tessera: build both together",
            file.string());
    return *static_cast<const MpiPlugin*>(plugin);
  }
  user_error(
      "several ranks need {}, which was not built or not installed; install libopenmpi-dev and "
      "build again. Looked for:{}",
      kFile, places);
}

}  // namespace

std::shared_ptr<Transport> connect_mpi(const CommOptions& options, int64_t rank,
                                       int64_t expected_ranks) {
  std::shared_ptr<Transport> transport =
      load_plugin().connect({.rank = rank, .timeout_seconds = options.timeout_seconds});
  require(transport->size() == expected_ranks,
          "the launcher started {} ranks, but MPI joined {}: with srun, choose how MPI finds its "
          "ranks (srun --mpi=pmix); otherwise use the mpirun of the same MPI library",
          expected_ranks, transport->size());
  return transport;
}

std::string mpi_library_version() {
  try {
    return load_plugin().library_version();
  } catch (const UserError& error) {
    return error.what();
  }
}

}  // namespace tessera

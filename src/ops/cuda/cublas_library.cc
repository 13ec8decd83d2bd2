#include "ops/cuda/cublas_library.h"

#include <string>
#include <vector>

#include "core/error.h"
#include "core/process/shared_library.h"

namespace tessera::cuda {
namespace {

// Set by CMake: the file of the release that was compiled against, and where that was found.
constexpr const char* kFile = TESSERA_CUBLAS_FILE;
constexpr const char* kFolder = TESSERA_CUBLAS_FOLDER;

SharedLibrary open_library() {
  const std::string usual = "/usr/local/cuda/lib64";
  std::vector<std::string> names{kFile, fmt::format("{}/{}", kFolder, kFile)};
  if (usual != kFolder) names.push_back(fmt::format("{}/{}", usual, kFile));
  return {names, "cuBLASLt, by which GPUs multiply matrices,",
          fmt::format("install CUDA's libraries, or add the folder of {} (of PyTorch's packages, "
                      "where they are for the same release of CUDA) to LD_LIBRARY_PATH",
                      kFile)};
}

CublasLibrary load() {
  const SharedLibrary file = open_library();
  CublasLibrary library{};
  file.find("cublasLtGetStatusString", library.status_string);
  file.find("cublasLtCreate", library.create);
  file.find("cublasLtDestroy", library.destroy);
  file.find("cublasLtMatrixLayoutCreate", library.layout_create);
  file.find("cublasLtMatrixLayoutDestroy", library.layout_destroy);
  file.find("cublasLtMatrixLayoutSetAttribute", library.layout_set);
  file.find("cublasLtMatmulDescCreate", library.operation_create);
  file.find("cublasLtMatmulDescDestroy", library.operation_destroy);
  file.find("cublasLtMatmulDescSetAttribute", library.operation_set);
  file.find("cublasLtMatmulPreferenceCreate", library.preference_create);
  file.find("cublasLtMatmulPreferenceDestroy", library.preference_destroy);
  file.find("cublasLtMatmulPreferenceSetAttribute", library.preference_set);
  file.find("cublasLtMatmulAlgoGetHeuristic", library.find_algorithm);
  file.find("cublasLtMatmul", library.multiply);
  return library;
}

}  // namespace

const CublasLibrary& CublasLibrary::get() {
  static const CublasLibrary library = load();
  return library;
}

void CublasLibrary::check(cublasStatus_t status) const {
  ensure(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: {}", status_string(status));
}

}  // namespace tessera::cuda

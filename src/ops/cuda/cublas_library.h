#pragma once

#include <cublasLt.h>

namespace tessera::cuda {

/// cuBLASLt's functions, from the library that is loaded when a GPU first multiplies matrices:
/// loading its hundreds of megabytes would slow the start of every command.
struct CublasLibrary {
  /// Loads it once. Throws UserError that says where it was looked for if it cannot be found.
  static const CublasLibrary& get();
  /// Throws InternalError with cuBLASLt's own words.
  void check(cublasStatus_t status) const;

  decltype(&::cublasLtGetStatusString) status_string;
  decltype(&::cublasLtCreate) create;
  decltype(&::cublasLtDestroy) destroy;
  decltype(&::cublasLtMatrixLayoutCreate) layout_create;
  decltype(&::cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&::cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&::cublasLtMatmulDescCreate) operation_create;
  decltype(&::cublasLtMatmulDescDestroy) operation_destroy;
  decltype(&::cublasLtMatmulDescSetAttribute) operation_set;
  decltype(&::cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&::cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) find_algorithm;
  decltype(&::cublasLtMatmul) multiply;
};

}  // namespace tessera::cuda

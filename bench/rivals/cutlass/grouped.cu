// The products under C names. Failures are told on standard error.
#include "grouped.h"

#include <cstdio>
#include <exception>

namespace {

/// Whether `run` ended without an exception.
template <typename Run>
bool succeeds(const Run& run) {
  try {
    run();
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "CUTLASS's grouped product: %s\n", error.what());
    return false;
  }
}

}  // namespace

extern "C" {

enum RivalProduct : int { kByOut, kByIn, kWgrad };

/// Null on failure.
rival::Product* cutlass_grouped_make(int product, const rival::Problem* problem) {
  std::unique_ptr<rival::Product> made;
  succeeds([&] {
    made = product == kByOut  ? rival::make_by_out(*problem)
           : product == kByIn ? rival::make_by_in(*problem)
                              : rival::make_wgrad(*problem);
  });
  return made.release();
}

/// Zero on success.
int cutlass_grouped_run(rival::Product* product, void* stream) {
  return succeeds([&] { product->run(static_cast<cudaStream_t>(stream)); }) ? 0 : 1;
}

void cutlass_grouped_free(rival::Product* product) {
  delete product;
}
}

#pragma once

#include <gtest/gtest.h>

#include "ops/registry/cpu_kernels.h"
#include "ops/testing/gpu_check.h"
#include "runtime/cuda/cuda_backend.h"

namespace tessera::testing {

/// Tests that need a GPU; skipped, visibly, where there is none.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const GpuList list = list_gpus();
    if (list.gpus.empty()) GTEST_SKIP() << "no GPU: " << list.why;
  }
  const Backend& cpu() const { return cpu_; }
  /// One for all tests of the program, since making it takes a second.
  static const Backend& gpu() {
    static const Backend backend = make_cuda_backend(0);
    return backend;
  }

 private:
  Backend cpu_{make_cpu_kernels()};
};

}  // namespace tessera::testing

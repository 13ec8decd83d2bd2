#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/file/file.h"
#include "core/memory.h"
#include "core/random.h"
#include "core/tensor.h"

namespace tessera {

/// In memory where there is such a folder: waiting for the disk takes most of these tests' time.
inline std::filesystem::path memory_folder() {
  const std::filesystem::path memory = "/dev/shm";
  return std::filesystem::is_directory(memory) ? memory
                                               : std::filesystem::path(::testing::TempDir());
}

/// A test with an empty folder of its own.
class FolderTest : public ::testing::Test {
 protected:
  explicit FolderTest(const std::filesystem::path& parent = memory_folder())
      : folder_(parent / unique_name("checkpoint_test-")) {
    make_folder(folder_);
  }
  ~FolderTest() override { remove_path(folder_); }

  const std::filesystem::path folder_;
};

/// Tensors that own their memory, filled with random bytes that are a pure function of (seed,
/// name).
class RandomTensors {
 public:
  explicit RandomTensors(uint64_t seed) : seed_(seed) {}

  void add(const std::string& name, DType dtype, const Shape& shape) {
    owned_.emplace_back(dtype, shape);
    const Tensor& tensor = owned_.back().get();
    Random random(seed_, hash_text(name.data(), name.size()));
    auto* bytes = static_cast<std::byte*>(tensor.data);
    for (int64_t i = 0; i < tensor.num_bytes(); ++i) {
      bytes[i] = static_cast<std::byte>(random.next_u64());
    }
    named_.push_back({name, tensor});
  }
  const std::vector<NamedTensor>& named() const { return named_; }

 private:
  uint64_t seed_;
  std::vector<OwnedTensor> owned_;
  std::vector<NamedTensor> named_;
};

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape &&
         (a.num_bytes() == 0 ||
          std::memcmp(a.data, b.data, static_cast<size_t>(a.num_bytes())) == 0);
}

}  // namespace tessera

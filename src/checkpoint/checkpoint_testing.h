#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/testing.h"

namespace tessera {

/// Checkpoints of a few tensors of all kinds in a folder of the test's own.
class CheckpointTest : public FolderTest {
 protected:
  CheckpointTest() {
    model_.add("embed", DType::kF32, {11, 3});
    model_.add("layers.0.w", DType::kBF16, {5, 7});
    model_.add("layers.0.empty", DType::kF32, {0, 7});
    optimizer_.add("embed.m", DType::kF32, {11, 3});
    optimizer_.add("count", DType::kI64, {});
  }

  SaveResult save(int64_t step, int64_t keep_last = 0) const {
    return save_checkpoint(root_, {.step = step,
                                   .model = model_.named(),
                                   .optimizer = optimizer_.named(),
                                   .state = fmt::format("{{\"step\":{}}}", step),
                                   .keep_last = keep_last,
                                   .shard_bytes = 100});
  }

  void expect_loads(const std::filesystem::path& path) const {
    const CheckpointReader reader(path);
    for (const auto& [name, tensor] : model_.named()) {
      const OwnedTensor loaded(tensor.dtype, tensor.shape);
      reader.load_into(name, loaded);
      EXPECT_TRUE(same_bits(loaded, tensor)) << name;
    }
  }

  std::vector<std::string> root_names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(root_))
      names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
  }

  /// Changes one byte of a file.
  static void flip(const std::filesystem::path& path, int64_t at) {
    std::string text = read_text_file(path);
    text[at] = static_cast<char>(text[at] ^ 1);
    write_file_synced(path, text);
  }

  const std::filesystem::path root_ = folder_ / "runs" / "checkpoints";
  RandomTensors model_{1};
  RandomTensors optimizer_{2};
};

}  // namespace tessera

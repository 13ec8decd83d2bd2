#include "data/file_identity.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/error.h"
#include "core/file/file.h"
#include "core/random.h"

namespace tessera {
namespace {

constexpr int64_t kBlock = 4096;
constexpr int64_t kBlocks = 4096;     // of all files together, where there are more
constexpr size_t kMostFiles = 256;    // whose content is looked at
constexpr int64_t kLeastBlocks = 16;  // of a file

class Hash {
 public:
  void add(const void* bytes, size_t count) {
    const uint64_t next = hash_text(static_cast<const char*>(bytes), count);
    const uint64_t both[2] = {value_, next};
    value_ = hash_text(reinterpret_cast<const char*>(both), sizeof(both));
  }
  void add(int64_t number) { add(&number, sizeof(number)); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

/// The first block, the last, and others evenly spread between them.
void add_sample(Hash& hash, const std::filesystem::path& path, int64_t most_blocks) {
  InputFile file(path);
  const int64_t num_blocks = (file.num_bytes() + kBlock - 1) / kBlock;
  const int64_t taken = std::min(num_blocks, most_blocks);
  std::vector<std::byte> block(kBlock);
  for (int64_t i = 0; i < taken; ++i) {
    const auto place =
        static_cast<double>(i) / static_cast<double>(std::max<int64_t>(taken - 1, 1));
    const int64_t index =
        taken == num_blocks ? i : static_cast<int64_t>(place * static_cast<double>(num_blocks - 1));
    file.seek(index * kBlock);
    hash.add(block.data(), file.read(block));
  }
}

}  // namespace

std::string identify_files(std::span<const std::filesystem::path> files) {
  Hash hash;
  int64_t total = 0;
  for (const auto& path : files) {
    std::error_code error;
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path, error));
    require(!error, "{}: {}", path.string(), error.message());
    // Where a folder lies may differ; a single file may have any name.
    if (files.size() > 1) hash.add(path.filename().c_str(), path.filename().native().size());
    hash.add(bytes);
    total += bytes;
  }
  const size_t step = (files.size() + kMostFiles - 1) / kMostFiles;
  const int64_t looked_at = std::ssize(files) / std::max<int64_t>(static_cast<int64_t>(step), 1);
  const int64_t blocks = std::max(kLeastBlocks, kBlocks / std::max<int64_t>(looked_at, 1));
  for (size_t i = 0; i < files.size(); i += step) add_sample(hash, files[i], blocks);
  return fmt::format("{} file{} of {} bytes with hash {:016x}", files.size(),
                     files.size() == 1 ? "" : "s", total, hash.value());
}

}  // namespace tessera

#pragma once

#include <algorithm>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/safetensors.h"
#include "hf/convert.h"
#include "hf/transfer/transfer.h"
#include "hf/verify.h"

namespace tessera {

/// Counts bytes towards the whole of a conversion.
class ConversionProgress {
 public:
  ConversionProgress(const ConvertProgress& report, int64_t total_bytes)
      : report_(report), total_bytes_(total_bytes) {}
  void begin(std::string_view stage) { stage_ = stage; }
  void advance(int64_t num_bytes) {
    done_bytes_ += num_bytes;
    report_(stage_, std::min(done_bytes_, total_bytes_), total_bytes_);
  }

 private:
  const ConvertProgress& report_;
  std::string stage_;
  int64_t done_bytes_ = 0;
  int64_t total_bytes_ = 0;
};

/// Bytes of tensors.
int64_t count_bytes(std::span<const MappedTensor> tensors);

/// Where each tensor goes: consecutive tensors share a file up to `shard_bytes`, or a larger one is
/// alone. Returns the first tensor of each file, and the number of tensors at the end.
std::vector<size_t> split_shards(std::span<const MappedTensor> tensors, int64_t shard_bytes);

/// Writes tensors of a plan, piece by piece, as the safetensors file `path`. `tensors` and `plan`
/// are those of this file.
struct ShardRequest {
  std::filesystem::path path;
  std::span<const MappedTensor> tensors;
  std::span<const std::vector<BlockCopy>> plan;
  std::map<std::string, std::string> metadata = {};
};
WrittenFile write_shard(const ShardRequest& request, ElementSource& source,
                        ConversionProgress& progress);

}  // namespace tessera

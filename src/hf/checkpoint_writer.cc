#include "hf/checkpoint_writer.h"

#include "checkpoint/format/manifest.h"
#include "checkpoint/layout.h"
#include "core/file/file.h"
#include "hf/tensor_writer.h"

namespace tessera {

void write_checkpoint_files(const std::filesystem::path& folder, const std::string& state,
                            std::span<const MappedTensor> tensors, int64_t shard_bytes,
                            const WriteShard& write_shard) {
  Manifest manifest;
  manifest.state = state;
  const auto borders = split_shards(tensors, shard_bytes);
  for (size_t i = 0; i + 1 < borders.size(); ++i) {
    const std::string file =
        fmt::format("{}-{:05}.safetensors", group_name(TensorGroup::kModel), i);
    const auto part = tensors.subspan(borders[i], borders[i + 1] - borders[i]);
    const WrittenFile written = write_shard(folder / file, borders[i], part);
    manifest.files[file] = {written.num_bytes, written.checksum};
    for (const MappedTensor& tensor : part) {
      manifest.tensors[tensor.name] = {TensorGroup::kModel,
                                       tensor.dtype,
                                       tensor.shape,
                                       {{file, tensor.name, whole(tensor.shape)}}};
    }
  }
  const std::string text = manifest_text(manifest);
  write_file_synced(folder / kManifestFile, text);
  write_file_synced(folder / kCompleteFile, complete_marker(text));
}

}  // namespace tessera

#include "hf/tensor_writer.h"

namespace tessera {

int64_t count_bytes(std::span<const MappedTensor> tensors) {
  int64_t total = 0;
  for (const MappedTensor& tensor : tensors) {
    total += tensor.shape.num_elements() * dtype_size(tensor.dtype);
  }
  return total;
}

std::vector<size_t> split_shards(std::span<const MappedTensor> tensors, int64_t shard_bytes) {
  std::vector<size_t> borders;
  int64_t size = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t num_bytes = count_bytes(tensors.subspan(i, 1));
    if (i == 0 || num_bytes > shard_bytes - size) {
      borders.push_back(i);
      size = 0;
    }
    size += num_bytes;
  }
  borders.push_back(tensors.size());
  return borders;
}

WrittenFile write_shard(const ShardRequest& request, ElementSource& source,
                        ConversionProgress& progress) {
  std::vector<NamedTensor> tensors;
  for (const MappedTensor& tensor : request.tensors) {
    tensors.push_back({tensor.name, {nullptr, tensor.dtype, tensor.shape}});
  }
  SafetensorsWriter writer(request.path, tensors, request.metadata);
  PageKeeper pages({&source});
  for (const size_t index : writer.order()) {
    const MappedTensor& tensor = request.tensors[index];
    const std::vector<BlockCopy>& blocks = request.plan[index];
    const std::vector<DType> dtypes(blocks.size(), tensor.dtype);
    transfer_tensor(source,
                    {.blocks = blocks,
                     .dtypes = dtypes,
                     .num_elements = tensor.shape.num_elements(),
                     .padding_dtype = tensor.dtype},
                    [&](std::span<const std::byte> bytes) {
                      writer.write(bytes);
                      pages.count(std::ssize(bytes));
                      progress.advance(std::ssize(bytes));
                    });
  }
  return writer.finish();
}

}  // namespace tessera

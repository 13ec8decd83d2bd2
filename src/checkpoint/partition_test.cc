#include <functional>
#include <map>

#include "checkpoint/checkpoint_testing.h"
#include "checkpoint/layout.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Cuts `rectangle` at random until pieces are small, so that they cover it exactly.
void random_partition(Random& random, const Rectangle& rectangle, std::vector<Rectangle>& pieces) {
  const int rank = rectangle.shape.rank();
  const int dim = rank == 0 ? 0 : static_cast<int>(random.next_below(static_cast<uint64_t>(rank)));
  if (rank == 0 || rectangle.shape[dim] < 2 || random.next_below(5) == 0) {
    pieces.push_back(rectangle);
    return;
  }
  const auto cut =
      1 + static_cast<int64_t>(random.next_below(static_cast<uint64_t>(rectangle.shape[dim] - 1)));
  Rectangle first = rectangle;
  Rectangle second = rectangle;
  first.shape[dim] = cut;
  second.offset[dim] += cut;
  second.shape[dim] -= cut;
  random_partition(random, first, pieces);
  random_partition(random, second, pieces);
}

/// The elements of a part of a dense I32 tensor, by index arithmetic alone.
std::vector<int32_t> plain_part(const Tensor& tensor, const Rectangle& part) {
  std::vector<int32_t> elements;
  const auto all = tensor.span<int32_t>();
  for (int64_t i = 0; i < part.shape.num_elements(); ++i) {
    int64_t rest = i;
    int64_t at = 0;
    int64_t stride = 1;
    for (int dim = part.shape.rank() - 1; dim >= 0; --dim) {
      at += (part.offset[dim] + rest % part.shape[dim]) * stride;
      rest /= part.shape[dim];
      stride *= tensor.shape[dim];
    }
    elements.push_back(all[at]);
  }
  return elements;
}

/// Writes a checkpoint of one tensor in pieces, spread over several files as several processes
/// would.
void write_in_pieces(const fs::path& path, const Tensor& tensor,
                     const std::vector<Rectangle>& pieces, Random& random) {
  Manifest manifest;
  TensorRecord record{TensorGroup::kModel, tensor.dtype, tensor.shape, {}};
  std::map<std::string, std::vector<NamedTensor>> files;
  std::vector<std::vector<int32_t>> storage;
  for (const Rectangle& piece : pieces) {
    const std::string file = fmt::format("model-{:05}.safetensors", random.next_below(3));
    const std::string key = fmt::format("w.{}", storage.size());
    storage.push_back(plain_part(tensor, piece));
    files[file].push_back({key, view(std::span(storage.back()), piece.shape)});
    record.pieces.push_back({file, key, piece});
  }
  make_folder(path);
  for (const auto& [file, tensors] : files) {
    const WrittenFile written = write_safetensors(path / file, tensors);
    manifest.files[file] = {written.num_bytes, written.checksum};
  }
  manifest.tensors["w"] = record;
  const std::string text = manifest_text(manifest);
  write_file_synced(path / "manifest.json", text);
  write_file_synced(path / "COMPLETE", complete_marker(text));
}

Shape random_shape(Random& random) {
  std::vector<int64_t> dims;
  for (uint64_t rank = random.next_below(5); rank > 0; --rank) {
    dims.push_back(static_cast<int64_t>(random.next_below(7)));
  }
  return Shape(dims);
}

TEST_F(CheckpointTest, LoadsAnyPartFromAnyPartition) {
  Random random(6, 0);
  for (int trial = 0; trial < 40; ++trial) {
    RandomTensors tensors(static_cast<uint64_t>(trial));
    tensors.add("w", DType::kI32, random_shape(random));
    const Tensor& tensor = tensors.named()[0].tensor;
    std::vector<Rectangle> pieces;
    random_partition(random, whole(tensor.shape), pieces);
    const fs::path path = root_ / fmt::format("partition-{}", trial);
    write_in_pieces(path, tensor, pieces, random);
    const CheckpointReader reader(path);
    const OwnedTensor all(DType::kI32, tensor.shape);
    reader.load_into("w", all);
    EXPECT_TRUE(same_bits(all, tensor));
    // Another partition, as another layout would read it.
    std::vector<Rectangle> wanted;
    random_partition(random, whole(tensor.shape), wanted);
    for (const Rectangle& part : wanted) {
      const OwnedTensor loaded(DType::kI32, part.shape);
      reader.load_part("w", part.offset, loaded);
      const auto found = loaded.get().span<int32_t>();
      EXPECT_EQ(std::vector<int32_t>(found.begin(), found.end()), plain_part(tensor, part));
    }
  }
}

}  // namespace
}  // namespace tessera

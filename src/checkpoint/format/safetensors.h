#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/dtype.h"
#include "core/file/file.h"
#include "core/file/hash.h"
#include "core/tensor.h"

namespace tessera {

// The safetensors format (github.com/huggingface/safetensors, "Format"): the length of the header
// as 64 bits, the header as JSON {name: {dtype, shape, data_offsets}}, then the elements of all
// tensors without gaps.

/// Where one tensor lies; `begin` and `end` count bytes from the start of the file.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t begin = 0;
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
};

/// Reads and validates the header of a whole file in memory: every entry lies within the file,
/// matches its shape and type, and together they cover the data exactly. `where` names the file in
/// messages. Throws UserError.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view where);

/// A safetensors file mapped for reading. All of it is validated on construction; the elements are
/// read on use.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  std::span<const std::byte> file_bytes() const { return file_.bytes(); }
  /// In the order of their bytes.
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// Null when there is no such tensor.
  const SafetensorsEntry* find(std::string_view name) const;
  /// Throws UserError, with the nearest name, when there is no such tensor.
  const SafetensorsEntry& entry(std::string_view name) const;
  /// The elements; they need not be aligned, so copy them out before use.
  std::span<const std::byte> bytes(const SafetensorsEntry& entry) const;
  /// Copies a tensor of equal shape and type. Throws UserError when they differ.
  void read(std::string_view name, const Tensor& out) const;

 private:
  MappedFile file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, size_t> index_;  // views of header_'s names
};

struct WrittenFile {
  int64_t num_bytes = 0;
  uint64_t checksum = 0;  // Hash64
};

/// Writes a file whose elements come in pieces. The data starts at a multiple of 64 bytes and wider
/// elements come first, so that each tensor is aligned to its element. Names must be distinct.
///   SafetensorsWriter writer(path, tensors);
///   for (const size_t index : writer.order()) writer.write(<elements of tensors[index]>);
///   const WrittenFile written = writer.finish();
class SafetensorsWriter {
 public:
  /// Of `tensors` only names, types and shapes are used.
  SafetensorsWriter(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                    const std::map<std::string, std::string>& metadata = {});

  /// The order in which the tensors' elements must be written.
  const std::vector<size_t>& order() const { return order_; }
  /// The next elements of the current tensor, or of it and those after it.
  void write(std::span<const std::byte> bytes);
  /// Waits until the file is on the disk. All elements must have been written.
  WrittenFile finish();

 private:
  OutputFile file_;
  Hash64 hash_;
  std::vector<size_t> order_;
  int64_t expected_bytes_ = 0;
};

/// Writes tensors to a new file and waits until it is on the disk, as SafetensorsWriter does.
WrittenFile write_safetensors(const std::filesystem::path& path,
                              std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace tessera

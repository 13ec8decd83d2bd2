#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "train/metrics/append_file.h"
#include "train/metrics/step_record.h"

namespace tessera {

/// CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected), as in RFC 3720.
uint32_t crc32c(std::string_view bytes);
/// The rotated and offset checksum that TFRecord files hold.
uint32_t masked_crc32c(std::string_view bytes);
/// One TFRecord: u64 length, u32 masked CRC of the length, bytes, u32 masked CRC of the bytes;
/// little-endian.
std::string tfrecord(std::string_view bytes);

/// A named number of an event.
struct Scalar {
  std::string tag;
  double value = 0.0;
};

/// Serialised protobuf messages of TensorFlow's event.proto.
std::string version_event(double wall_time);
std::string scalars_event(double wall_time, int64_t step, std::span<const Scalar> scalars);
/// Tells TensorBoard to forget what earlier files of the folder say about `step` and later ones.
std::string restart_event(double wall_time, int64_t step);

/// The scalars that TensorBoard shows for a step: losses, schedule, speed, memory, and per MoE
/// layer the busiest and the idlest expert relative to a perfect share.
std::vector<Scalar> step_scalars(const StepRecord& record);

/// An event file of its own in `folder`, readable while it grows.
class TensorBoardFile {
 public:
  /// What older files of the folder say about `first_step` and later ones becomes void.
  TensorBoardFile(const std::filesystem::path& folder, int64_t first_step);
  void write(const StepRecord& record);
  void write(const ValidationRecord& record);
  AppendFile& file() { return file_; }

 private:
  AppendFile file_;
};

}  // namespace tessera

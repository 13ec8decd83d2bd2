#include "train/metrics/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <numeric>

namespace tessera {
namespace {

// Field numbers of event.proto and summary.proto.
constexpr int kEventWallTime = 1;
constexpr int kEventStep = 2;
constexpr int kEventFileVersion = 3;
constexpr int kEventSummary = 5;
constexpr int kEventSessionLog = 7;
constexpr int kSummaryValue = 1;
constexpr int kValueTag = 1;
constexpr int kValueSimpleValue = 2;
constexpr int kSessionStatus = 1;
constexpr uint64_t kSessionStart = 1;

// Wire types of protobuf.
constexpr int kVarint = 0;
constexpr int kFixed64 = 1;
constexpr int kBytes = 2;
constexpr int kFixed32 = 5;

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82f63b78U : 0U);
    table[byte] = crc;
  }
  return table;
}

template <typename Word>
std::string little_endian(Word word) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(Word); ++i) bytes += static_cast<char>((word >> (8 * i)) & 0xffU);
  return bytes;
}

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80U; value >>= 7) bytes += static_cast<char>((value & 0x7fU) | 0x80U);
  return bytes + static_cast<char>(value);
}

std::string field_key(int number, int wire_type) {
  return varint(static_cast<uint64_t>(number << 3 | wire_type));
}

std::string varint_field(int number, uint64_t value) {
  return field_key(number, kVarint) + varint(value);
}

std::string double_field(int number, double value) {
  return field_key(number, kFixed64) + little_endian(std::bit_cast<uint64_t>(value));
}

std::string float_field(int number, float value) {
  return field_key(number, kFixed32) + little_endian(std::bit_cast<uint32_t>(value));
}

std::string bytes_field(int number, std::string_view bytes) {
  return field_key(number, kBytes) + varint(bytes.size()) + std::string(bytes);
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// TensorBoard reads the files of a folder in the order of their names, so a name must sort after
/// all older ones.
std::filesystem::path new_event_file(const std::filesystem::path& folder) {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host = {"localhost"};
  const auto microseconds = static_cast<int64_t>(wall_seconds() * 1e6);
  return folder / fmt::format("events.out.tfevents.{:010}.{}.{:06}.{}", microseconds / 1'000'000,
                              host.data(), microseconds % 1'000'000, getpid());
}

void add_load_scalars(const ExpertLoad& load, std::vector<Scalar>& scalars) {
  const auto& tokens = load.tokens_per_expert;
  const double total = std::accumulate(tokens.begin(), tokens.end(), 0.0);
  if (total <= 0.0) return;
  const auto [least, most] = std::minmax_element(tokens.begin(), tokens.end());
  const double perfect = total / static_cast<double>(tokens.size());
  scalars.push_back({fmt::format("experts/busiest/layer_{:02}", load.layer),
                     static_cast<double>(*most) / perfect});
  scalars.push_back({fmt::format("experts/idlest/layer_{:02}", load.layer),
                     static_cast<double>(*least) / perfect});
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = make_crc_table();
  uint32_t crc = ~0U;
  for (const char byte : bytes)
    crc = kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xffU] ^ (crc >> 8);
  return ~crc;
}

uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8U;
}

std::string tfrecord(std::string_view bytes) {
  const std::string length = little_endian(static_cast<uint64_t>(bytes.size()));
  return length + little_endian(masked_crc32c(length)) + std::string(bytes) +
         little_endian(masked_crc32c(bytes));
}

std::string version_event(double wall_time) {
  return double_field(kEventWallTime, wall_time) + bytes_field(kEventFileVersion, "brain.Event:2");
}

std::string scalars_event(double wall_time, int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    summary += bytes_field(kSummaryValue,
                           bytes_field(kValueTag, scalar.tag) +
                               float_field(kValueSimpleValue, static_cast<float>(scalar.value)));
  }
  return double_field(kEventWallTime, wall_time) +
         varint_field(kEventStep, static_cast<uint64_t>(step)) +
         bytes_field(kEventSummary, summary);
}

std::string restart_event(double wall_time, int64_t step) {
  return double_field(kEventWallTime, wall_time) +
         varint_field(kEventStep, static_cast<uint64_t>(step)) +
         bytes_field(kEventSessionLog, varint_field(kSessionStatus, kSessionStart));
}

std::vector<Scalar> step_scalars(const StepRecord& record) {
  std::vector<Scalar> scalars = {{"loss/train", record.loss},
                                 {"train/grad_norm", record.grad_norm},
                                 {"train/learning_rate", record.learning_rate},
                                 {"train/clip_factor", record.clip_factor},
                                 {"train/tokens_seen", static_cast<double>(record.tokens_seen)},
                                 {"train/skipped_steps", static_cast<double>(record.skipped_steps)},
                                 {"speed/tokens_per_second", record.tokens_per_second},
                                 {"speed/step_seconds", record.step_seconds},
                                 {"speed/tflops", record.tflops()},
                                 {"memory/used_bytes", static_cast<double>(record.memory_used)}};
  const auto add = [&](const char* tag, const std::optional<double>& value) {
    if (value) scalars.push_back({tag, *value});
  };
  add("loss/validation", record.validation_loss);
  add("loss/mtp", record.mtp_loss);
  add("train/max_logit", record.max_logit);
  add("train/loss_scale", record.loss_scale);
  if (record.clipped_heads)
    scalars.push_back({"train/clipped_heads", static_cast<double>(*record.clipped_heads)});
  if (record.repeated_steps)
    scalars.push_back({"train/repeated_steps", static_cast<double>(*record.repeated_steps)});
  add("experts/balance_loss", record.balance_loss);
  add("experts/z_loss", record.z_loss);
  add("speed/utilisation", record.utilisation);
  add("speed/host_seconds", record.host_seconds);
  add("train/saturated", record.saturated);
  if (record.memory_predicted > 0) {
    scalars.push_back({"memory/predicted_bytes", static_cast<double>(record.memory_predicted)});
  }
  if (record.balance_loss)
    scalars.push_back({"experts/dropped", static_cast<double>(record.dropped_tokens)});
  for (const NamedNumber& number : record.objective)
    scalars.push_back({fmt::format("objective/{}", number.name), number.value});
  for (const ExpertLoad& load : record.expert_load) add_load_scalars(load, scalars);
  return scalars;
}

TensorBoardFile::TensorBoardFile(const std::filesystem::path& folder, int64_t first_step)
    : file_(new_event_file(folder), AppendFile::Start::kEmpty) {
  file_.append(tfrecord(version_event(wall_seconds())));
  file_.append(tfrecord(restart_event(wall_seconds(), first_step)));
}

void TensorBoardFile::write(const StepRecord& record) {
  file_.append(tfrecord(scalars_event(wall_seconds(), record.step, step_scalars(record))));
}

void TensorBoardFile::write(const ValidationRecord& record) {
  const std::array scalars = {Scalar{"loss/validation", record.loss}};
  file_.append(tfrecord(scalars_event(wall_seconds(), record.step, scalars)));
}

}  // namespace tessera

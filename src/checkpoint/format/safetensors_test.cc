#include "checkpoint/format/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "checkpoint/testing.h"
#include "core/error.h"
#include "core/file/hash.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// A file image: the length of the header, the header, then zeros as data.
std::string image(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof(length));
  return file + header + std::string(data_bytes, '\0');
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "x.safetensors");
}

void expect_refused(const std::string& file, const std::string& message) {
  EXPECT_THAT([&] { parse(file); },
              ThrowsMessage<UserError>(AllOf(HasSubstr("x.safetensors"), HasSubstr(message))));
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

using SafetensorsFile = FolderTest;

TEST_F(SafetensorsFile, RoundTripIsBitwise) {
  RandomTensors tensors(1);
  tensors.add("u8", DType::kU8, {3});
  tensors.add("f32 \"quoted\"\n\u00e9", DType::kF32, {2, 3});
  tensors.add("scalar", DType::kF64, {});
  tensors.add("empty", DType::kI64, {0, 4});
  tensors.add("bf16", DType::kBF16, {1, 2, 3, 4, 5});
  tensors.add("u16", DType::kU16, {7});
  tensors.add("i32", DType::kI32, {1});
  const auto path = folder_ / "a.safetensors";
  const WrittenFile written = write_safetensors(path, tensors.named(), {{"made by", "a \"test\""}});
  const SafetensorsReader reader(path);
  EXPECT_EQ(written.num_bytes, static_cast<int64_t>(reader.file_bytes().size()));
  EXPECT_EQ(written.checksum, hash64(reader.file_bytes()));
  EXPECT_EQ(reader.entries().size(), tensors.named().size());
  EXPECT_EQ(reader.metadata().at("made by"), "a \"test\"");
  for (const auto& [name, tensor] : tensors.named()) {
    const OwnedTensor loaded(tensor.dtype, tensor.shape);
    reader.read(name, loaded);
    EXPECT_TRUE(same_bits(loaded, tensor)) << name;
    EXPECT_EQ(reader.entry(name).begin % dtype_size(tensor.dtype), 0) << name;
  }
  EXPECT_EQ(reader.entries().front().begin % 64, 0);
}

TEST_F(SafetensorsFile, WritesAFileWithoutTensors) {
  write_safetensors(folder_ / "a", {});
  EXPECT_TRUE(SafetensorsReader(folder_ / "a").entries().empty());
}

// Written by PyTorch; the sums come from NumPy.
TEST_F(SafetensorsFile, ReadsAFileOfTransformers) {
  const SafetensorsReader reader(TESSERA_TEST_DATA "/safetensors/llama.safetensors");
  EXPECT_EQ(reader.entries().size(), 21U);
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  const auto sum = [&](const char* name, const Shape& shape) {
    const OwnedTensor tensor(DType::kF32, shape);
    reader.read(name, tensor);
    double total = 0;
    for (const float value : tensor.get().span<float>()) total += value;
    return total;
  };
  EXPECT_NEAR(sum("lm_head.weight", {96, 32}), 14.998363361606607, 1e-12);
  EXPECT_NEAR(sum("model.layers.0.mlp.down_proj.weight", {32, 56}), 0.5336625836680469, 1e-12);
}

TEST_F(SafetensorsFile, ReadNamesWhatDiffers) {
  RandomTensors tensors(2);
  tensors.add("layer.weight", DType::kF32, {2, 3});
  write_safetensors(folder_ / "a", tensors.named());
  const SafetensorsReader reader(folder_ / "a");
  EXPECT_THAT(
      [&] {
        reader.read("layer.weight", OwnedTensor(DType::kF32, {3, 2}));
      },
      ThrowsMessage<UserError>(HasSubstr("'layer.weight' is f32 [2, 3], expected f32 [3, 2]")));
  EXPECT_THAT(
      [&] {
        reader.read("layer.weight", OwnedTensor(DType::kBF16, {2, 3}));
      },
      ThrowsMessage<UserError>(HasSubstr("expected bf16")));
  EXPECT_THAT([&] { reader.entry("layer.wieght"); },
              ThrowsMessage<UserError>(HasSubstr("did you mean 'layer.weight'")));
  EXPECT_EQ(reader.find("other"), nullptr);
}

TEST(SafetensorsHeader, AcceptsWhatTheFormatAllows) {
  EXPECT_TRUE(parse(image("{}", 0)).entries.empty());
  EXPECT_TRUE(parse(image("{}   ", 0)).entries.empty());
  EXPECT_EQ(parse(image("{" + entry("a", "F32", "[]", "[0,4]") + "}", 4)).entries.size(), 1U);
  // Offsets need not follow the order of the names, and empty tensors may lie between others.
  const std::string header = "{" + entry("b", "U8", "[2]", "[0,2]") + "," +
                             entry("a", "U8", "[1]", "[2,3]") + "," +
                             entry("z", "F32", "[0,5]", "[2,2]") + "}";
  const auto entries = parse(image(header, 3)).entries;
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(entries.front().name, "b");
  EXPECT_EQ(entries.back().name, "a");
}

TEST(SafetensorsHeader, RefusesADamagedFrame) {
  expect_refused("", "0 bytes are too few");
  expect_refused("1234567", "7 bytes are too few");
  expect_refused(std::string("\x10\0\0\0\0\0\0\0{}", 10), "claims 16 bytes but only 2");
  expect_refused(std::string(8, '\xff') + "{}", "claims 18446744073709551615 bytes");
  expect_refused(image("", 0), "not valid JSON");
  expect_refused(image("{} x", 0), "not valid JSON");
  expect_refused(image("{\"a\":1", 0), "not valid JSON");
  expect_refused(image("{\"\xff\":{}}", 0), "not valid JSON");
  expect_refused(image("[]", 0), "expected a JSON object, found array");
  expect_refused(image("{}", 1), "1 bytes after the last tensor belong to none");
}

TEST(SafetensorsHeader, RefusesALongHeader) {
  std::string header = "{";
  header.resize(100'000'001, ' ');
  expect_refused(image(header + "}", 0), "at most 100000000");
}

TEST(SafetensorsHeader, RefusesDeepAndDoubleJson) {
  expect_refused(image(std::string(1'000'000, '['), 0), "nests deeper than 3 levels");
  expect_refused(image("{\"a\":{\"shape\":[[0]]}}", 0), "nests deeper than 3 levels");
  expect_refused(
      image("{" + entry("a", "U8", "[0]", "[0,0]") + "," + entry("a", "U8", "[0]", "[0,0]") + "}",
            0),
      "names 'a' twice");
  expect_refused(image(R"({"a":{"dtype":"U8","dtype":"F32","shape":[0],"data_offsets":[0,0]}})", 0),
                 "names 'dtype' twice");
}

TEST(SafetensorsHeader, RefusesAWrongEntry) {
  const auto refuse = [](const std::string& header, const std::string& message) {
    expect_refused(image("{" + header + "}", 8), message);
  };
  refuse("\"a\":[]", "tensor 'a': expected a JSON object, found array");
  refuse(R"("a":{"shape":[2],"data_offsets":[0,8]})", "'dtype' is missing");
  refuse(R"("a":{"dtype":"F32","data_offsets":[0,8]})", "'shape' is missing");
  refuse(R"("a":{"dtype":"F32","shape":[2]})", "'data_offsets' is missing");
  refuse(R"("a":{"dtype":"F32","shape":[2],"offsets":[0,8]})", "unknown member 'offsets'");
  refuse(R"("a":{"dtype":4,"shape":[2],"data_offsets":[0,8]})", "dtype must be a string");
  refuse(entry("a", "F8_E5M2", "[8]", "[0,8]"),
         "dtype 'F8_E5M2' is not supported; expected F32, BF16");
  refuse(entry("a", "f32", "[2]", "[0,8]"), "dtype 'f32' is not supported");
  refuse(R"("__metadata__":[])", "__metadata__ must be an object");
  refuse(R"("__metadata__":{"a":1})", "'a' in __metadata__ must be a string");
}

TEST(SafetensorsHeader, RefusesAWrongShape) {
  const auto refuse = [](const std::string& shape, const std::string& message) {
    expect_refused(image("{" + entry("a", "F32", shape, "[0,8]") + "}", 8), message);
  };
  refuse("2", "shape must be a list");
  refuse("[-2]", "found -2");
  refuse("[2.0]", "found 2.0");
  refuse("[\"2\"]", "found string");
  refuse("[18446744073709551616]", "must be an integer");
  refuse("[9223372036854775808]", "must be an integer");
  refuse("[9223372036854775807]", "more elements than a tensor can hold");
  refuse("[4294967296,4294967296]", "more elements than a tensor can hold");
  refuse("[0,4294967296,4294967296]", "more elements than a tensor can hold");
  refuse("[1,1,1,1,1,2]", "at most 5 sizes, found 6");
}

TEST(SafetensorsHeader, RefusesWrongOffsets) {
  const auto refuse = [](const std::string& offsets, const std::string& message) {
    expect_refused(image("{" + entry("a", "F32", "[2]", offsets) + "}", 8), message);
  };
  refuse("[0]", "data_offsets must be two integers");
  refuse("[0,8,8]", "data_offsets must be two integers");
  refuse("[8,0]", "data_offsets [8, 0] leave the 8 bytes of data");
  refuse("[0,16]", "data_offsets [0, 16] leave the 8 bytes of data");
  refuse("[9223372036854775800,9223372036854775807]", "leave the 8 bytes");
  refuse("[0,4]", "span 4 bytes, its shape and type need 8");
  refuse("[-8,0]", "found -8");
}

TEST(SafetensorsHeader, RefusesOverlapsAndGaps) {
  const auto refuse = [](const std::string& a, const std::string& b, const std::string& message) {
    expect_refused(
        image("{" + entry("a", "U8", "[4]", a) + "," + entry("b", "U8", "[4]", b) + "}", 9),
        message);
  };
  refuse("[0,4]", "[2,6]", "tensor 'b' starts at byte 2 of the data, overlapping");
  refuse("[0,4]", "[0,4]", "overlapping");
  refuse("[0,4]", "[5,9]", "leaving a gap");
  refuse("[1,5]", "[5,9]", "tensor 'a' starts at byte 1 of the data, leaving a gap");
  refuse("[0,4]", "[4,8]", "1 bytes after the last tensor");
}

TEST(SafetensorsHeader, HostileNamesAreShownSafely) {
  const std::string name(100'000, 'n');
  try {
    parse(image("{\"" + name + "\\u0007\":[]}", 0));
    FAIL() << "accepted";
  } catch (const UserError& error) {
    EXPECT_LT(std::strlen(error.what()), 400U);
  }
  expect_refused(image("{\"\\u001b[2J\":[]}", 0), "'\\x1b[2J'");
}

TEST_F(SafetensorsFile, RefusesTruncationAtEveryByte) {
  RandomTensors tensors(3);
  tensors.add("a", DType::kF32, {3, 2});
  tensors.add("b", DType::kU8, {5});
  write_safetensors(folder_ / "a", tensors.named());
  const std::string file = read_text_file(folder_ / "a");
  for (size_t length = 0; length < file.size(); ++length) {
    EXPECT_THROW(parse(file.substr(0, length)), UserError) << length;
  }
  EXPECT_THROW(parse(file + '\0'), UserError);
  EXPECT_EQ(parse(file).entries.size(), 2U);
}

// Any single changed byte of the header is refused or gives tensors that still lie within the file.
TEST_F(SafetensorsFile, ChangedBytesNeverLeaveTheFile) {
  RandomTensors tensors(4);
  tensors.add("a", DType::kF32, {3, 2});
  tensors.add("b", DType::kU8, {5});
  write_safetensors(folder_ / "a", tensors.named());
  const std::string file = read_text_file(folder_ / "a");
  const size_t header_bytes = SafetensorsReader(folder_ / "a").entry("a").begin;
  for (size_t i = 0; i < header_bytes; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = file;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      try {
        for (const auto& found : parse(changed).entries) {
          EXPECT_LE(found.begin, found.end);
          EXPECT_LE(found.end, static_cast<int64_t>(changed.size()));
          EXPECT_EQ(found.end - found.begin, found.shape.num_elements() * dtype_size(found.dtype));
        }
      } catch (const UserError&) {
      }
    }
  }
}

}  // namespace
}  // namespace tessera

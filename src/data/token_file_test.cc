#include "data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>

#include "core/error.h"
#include "core/random.h"
#include "data/token_file_writer.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string bytes_of_hex(std::string_view hex) {
  std::string bytes;
  std::string digits;
  for (const char c : hex) {
    if (std::isxdigit(static_cast<unsigned char>(c)) == 0) continue;
    digits += c;
    if (digits.size() < 2) continue;
    bytes += static_cast<char>(std::stoi(digits, nullptr, 16));
    digits.clear();
  }
  return bytes;
}

/// What Megatron's IndexedDatasetBuilder writes for the u16 documents [1, 2], [] and [256].
constexpr std::string_view kBinHex = "0100 0200 0001";
constexpr std::string_view kIdxHex =
    "4d4d494449445800 00"                                 // magic
    "0100000000000000"                                    // version
    "08"                                                  // u16
    "0300000000000000"                                    // sequences
    "0400000000000000"                                    // document indices
    "02000000 00000000 01000000"                          // lengths
    "0000000000000000 0400000000000000 0400000000000000"  // pointers
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000";

class TokenFileTest : public ::testing::Test {
 protected:
  TokenFileTest() {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / unique_name("token_file_test-");
    fs::create_directories(folder_);
    prefix = (folder_ / info->name()).string();
  }
  ~TokenFileTest() override { fs::remove_all(folder_); }

  static void write_file(const fs::path& path, std::string_view bytes) {
    OutputFile file(path);
    file.write(bytes);
    file.close();
  }
  void write(const std::string& bin, const std::string& idx) const {
    write_file(token_bin_path(prefix), bin);
    write_file(token_idx_path(prefix), idx);
  }
  void write_fixture() const { write(bytes_of_hex(kBinHex), bytes_of_hex(kIdxHex)); }

  /// The message of the UserError that an index of these bytes gives, or "".
  std::string error_of(const std::string& bin, const std::string& idx) const {
    try {
      parse_token_index(std::as_bytes(std::span(idx)), static_cast<int64_t>(bin.size()),
                        token_idx_path(prefix).string());
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  std::string prefix;

 private:
  fs::path folder_;
};

std::vector<int32_t> read_all(const TokenFile& file) {
  std::vector<int32_t> ids(file.num_tokens());
  file.read(0, ids);
  return ids;
}

TEST_F(TokenFileTest, ReadsMegatronsBytes) {
  write_fixture();
  for (const std::string& path : {prefix, prefix + ".bin", prefix + ".idx"}) {
    const TokenFile file(path, 257);
    EXPECT_EQ(file.dtype(), DType::kU16);
    EXPECT_EQ(file.num_documents(), 3);
    EXPECT_EQ(file.num_sequences(), 3);
    EXPECT_THAT(read_all(file), ElementsAre(1, 2, 256));
    EXPECT_THAT(file.document_offsets(), ElementsAre(0, 2, 2, 3));
    EXPECT_EQ(file.document_at(0), 0);
    EXPECT_EQ(file.document_at(1), 0);
    EXPECT_EQ(file.document_at(2), 2);
  }
}

TEST_F(TokenFileTest, WritesMegatronsBytes) {
  TokenFileWriter writer(prefix, 257);
  writer.append(std::vector<int32_t>{1});
  writer.append(std::vector<int32_t>{2});
  writer.end_document();
  writer.end_document();
  writer.append(std::vector<int32_t>{256});
  writer.end_document();
  writer.finish();
  EXPECT_EQ(read_text_file(token_bin_path(prefix)), bytes_of_hex(kBinHex));
  EXPECT_EQ(read_text_file(token_idx_path(prefix)), bytes_of_hex(kIdxHex));
  EXPECT_EQ(names().size(), 2);
}

TEST_F(TokenFileTest, RoundTripsRandomDocuments) {
  for (const int64_t vocab : {2, 257, 65'499, 65'500, 200'000}) {
    Random random(7, static_cast<uint64_t>(vocab));
    std::vector<int32_t> ids;
    std::vector<int64_t> offsets = {0};
    TokenFileWriter writer(prefix, vocab);
    for (int document = 0; document < 50; ++document) {
      const auto length = random.next_below(document == 20 ? 900'000 : 40);
      std::vector<int32_t> text(length);
      for (int32_t& id : text) id = static_cast<int32_t>(random.next_below(vocab));
      writer.append(text);
      writer.end_document();
      ids.insert(ids.end(), text.begin(), text.end());
      offsets.push_back(static_cast<int64_t>(ids.size()));
    }
    writer.finish();
    const TokenFile file(prefix, vocab);
    EXPECT_EQ(file.dtype(), vocab < 65'500 ? DType::kU16 : DType::kI32);
    EXPECT_EQ(read_all(file), ids);
    EXPECT_THAT(file.document_offsets(), ::testing::ElementsAreArray(offsets));
    std::vector<int32_t> part(5);
    file.read(11, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), ids.begin() + 11));
  }
}

TEST_F(TokenFileTest, ReadsEveryTypeOfId) {
  const auto check = [this](uint8_t code, auto zero, DType dtype) {
    const std::vector<decltype(zero)> ids = {3, 200, 7};
    std::string idx = bytes_of_hex(kIdxHex);
    idx[17] = static_cast<char>(code);
    const int64_t pointer = 2 * static_cast<int64_t>(sizeof(zero));
    std::memcpy(idx.data() + 54, &pointer, 8);
    std::memcpy(idx.data() + 62, &pointer, 8);
    write({reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(zero)}, idx);
    const TokenFile file(prefix, 257);
    EXPECT_EQ(file.dtype(), dtype);
    EXPECT_THAT(read_all(file), ElementsAre(3, 200, 7));
  };
  check(1, uint8_t{}, DType::kU8);
  check(4, int32_t{}, DType::kI32);
  check(5, int64_t{}, DType::kI64);
  check(8, uint16_t{}, DType::kU16);
}

TEST_F(TokenFileTest, ReadsPastModes) {
  write(bytes_of_hex(kBinHex), bytes_of_hex(kIdxHex) + std::string(3, '\1'));
  EXPECT_THAT(read_all(TokenFile(prefix, 257)), ElementsAre(1, 2, 256));
}

TEST_F(TokenFileTest, ModesSayWhichTokensCarryLoss) {
  const std::string bin = bytes_of_hex(kBinHex);
  const std::string idx = bytes_of_hex(kIdxHex);
  const auto silent = [&](const std::string& modes) {
    write(bin, idx + modes);
    const TokenFile file(prefix, 257);
    return std::vector<TokenRange>(file.silent_ranges().begin(), file.silent_ranges().end());
  };
  EXPECT_THAT(silent(""), ElementsAre());
  EXPECT_THAT(silent(std::string(3, '\0')), ElementsAre());
  EXPECT_THAT(silent({'\1', '\0', '\0'}), ElementsAre(TokenRange{0, 2}));
  EXPECT_THAT(silent({'\0', '\1', '\0'}), ElementsAre());
  EXPECT_THAT(silent({'\0', '\0', '\1'}), ElementsAre(TokenRange{2, 3}));
  EXPECT_THAT(silent(std::string(3, '\1')), ElementsAre(TokenRange{0, 3}));
  EXPECT_THAT(error_of(bin, idx + std::string({'\0', '\2', '\0'})),
              HasSubstr("sequence 1 has mode 2"));
  EXPECT_THAT(error_of(bin, idx + std::string({'\0', '\0', '\xFF'})), HasSubstr("mode -1"));
}

/// Writes documents of random parts, with discarded ones between, and compares with what was meant.
TEST_F(TokenFileTest, RoundTripsPartsWithAndWithoutLoss) {
  for (int round = 0; round < 20; ++round) {
    Random random(8, static_cast<uint64_t>(round));
    const int64_t vocab = round % 2 == 0 ? 257 : 70'000;
    TokenFileWriter writer(
        {.prefix = prefix,
         .vocab_size = vocab,
         .with_modes = true,
         .max_sequence_tokens = 1 + static_cast<int64_t>(random.next_below(50))});
    std::vector<int32_t> ids;
    std::vector<bool> has_loss;
    std::vector<int64_t> offsets = {0};
    for (int document = 0; document < 60; ++document) {
      const bool discarded = random.next_below(3) == 0;
      for (uint64_t part = random.next_below(4); part > 0; --part) {
        std::vector<int32_t> text(random.next_below(document == 30 ? 400'000 : 40));
        for (int32_t& id : text) id = static_cast<int32_t>(random.next_below(vocab));
        const bool loss = random.next_below(2) == 0;
        writer.append(text, loss);
        if (discarded) continue;
        ids.insert(ids.end(), text.begin(), text.end());
        has_loss.insert(has_loss.end(), text.size(), loss);
      }
      if (discarded) {
        writer.discard_document();
      } else {
        writer.end_document();
        offsets.push_back(static_cast<int64_t>(ids.size()));
      }
    }
    writer.finish();
    const TokenFile file(prefix, vocab);
    EXPECT_EQ(read_all(file), ids);
    EXPECT_THAT(file.document_offsets(), ::testing::ElementsAreArray(offsets));
    std::vector<bool> found(ids.size(), true);
    for (const TokenRange& range : file.silent_ranges()) {
      ASSERT_LT(range.begin, range.end);
      std::fill(found.begin() + range.begin, found.begin() + range.end, false);
    }
    EXPECT_EQ(found, has_loss);
  }
}

TEST_F(TokenFileTest, FingerprintsTellTokensAndDocumentsApart) {
  const auto fingerprint = [&](const std::vector<std::vector<int32_t>>& documents) {
    TokenFileWriter writer(prefix, 1000);
    for (const auto& document : documents) {
      writer.append(document);
      writer.end_document();
    }
    writer.finish();
    return TokenFile(prefix, 1000).fingerprint();
  };
  const uint64_t first = fingerprint({{1, 2, 3}, {4}});
  EXPECT_EQ(fingerprint({{1, 2, 3}, {4}}), first);
  EXPECT_NE(fingerprint({{1, 2, 4}, {4}}), first) << "another token";
  EXPECT_NE(fingerprint({{1, 2}, {3, 4}}), first) << "another border";
}

TEST_F(TokenFileTest, LongDocumentsBecomeSeveralSequences) {
  TokenFileWriter writer({.prefix = prefix, .vocab_size = 257, .max_sequence_tokens = 4});
  writer.append(std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9});
  writer.end_document();
  writer.append(std::vector<int32_t>{1, 2, 3, 4});
  writer.end_document();
  writer.finish();
  const TokenFile file(prefix, 257);
  EXPECT_EQ(file.num_sequences(), 4);
  EXPECT_THAT(file.document_offsets(), ElementsAre(0, 9, 13));
}

/// Stops a writer at a random moment, also in the middle of a document, and goes on with another.
TEST_F(TokenFileTest, AnotherWriterGoesOnAfterASync) {
  const TokenFileOptions options = {
      .prefix = prefix, .vocab_size = 257, .with_modes = true, .max_sequence_tokens = 7};
  for (int round = 0; round < 20; ++round) {
    const auto write_from = [&](TokenFileWriter& writer, int first, int last) {
      for (int i = first; i < last; ++i) {
        Random random(9, static_cast<uint64_t>(i));
        writer.append(std::vector<int32_t>(random.next_below(20), i % 257),
                      random.next_below(3) > 0);
        if (random.next_below(3) == 0) writer.end_document();
        if (random.next_below(9) > 0) continue;
        writer.end_document();
        writer.append(std::vector<int32_t>(random.next_below(20), 9));
        writer.discard_document();
      }
    };
    const auto finish = [](TokenFileWriter& writer) {
      writer.end_document();
      writer.finish();
    };
    TokenFileWriter whole(options);
    write_from(whole, 0, 300);
    finish(whole);
    const std::string bin = read_text_file(token_bin_path(prefix));
    const std::string idx = read_text_file(token_idx_path(prefix));

    const auto folder = std::make_shared<PartialFolder>(prefix);
    TokenCounts counts;
    {
      TokenFileWriter first(folder, options, std::nullopt);
      write_from(first, 0, 15 * round);
      first.sync();
      counts = first.counts();
      write_from(first, 15 * round, 15 * round + 5);
      first.sync();
    }
    TokenFileWriter second(folder, options, counts);
    write_from(second, 15 * round, 300);
    finish(second);
    EXPECT_TRUE(read_text_file(token_bin_path(prefix)) == bin) << round;
    EXPECT_TRUE(read_text_file(token_idx_path(prefix)) == idx) << round;
  }
}

TEST_F(TokenFileTest, OneWriterAtATime) {
  const TokenFileWriter writer(prefix, 257);
  EXPECT_THROW(TokenFileWriter(prefix, 257), UserError);
}

TEST_F(TokenFileTest, RefusesTruncationAnywhere) {
  const std::string bin = bytes_of_hex(kBinHex);
  const std::string idx = bytes_of_hex(kIdxHex);
  ASSERT_EQ(error_of(bin, idx), "");
  for (size_t size = 0; size < idx.size(); ++size) {
    EXPECT_THAT(error_of(bin, idx.substr(0, size)), HasSubstr(prefix)) << size;
  }
  for (size_t size = 0; size < bin.size(); ++size) {
    EXPECT_THAT(error_of(bin.substr(0, size), idx), HasSubstr(prefix)) << size;
  }
  EXPECT_THAT(error_of(bin + "x", idx), HasSubstr("sequences take 6 bytes; the .bin file has 7"));
  EXPECT_THAT(error_of(bin, idx + "x"), HasSubstr("bytes long"));
}

/// Every byte of the index matters: flipping bits in any of them is refused, except for the values
/// that mean the same.
TEST_F(TokenFileTest, RefusesEveryCorruptByte) {
  const std::string bin = bytes_of_hex(kBinHex);
  const std::string idx = bytes_of_hex(kIdxHex);
  for (size_t at = 0; at < idx.size(); ++at) {
    for (const int flip : {0xFF, 0x80, 0x7F}) {
      std::string corrupt = idx;
      corrupt[at] = static_cast<char>(corrupt[at] ^ flip);
      EXPECT_THAT(error_of(bin, corrupt), HasSubstr(prefix)) << "byte " << at << " ^ " << flip;
    }
  }
}

TEST_F(TokenFileTest, RefusesHostileNumbers) {
  const std::string bin = bytes_of_hex(kBinHex);
  struct Case {
    size_t offset;
    size_t width;
    uint64_t value;
    std::string message;
  };
  constexpr uint64_t kHuge = uint64_t{1} << 63;
  const std::vector<Case> cases = {
      {9, 8, 2, "version is 2; expected 1"},
      {17, 1, 6, "id type is code 6"},
      {18, 8, kHuge, "number of sequences is 9223372036854775808, but a file of 102 bytes"},
      {18, 8, UINT64_MAX / 12 + 2, "number of sequences"},
      {18, 8, 2, "bytes long; its 2 sequences and 4 document indices"},
      {26, 8, kHuge, "number of document indices is 9223372036854775808"},
      {26, 8, (kHuge >> 2) + 4, "number of document indices"},
      {26, 8, 0, "number of document indices is 0"},
      {34, 4, 0xFFFFFFFF, "sequence 0 has length -1"},
      {34, 4, 0x7FFFFFFF, "sequence 0 has length 2147483647; the .bin file has room for 3"},
      {34, 4, 1, "sequence 1 begins at byte 4; expected 2"},
      {42, 4, 0, "its sequences take 4 bytes; the .bin file has 6"},
      {46, 8, kHuge, "sequence 0 begins at byte -9223372036854775808; expected 0"},
      {62, 8, 2, "sequence 2 begins at byte 2; expected 4"},
      {70, 8, 1, "document index 0 is 1; expected 0 to 0"},
      {78, 8, kHuge, "document index 1 is -9223372036854775808"},
      {86, 8, 0, "document index 2 is 0; expected 1 to 3"},
      {86, 8, 4, "document index 2 is 4; expected 1 to 3"},
      {94, 8, 2, "the last document index is 2; expected 3"},
  };
  for (const Case& hostile : cases) {
    std::string idx = bytes_of_hex(kIdxHex);
    std::memcpy(idx.data() + hostile.offset, &hostile.value, hostile.width);
    EXPECT_THAT(error_of(bin, idx), HasSubstr(hostile.message));
    EXPECT_THAT(error_of(bin, idx), HasSubstr(token_idx_path(prefix).string()));
  }
}

TEST_F(TokenFileTest, RefusesIdsOutsideTheVocabulary) {
  write_fixture();
  const TokenFile file(prefix, 256);
  std::vector<int32_t> ids(2);
  file.read(0, ids);
  try {
    file.read(1, ids);
    FAIL() << "an id of 256 was read";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr(".bin: token 2 is 256"));
  }
}

TEST_F(TokenFileTest, RefusesMissingFilesAndWrongRanges) {
  EXPECT_THROW(TokenFile(prefix, 257), UserError);
  write_fixture();
  const TokenFile file(prefix, 257);
  std::vector<int32_t> ids(2);
  EXPECT_THROW(file.read(2, ids), InternalError);
  EXPECT_THROW(file.read(-1, ids), InternalError);
  EXPECT_THROW(file.read(std::numeric_limits<int64_t>::max(), ids), InternalError);
  fs::remove(token_bin_path(prefix));
  EXPECT_THROW(TokenFile(prefix, 257), UserError);
}

TEST_F(TokenFileTest, AnUnfinishedWriteLeavesTheOldFile) {
  write_fixture();
  {
    TokenFileWriter writer(prefix, 257);
    writer.append(std::vector<int32_t>{9});
    writer.end_document();
  }
  EXPECT_EQ(names().size(), 2);
  EXPECT_THAT(read_all(TokenFile(prefix, 257)), ElementsAre(1, 2, 256));
}

TEST_F(TokenFileTest, WriterRefusesWhatNobodyCouldRead) {
  TokenFileWriter writer(prefix, 257);
  EXPECT_THROW(writer.append(std::vector<int32_t>{257}), InternalError);
  EXPECT_THROW(writer.append(std::vector<int32_t>{-1}), InternalError);
  writer.append(std::vector<int32_t>{1});
  EXPECT_THROW(writer.finish(), InternalError);
}

/// Limits the size of files, as a full disk would, until destroyed.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t num_bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit = {num_bytes, old_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int);
};

TEST_F(TokenFileTest, AFailedWriteLeavesTheOldFile) {
  write_fixture();
  for (const rlim_t limit : {0, 70, 1 << 16}) {
    TokenFileWriter writer(prefix, 257);
    const FileSizeLimit full(limit);
    const auto write_much = [&writer, limit] {
      for (rlim_t i = 0; i <= limit; ++i) {
        writer.append(std::vector<int32_t>{1});
        writer.end_document();
      }
      writer.finish();
    };
    EXPECT_THROW(write_much(), UserError) << limit;
  }
  EXPECT_EQ(names().size(), 2);
  EXPECT_THAT(read_all(TokenFile(prefix, 257)), ElementsAre(1, 2, 256));
}

}  // namespace
}  // namespace tessera

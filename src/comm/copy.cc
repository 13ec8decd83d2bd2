#include "comm/copy.h"

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace tessera {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;
constexpr int64_t kManyBytes = int64_t{4} << 20;
constexpr int64_t kSliceBytes = int64_t{1} << 20;  // what is worth a thread

bool overlap(const std::byte* a, const std::byte* b, int64_t bytes) {
  return a < b + bytes && b < a + bytes;
}

// Whole lines; `to` begins one.
void stream_lines(const std::byte* from, std::byte* to, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i, from += kLine, to += kLine) {
    const auto* source = reinterpret_cast<const __m256i*>(from);
    const __m256i first = _mm256_loadu_si256(source);
    const __m256i second = _mm256_loadu_si256(source + 1);
    auto* target = reinterpret_cast<__m256i*>(to);
    _mm256_stream_si256(target, first);
    _mm256_stream_si256(target + 1, second);
  }
  _mm_sfence();  // before anybody is told that the bytes are there
}

void stream_bytes(const std::byte* source, std::byte* target, int64_t bytes) {
  const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(target) % kLine);
  const int64_t before = std::min(bytes, past_line == 0 ? 0 : kLine - past_line);
  const int64_t lines = (bytes - before) / kLine;
  const int64_t streamed = before + lines * kLine;
  if (before > 0) std::memcpy(target, source, before);
  stream_lines(source + before, target + before, lines);
  if (bytes > streamed) std::memcpy(target + streamed, source + streamed, bytes - streamed);
}

}  // namespace

void copy_bytes(const void* from, void* to, int64_t bytes) {
  if (bytes <= 0 || from == to) return;
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  if (bytes < kManyBytes || overlap(source, target, bytes)) {
    std::memmove(target, source, bytes);
    return;
  }
  const int64_t slices = num_copy_slices(bytes);
#pragma omp parallel for schedule(static) if (slices > 1)
  for (int64_t i = 0; i < slices; ++i) {
    const int64_t begin = copy_slice_begin(bytes, slices, i);
    stream_bytes(source + begin, target + begin, copy_slice_begin(bytes, slices, i + 1) - begin);
  }
}

int64_t num_copy_slices(int64_t bytes) {
  return std::clamp<int64_t>(bytes / kSliceBytes, 1, omp_get_max_threads());
}

int64_t copy_slice_begin(int64_t bytes, int64_t num_slices, int64_t slice) {
  return slice == num_slices ? bytes : bytes / num_slices * slice / kPage * kPage;
}

}  // namespace tessera

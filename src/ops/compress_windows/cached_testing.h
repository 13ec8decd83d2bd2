#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/compress_windows/compress_cached.h"
#include "ops/paged_attention/pages.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

/// Sequences whose tokens are compressed in passes, some of each at a time, and what comes of them
/// packed.
struct CachedCompression {
  CompressSpec spec;
  std::vector<int64_t> lengths;
  int64_t size;
  DType dtype;
  OwnedTensor kv, gate, bias;

  CachedCompression(const CompressSpec& windows, const std::vector<int64_t>& sequences,
                    int64_t entry_size, DType type)
      : spec(windows), lengths(sequences), size(entry_size), dtype(type) {
    Random random(8, 3);
    int64_t tokens = 0;
    for (const int64_t length : lengths) tokens += length;
    const int64_t width = spec.parts() * size;
    kv = random_tensor(dtype, {tokens, width}, random);
    gate = random_tensor(dtype, {tokens, width}, random);
    bias = random_tensor(DType::kF32, {spec.rate, width}, random);
  }

  int64_t begin_of(size_t sequence) const {
    int64_t begin = 0;
    for (size_t s = 0; s < sequence; ++s) begin += lengths[s];
    return begin;
  }
  int64_t num_entries() const {
    int64_t count = 0;
    for (const int64_t length : lengths) count += length / spec.rate;
    return count;
  }

  /// Entries of all sequences one after another, by the operator over packed ones.
  std::vector<double> packed(const Backend& cpu) const {
    std::vector<int32_t> positions;
    for (const int64_t length : lengths) {
      for (int32_t i = 0; i < length; ++i) positions.push_back(i);
    }
    const int64_t tokens = std::ssize(positions);
    const OwnedTensor places = tensor_of_i32({tokens}, positions);
    const int64_t rows = num_entry_rows(tokens, spec.rate);
    const OwnedTensor entries(dtype, {rows, size});
    const OwnedTensor windows(DType::kI32, {rows});
    run_kernel(CompressWindows(spec), cpu, std::vector<Tensor>{kv, gate, bias, places},
               std::vector<Tensor>{entries, windows});
    const auto all = to_doubles(entries);
    std::vector<double> result;
    for (size_t s = 0; s < lengths.size(); ++s) {
      const auto first = all.begin() + begin_of(s) / spec.rate * size;
      result.insert(result.end(), first, first + lengths[s] / spec.rate * size);
    }
    return result;
  }

  /// The same in passes of this seed over a state; a sequence alone where `kept` is kCached.
  std::vector<double> in_passes(const Backend& backend, KeptRows kept, uint64_t seed) const;
};

/// One pass: next tokens of some sequences.
struct CompressionPass {
  std::vector<int64_t> tokens;  ///< of the packed sequences
  std::vector<int32_t> positions, bounds = {0}, pages, slots;
  std::vector<std::pair<size_t, int64_t>> places;  ///< sequence and position of each token
};

inline OwnedTensor rows_of_pass(const Tensor& all, const std::vector<int64_t>& tokens,
                                int64_t count) {
  OwnedTensor rows(all.dtype, {count, all.shape[1]});
  if (count > 0) std::memset(rows.get().data, 0xFF, rows.get().num_bytes());
  const int64_t bytes = all.shape[1] * dtype_size(all.dtype);
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::memcpy(static_cast<std::byte*>(rows.get().data) + static_cast<int64_t>(i) * bytes,
                static_cast<const std::byte*>(all.data) + tokens[i] * bytes, bytes);
  }
  return rows;
}

inline std::vector<double> CachedCompression::in_passes(const Backend& backend, KeptRows kept,
                                                        uint64_t seed) const {
  const bool paged = kept == KeptRows::kPaged;
  constexpr int64_t kFirstEntry = 1000;
  const auto num = std::ssize(lengths);
  const CompressWindowsCached op({.windows = spec,
                                  .kept = kept,
                                  .num_slots = paged ? num + 1 : 1,
                                  .first_entry = kFirstEntry});
  const int64_t width = spec.parts() * size;
  OwnedTensor nothing(dtype, {op.spec().num_slots * 2 * spec.rate, 2 * width});
  std::memset(nothing.get().data, 0xFF, nothing.get().num_bytes());
  const OwnedTensor state = copy_to(backend, nothing);
  std::vector<int64_t> done(lengths.size());
  std::vector<std::vector<double>> found(lengths.size());
  Random random(seed, 1);
  while (!std::ranges::equal(done, lengths)) {
    CompressionPass pass;
    for (size_t s = 0; s < lengths.size(); ++s) {
      const int64_t left = lengths[s] - done[s];
      const auto count = std::min<int64_t>(left, static_cast<int64_t>(random.next_below(9)));
      for (int64_t i = 0; i < count; ++i, ++done[s]) {
        pass.tokens.push_back(begin_of(s) + done[s]);
        pass.positions.push_back(static_cast<int32_t>(done[s]));
        pass.places.emplace_back(s, done[s]);
      }
      pass.bounds.push_back(static_cast<int32_t>(pass.tokens.size()));
      pass.pages.push_back(static_cast<int32_t>(num - static_cast<int64_t>(s)));
      pass.slots.push_back(static_cast<int32_t>(num - static_cast<int64_t>(s)));
    }
    const int64_t count = std::ssize(pass.tokens) + (paged ? 2 : 0);  // rows of no sequence
    pass.positions.resize(count);
    std::vector<OwnedTensor> given;
    given.push_back(copy_to(backend, rows_of_pass(kv, pass.tokens, count)));
    given.push_back(copy_to(backend, rows_of_pass(gate, pass.tokens, count)));
    given.push_back(copy_to(backend, bias));
    const auto give = [&](const Shape& shape, const std::vector<int32_t>& values) {
      given.push_back(copy_to(backend, tensor_of_i32(shape, values)));
    };
    give({count}, pass.positions);
    if (paged) {
      give({num + 1}, pass.bounds);
      give({num, 1}, pass.pages);
      give({num}, pass.slots);
    }
    const OwnedTensor entries(dtype, {count, size}, "entries", backend.device());
    const OwnedTensor windows(DType::kI32, {count}, "windows", backend.device());
    const OwnedTensor rows(DType::kI32, {count}, "rows", backend.device());
    run_kernel(op, backend, std::vector<Tensor>(given.begin(), given.end()),
               std::vector<Tensor>{entries, windows, rows, state});
    const auto values = to_doubles(copy_to_host(backend, entries));
    const OwnedTensor host_rows = copy_to_host(backend, rows);
    const OwnedTensor host_windows = copy_to_host(backend, windows);
    for (int64_t i = 0; i < count; ++i) {
      const bool is_token = i < std::ssize(pass.places);
      const auto [s, position] = is_token ? pass.places[i] : std::pair<size_t, int64_t>{0, 0};
      const int64_t entry = position / spec.rate;
      const bool ends = is_token && position % spec.rate == spec.rate - 1;
      const int64_t base = paged ? pass.pages[s] * kPageTokens : 0;
      EXPECT_EQ(host_rows.get().as<int32_t>()[i], ends ? kFirstEntry + base + entry : -1);
      EXPECT_EQ(host_windows.get().as<int32_t>()[i], ends ? entry * spec.rate : 0);
      const auto row = values.begin() + i * size;
      if (ends) {
        found[s].insert(found[s].end(), row, row + size);
      } else {
        EXPECT_TRUE(std::all_of(row, row + size, [](double x) { return x == 0; }));
      }
    }
  }
  std::vector<double> all;
  for (const auto& own : found) all.insert(all.end(), own.begin(), own.end());
  return all;
}

}  // namespace tessera::testing

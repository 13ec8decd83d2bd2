#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ops/page_stash/page_stash.h"
#include "ops/testing/gpu_kernel.h"
#include "runtime/executable.h"

/// A program that stashes values and reloads them elsewhere, for tests on several back ends.
namespace tessera::testing {

/// What it left.
struct StashResult {
  std::vector<OwnedTensor> values;
  OwnedTensor free, state;
};

/// `values` at their bounds, of which the first `rows` came. Runs twice, so that a device that
/// records repeats it.
inline StashResult stash_and_reload(const Backend& backend, const PagePool& pool,
                                    const std::vector<OwnedTensor>& values,
                                    const std::vector<int64_t>& rows) {
  Program program("stash");
  std::vector<OwnedTensor> memory;
  std::vector<std::pair<ValueId, size_t>> bound;
  const auto bind = [&](ValueId id, const Tensor& host) {
    memory.push_back(copy_to(backend, host));
    bound.emplace_back(id, memory.size() - 1);
    return id;
  };
  const auto accumulator = [&](const std::string& name, DType dtype, const Shape& shape) {
    return program.add_accumulator(name, {dtype, shape});
  };
  OwnedTensor free(DType::kI32, {pool.num_pages});
  std::iota(free.get().span<int32_t>().begin(), free.get().span<int32_t>().end(), 0);
  OwnedTensor state(DType::kI64, {kPoolStates});
  state.get().span<int64_t>()[kFreePages] = pool.num_pages;
  const int64_t pool_bytes = pool.num_pages * pool.page_bytes;
  const ValueId pages_id =
      bind(accumulator("pages", DType::kU8, {pool_bytes}), OwnedTensor(DType::kU8, {pool_bytes}));
  const ValueId free_id = bind(accumulator("free", DType::kI32, {pool.num_pages}), free);
  const ValueId state_id = bind(accumulator("state", DType::kI64, {kPoolStates}), state);
  std::vector<ValueId> rows_ids, tables, outputs;
  std::vector<size_t> reloaded;
  for (size_t i = 0; i < values.size(); ++i) {
    OwnedTensor count(DType::kI64, {1});
    *count.get().as<int64_t>() = rows[i];
    rows_ids.push_back(
        bind(program.add_input(fmt::format("rows{}", i), {DType::kI64, {1}}), count));
    const ValueType type{values[i].get().dtype, values[i].get().shape, 0, rows_ids.back()};
    const ValueId value = bind(program.add_input(fmt::format("value{}", i), type), values[i]);
    outputs.push_back(bind(program.add_accumulator(fmt::format("reloaded{}", i), type),
                           OwnedTensor(type.dtype, type.shape)));
    reloaded.push_back(memory.size() - 1);
    const Shape slots{most_pages(type, pool)};
    tables.push_back(bind(accumulator(fmt::format("table{}", i), DType::kI32, slots),
                          OwnedTensor(DType::kI32, slots)));
    program.add(make_stash_pages(pool), {value}, {}, {pages_id, free_id, state_id, tables.back()});
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const ValueType type = program.type(outputs[i]);
    program.add(make_reload_pages(pool, type), {rows_ids[i]}, {},
                {outputs[i], pages_id, free_id, state_id, tables[i]});
  }
  const Executable run(std::move(program), backend);
  Bindings bindings = run.make_bindings();
  for (const auto& [id, at] : bound) bindings.tensors[id] = memory[at];
  for (int round = 0; round < 2; ++round) run.run(bindings);
  StashResult result{.free = copy_to_host(backend, memory[1]),
                     .state = copy_to_host(backend, memory[2])};
  for (const size_t at : reloaded) result.values.push_back(copy_to_host(backend, memory[at]));
  return result;
}

/// Checks that a back end leaves what the host does, where all find room and where some do not.
inline void check_stash(const Backend& backend, const Backend& host) {
  std::mt19937 random(11);
  const auto draw = [&](DType dtype, const Shape& shape) {
    OwnedTensor tensor(dtype, shape);
    auto* const bytes = static_cast<uint8_t*>(tensor.get().data);
    for (int64_t i = 0; i < tensor.get().num_bytes(); ++i)
      bytes[i] = static_cast<uint8_t>(random());
    return tensor;
  };
  for (const int64_t bound : {0, 1, 33, 700}) {
    std::vector<OwnedTensor> values;
    values.push_back(draw(DType::kF32, {bound, 7}));
    values.push_back(draw(DType::kBF16, {bound, 129}));
    values.push_back(draw(DType::kI32, {bound}));
    values.push_back(draw(DType::kF32, {bound, 256}));
    for (const int64_t num_pages : {4000, 40, 0}) {
      const PagePool pool{num_pages, 256};
      for (const int64_t share : {0, 1, 3, 4}) {
        std::vector<int64_t> rows(values.size(), bound * share / 4);
        rows[1] = std::min<int64_t>(1, bound);
        const StashResult found = stash_and_reload(backend, pool, values, rows);
        const StashResult expected = stash_and_reload(host, pool, values, rows);
        for (size_t i = 0; i < values.size(); ++i) {
          const int64_t size = values[i].get().num_bytes();
          EXPECT_TRUE(size == 0 || std::memcmp(found.values[i].get().data,
                                               expected.values[i].get().data, size) == 0)
              << "value " << i << ", bound " << bound << ", " << num_pages << " pages";
        }
        EXPECT_TRUE(std::ranges::equal(found.state.get().span<int64_t>(),
                                       expected.state.get().span<int64_t>()));
        EXPECT_TRUE(std::ranges::equal(found.free.get().span<int32_t>(),
                                       expected.free.get().span<int32_t>()));
        EXPECT_EQ(found.state.get().span<int64_t>()[kFreePages], num_pages);
      }
    }
  }
}

}  // namespace tessera::testing

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

/// Pages of a device's memory.
struct PagePool {
  int64_t num_pages = 0;
  int64_t page_bytes = 0;
};

/// What it left.
struct StashResult {
  std::vector<OwnedTensor> values;
  OwnedTensor free, state;
};

/// A program that stashes values and then reloads them, and what it is bound to.
class StashProgram {
 public:
  StashProgram(const Backend& backend, const PagePool& pool) : backend_(backend), pool_(pool) {
    OwnedTensor free(DType::kI32, {std::max<int64_t>(pool.num_pages, 1)});
    std::iota(free.get().span<int32_t>().begin(), free.get().span<int32_t>().end(), 0);
    OwnedTensor state(DType::kI64, {kPoolStates});
    state.get().span<int64_t>()[kPoolPages] = pool.num_pages;
    state.get().span<int64_t>()[kFreePages] = pool.num_pages;
    const OwnedTensor pages(DType::kU8, {std::max<int64_t>(pool.num_pages, 1) * pool.page_bytes});
    pool_ids_ = {accumulator("pages", pages, {pool.page_bytes}), accumulator("free", free, {1}),
                 accumulator("state", state, {kPoolStates})};
  }

  /// At its bound, of which the first `rows` came.
  void add(const Tensor& value, int64_t rows) {
    const std::string number = std::to_string(types_.size());
    OwnedTensor count(DType::kI64, {1});
    *count.get().as<int64_t>() = rows;
    rows_.push_back(bind(program_.add_input("rows" + number, {DType::kI64, {1}}), count));
    types_.push_back({value.dtype, value.shape, 0, rows_.back()});
    const ValueId id = bind(program_.add_input("value" + number, types_.back()), value);
    const auto made =
        program_.add(make_stash_pages(pool_.page_bytes), {id}, {"", "", "", "table"}, pool_ids_);
    tables_.push_back(made[StashPages::kTable]);
  }

  /// Runs twice, so that a device that records repeats it.
  StashResult run() && {
    std::vector<ValueId> outputs;
    for (size_t i = 0; i < types_.size(); ++i) {
      const auto made =
          program_.add(make_reload_pages(pool_.page_bytes, types_[i]), {rows_[i], tables_[i]},
                       {"", "", "", "reloaded" + std::to_string(i)}, pool_ids_);
      outputs.push_back(
          bind(made[ReloadPages::kValue], OwnedTensor(types_[i].dtype, types_[i].shape)));
    }
    program_.set_outputs(outputs);
    const Executable run(std::move(program_), backend_);
    const Buffer working(run.plan().transient_bytes, "tables", backend_.device());
    Bindings bindings = run.make_bindings();
    bindings.transient = working.data();
    for (const auto& [id, tensor] : bound_) bindings.tensors[id] = tensor;
    for (int round = 0; round < 2; ++round) run.run(bindings);
    StashResult result{.free = copy_to_host(backend_, memory_[1]),
                       .state = copy_to_host(backend_, memory_[2])};
    for (const ValueId id : outputs)
      result.values.push_back(copy_to_host(backend_, bindings.tensors[id]));
    return result;
  }

 private:
  ValueId bind(ValueId id, const Tensor& host) {
    memory_.push_back(copy_to(backend_, host));
    bound_.emplace_back(id, memory_.back());
    return id;
  }
  /// Of which the program knows a part.
  ValueId accumulator(const std::string& name, const Tensor& host, const Shape& shape) {
    const ValueId id = bind(program_.add_accumulator(name, {host.dtype, shape}), host);
    bound_.back().second.shape = shape;
    return id;
  }

  const Backend& backend_;
  PagePool pool_;
  Program program_{"stash"};
  std::vector<OwnedTensor> memory_;
  std::vector<std::pair<ValueId, Tensor>> bound_;
  std::vector<ValueId> pool_ids_, rows_, tables_;
  std::vector<ValueType> types_;
};

inline StashResult stash_and_reload(const Backend& backend, const PagePool& pool,
                                    const std::vector<OwnedTensor>& values,
                                    const std::vector<int64_t>& rows) {
  StashProgram program(backend, pool);
  for (size_t i = 0; i < values.size(); ++i) program.add(values[i], rows[i]);
  return std::move(program).run();
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

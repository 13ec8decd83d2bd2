// Collective operators on GPUs, beside the same ones on the CPU: ranks are threads that share the
// GPUs there are.
#include <numeric>

#include "ops/collective/collective.h"
#include "ops/collective/collective_testing.h"
#include "ops/collective/head_exchange.h"
#include "ops/collective/ragged_collective.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_ranks.h"

namespace tessera::testing {
namespace {

class CollectiveCuda : public GpuTest {
 protected:
  using MakeOperator = std::function<OperatorPtr(CommunicatorPtr group)>;

  /// An operator on one tensor of each rank, whose values differ.
  void check(int64_t ranks, const MakeOperator& make, const Shape& shape,
             const std::vector<int>& outputs_with_grad = {0}, GpuCheck how = {}) const {
    run_gpu_ranks(ranks, [&](World& world, const Backend& gpu) {
      const OperatorPtr op = make(world.make_world_group());
      SCOPED_TRACE(fmt::format("{} of {}, {} ranks", op->name(), shape.to_string(), ranks));
      GpuCheck own = how;
      own.seed = static_cast<uint64_t>(1 + world.rank());
      if (outputs_with_grad.empty()) own.dtypes = {DType::kF32};
      check_operator_on_gpu(
          op,
          [&](DType dtype) {
            return OperatorInputs{.names = {"x"}, .types = {{dtype, shape}}};
          },
          outputs_with_grad, cpu(), gpu, own);
    });
  }
};

TEST_F(CollectiveCuda, FixedSizes) {
  for (const int64_t ranks : {1, 2, 3}) {
    for (const int64_t rows : {0, 1, 130}) {
      for (const int64_t width : {3, 64}) {
        check(ranks, make_all_gather, {rows, width});
        check(ranks, make_reduce_scatter, {ranks * rows, width});
        check(ranks, make_all_to_all, {ranks * rows, width});
      }
    }
    check(ranks, make_all_gather, {7});
    check(ranks, make_all_reduce_constant, {3, 5}, {});
  }
}

TEST_F(CollectiveCuda, HeadsForTokens) {
  for (const int64_t ranks : {1, 2, 3}) {
    for (const int64_t tokens : {0, 70}) {
      for (const int64_t head_size : {1, 3, 64}) {
        const int64_t heads = 2 * ranks;
        check(ranks, [&](CommunicatorPtr group) { return make_gather_heads(group, heads); },
              {tokens, heads * head_size});
        check(ranks, [&](CommunicatorPtr group) { return make_scatter_heads(group, heads); },
              {ranks * tokens, 2 * head_size});
      }
    }
  }
}

TEST_F(CollectiveCuda, TinyHeads) {
  check(2, [](CommunicatorPtr group) { return make_gather_heads(group, 4); }, {7, 4 * 8}, {0},
        {.once = true});
}

using Counts = std::vector<int64_t>;

int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

/// How many rows go from each rank to each, the same on all ranks; some are 0.
std::vector<Counts> make_traffic(int64_t ranks, uint64_t seed) {
  Random random(seed, 99);
  std::vector<Counts> rows(ranks);
  for (Counts& from : rows) {
    for (int64_t to = 0; to < ranks; ++to)
      from.push_back(random.next_below(3) == 0 ? 0 : static_cast<int64_t>(random.next_below(40)));
  }
  return rows;
}

Counts column(const std::vector<Counts>& rows, int64_t to) {
  Counts counts;
  for (const Counts& from : rows) counts.push_back(from[to]);
  return counts;
}

/// A ragged operator of one rank: `rows_in` of its rows are there, `rows_out` arrive.
struct RaggedCase {
  OperatorPtr op;
  std::vector<Counts> counts;
  int64_t rows_in;
  int64_t rows_out;
};

class RaggedCollectiveCuda : public CollectiveCuda {
 protected:
  static constexpr int64_t kSpareRows = 3;  ///< of bounds over what is there

  using MakeCase =
      std::function<RaggedCase(const CommunicatorPtr& group, const std::vector<Counts>& traffic)>;

  /// With extents and, where rows are zeros past those that arrive, without.
  void check_ragged(const MakeCase& make) const {
    for (const int64_t ranks : {1, 2, 3, 4}) {
      for (const int64_t width : {0, 5, 64}) {
        const std::vector<Counts> traffic =
            make_traffic(ranks, static_cast<uint64_t>(ranks + 10 * width));
        check_traffic(make, traffic, width, {});
      }
    }
  }
  void check_traffic(const MakeCase& make, const std::vector<Counts>& traffic, int64_t width,
                     const GpuCheck& how) const {
    run_gpu_ranks(std::ssize(traffic), [&](World& world, const Backend& gpu) {
      GpuCheck own = how;
      own.seed = static_cast<uint64_t>(1 + world.rank());
      check_case(make(world.make_world_group(), traffic), width, own, gpu);
    });
  }
  static RaggedCase all_to_all(const CommunicatorPtr& group, const std::vector<Counts>& traffic) {
    const Counts& sent = traffic[group->rank()];
    const Counts received = column(traffic, group->rank());
    return {make_all_to_all_v(group, total(received) + kSpareRows),
            {sent, received},
            total(sent),
            total(received)};
  }

 private:
  void check_case(const RaggedCase& c, int64_t width, GpuCheck how, const Backend& gpu) const {
    SCOPED_TRACE(fmt::format("{} of width {}", c.op->name(), width));
    const Shape shape = shape_of_rows(c.rows_in + kSpareRows, width);
    std::vector<OwnedTensor> kept;
    const auto give = [&](const std::string& name, const Counts& values) {
      kept.push_back(tensor_of_i64({std::ssize(values)}, values));
      how.values[name] = kept.back();
    };
    for (size_t i = 0; i < c.counts.size(); ++i) give(fmt::format("counts{}", i), c.counts[i]);
    give("arriving", {c.rows_out});
    const auto inputs = [&](DType dtype, bool ragged) {
      OperatorInputs list{.names = {"x"},
                          .types = {ragged ? ragged_rows(dtype, shape) : ValueType{dtype, shape}}};
      const auto add = [&](const std::string& name) {
        list.names.push_back(name);
        list.types.push_back({DType::kI64, how.values.at(name).shape});
      };
      for (size_t i = 0; i < c.counts.size(); ++i) add(fmt::format("counts{}", i));
      if (ragged) add("arriving");
      return list;
    };
    check_ragged_operator_on_gpu(
        c.op, [&](DType dtype) { return inputs(dtype, true); }, {0}, c.rows_in, cpu(), gpu, how);
    check_operator_on_gpu(
        c.op, [&](DType dtype) { return inputs(dtype, false); }, {0}, cpu(), gpu, how);
  }
};

TEST_F(RaggedCollectiveCuda, AllToAllV) {
  check_ragged(all_to_all);
}

TEST_F(RaggedCollectiveCuda, TinyAllToAllV) {
  check_traffic(all_to_all, {{3, 0}, {5, 2}}, 5, {.dtypes = {DType::kF32}, .once = true});
}

TEST_F(RaggedCollectiveCuda, AllGatherV) {
  check_ragged([](const CommunicatorPtr& group, const std::vector<Counts>& traffic) {
    const Counts& counts = traffic[0];
    return RaggedCase{make_all_gather_v(group, total(counts) + kSpareRows),
                      {counts},
                      counts[group->rank()],
                      total(counts)};
  });
}

TEST_F(RaggedCollectiveCuda, ReduceScatterV) {
  check_ragged([](const CommunicatorPtr& group, const std::vector<Counts>& traffic) {
    const Counts& counts = traffic[0];
    const int64_t own = counts[group->rank()];
    return RaggedCase{make_reduce_scatter_v(group, own + kSpareRows), {counts}, total(counts), own};
  });
}

}  // namespace
}  // namespace tessera::testing

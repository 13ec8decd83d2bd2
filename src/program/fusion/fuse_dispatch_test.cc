#include "program/fusion/fuse_dispatch.h"

#include <gtest/gtest.h>

#include "comm/planned_world.h"
#include "ops/dispatch_rows/dispatch_rows.h"
#include "ops/permute/permute.h"

namespace tessera {
namespace {

/// One of two ranks whose devices count what they exchange; it exchanges nothing.
class CountingGroup final : public Communicator {
 public:
  explicit CountingGroup(bool counts)
      : Communicator("ep", {0, 1}, 0, std::make_shared<CommStatistics>()), counts_(counts) {}
  bool takes_device_counts() const override { return counts_; }

 private:
  using Rows = std::span<const int64_t>;
  Pending do_all_gather_v(const Tensor&, const Tensor&, Rows) override { return {}; }
  Pending do_reduce_scatter_v(const Tensor&, const Tensor&, Rows) override { return {}; }
  Pending do_all_reduce(const Tensor&, const Tensor&, ReduceOp) override { return {}; }
  Pending do_all_to_all_v(const Tensor&, const Tensor&, Rows, Rows) override { return {}; }
  Pending do_send(const Tensor&, int64_t) override { return {}; }
  Pending do_receive(const Tensor&, int64_t) override { return {}; }
  Pending do_broadcast(const Tensor&, int64_t) override { return {}; }
  void do_barrier() override {}

  bool counts_;
};

struct Case {
  bool device_counts = true;
  CountsOf counts = CountsOf::kDevice;
  int64_t width = 512;
  bool keeps_rows = false;
  bool reads_twice = false;
};

Program dispatch(const Case& c) {
  constexpr int64_t kTokens = 5;
  Program program("dispatch");
  const ValueId x = program.add_input("x", {DType::kBF16, {kTokens, c.width}});
  const ValueId num = program.add_input("num_rows", {DType::kI64, {1}});
  ValueType map{DType::kI32, {2 * kTokens}};
  map.ragged_dim = 0;
  map.extent = num;
  const ValueId source = program.add_input("source", map);
  const ValueId row_of = program.add_input("row_of", {DType::kI32, {kTokens, 2}});
  const ValueId send = program.add_input("send_rows", {DType::kI64, {2}});
  const ValueId receive = program.add_input("receive_rows", {DType::kI64, {2}});
  const ValueId arriving = program.add_input("arriving", {DType::kI64, {1}});
  const auto group = std::make_shared<CountingGroup>(c.device_counts);
  const ValueId rows = program.add1(make_permute(), {x, source, row_of}, "rows");
  const auto exchange = [&](ValueId id) {
    return program.add1(make_all_to_all_v(group, 4 * kTokens, c.counts),
                        {id, send, receive, arriving}, "arrived");
  };
  std::vector<ValueId> outputs = {exchange(rows)};
  if (c.keeps_rows) outputs.push_back(rows);
  if (c.reads_twice) outputs.push_back(exchange(rows));
  program.set_outputs(outputs);
  return program;
}

TEST(FuseDispatch, ThePermutationGoesIntoItsExchange) {
  const Program before = dispatch({});
  const Program after = fuse_dispatch(before, {});
  ASSERT_EQ(after.nodes().size(), 1);
  const Node& node = after.nodes()[0];
  EXPECT_EQ(node.op->name(), DispatchRows::kName);
  EXPECT_EQ(node.outputs, before.nodes()[1].outputs);
  EXPECT_EQ(node.inputs[DispatchRows::kX], before.nodes()[0].inputs[Permute::kX]);
  EXPECT_EQ(node.inputs[DispatchRows::kSource], before.nodes()[0].inputs[Permute::kSource]);
  EXPECT_EQ(node.inputs[DispatchRows::kRowOf], before.nodes()[0].inputs[Permute::kRowOf]);
  EXPECT_EQ(node.op->infer(after.types(node.inputs))[0], before.type(node.outputs[0]));
}

TEST(FuseDispatch, OthersStayApart) {
  for (const Case& c :
       {Case{.device_counts = false}, Case{.counts = CountsOf::kHost}, Case{.width = 64},
        Case{.width = 515}, Case{.keeps_rows = true}, Case{.reads_twice = true}}) {
    const Program before = dispatch(c);
    EXPECT_EQ(fuse_dispatch(before, {}).nodes().size(), before.nodes().size());
  }
  const Program before = dispatch({});
  EXPECT_EQ(fuse_dispatch(before, before.nodes()[0].outputs).nodes().size(), 2);
}

}  // namespace
}  // namespace tessera

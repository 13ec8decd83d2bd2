#include "ops/operands.h"

#include <gtest/gtest.h>

#include "core/id_vector.h"
#include "ops/operator.h"

namespace tessera {
namespace {

/// (x, [bias], y, [addend]) -> ([sum], [rest]), as its attributes say.
class Mixed final : public Operator {
 public:
  static constexpr std::string_view kName = "mixed";
  enum Input : int { kX, kBias, kY, kAddend };
  enum Output : int { kSum, kRest };

  Mixed(bool bias, bool addend, bool sum) : bias_(bias), addend_(addend), sum_(sum) {}
  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kX, kY}.add(kBias, bias_).add(kAddend, addend_);
  }
  OperandSet<Output> output_set() const { return OperandSet<Output>{kRest}.add(kSum, sum_); }
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> /*inputs*/) const override { return {}; }

 private:
  bool bias_;
  bool addend_;
  bool sum_;
};

TEST(OperandSet, CountsThoseBefore) {
  using Set = OperandSet<Mixed::Input>;
  const Set all = Mixed(true, true, true).input_set();
  EXPECT_EQ(all.size(), 4);
  for (const auto input : {Mixed::kX, Mixed::kBias, Mixed::kY, Mixed::kAddend})
    EXPECT_EQ(all.position(input), input);
  const Set few = Mixed(false, true, true).input_set();
  EXPECT_EQ(few.size(), 3);
  EXPECT_EQ(few.position(Mixed::kY), 1);
  EXPECT_EQ(few.position(Mixed::kAddend), 2);
  EXPECT_FALSE(few.has(Mixed::kBias));
  EXPECT_THROW(few.position(Mixed::kBias), InternalError);
  EXPECT_EQ(Set().size(), 0);
}

TEST(Args, FindOperandsByName) {
  std::vector<float> data(4);
  const auto tensor = [&](size_t i) { return view(std::span(data).subspan(i, 1), {1}); };
  const Tensor inputs[] = {tensor(0), tensor(1), tensor(2)};
  const Tensor outputs[] = {tensor(3)};
  const int64_t extents[] = {10, 11, 12, 13};
  const int64_t* const addresses[] = {&extents[0], &extents[1], &extents[2], &extents[3]};
  const KernelArgs plain{.inputs = inputs, .outputs = outputs, .extents = addresses};

  const Mixed op(false, true, false);
  const Args<Mixed> args(op, plain);
  EXPECT_EQ(args.in(Mixed::kX).data, &data[0]);
  EXPECT_EQ(args.in(Mixed::kY).data, &data[1]);
  EXPECT_EQ(args.in(Mixed::kAddend).data, &data[2]);
  EXPECT_EQ(*args.in_extent(Mixed::kAddend), 12);
  EXPECT_EQ(args.out(Mixed::kRest).data, &data[3]);
  EXPECT_EQ(*args.out_extent(Mixed::kRest), 13);
  EXPECT_EQ(args.find_in(Mixed::kBias), nullptr);
  EXPECT_EQ(args.find_in(Mixed::kY), &args.in(Mixed::kY));
  EXPECT_EQ(args.find_out(Mixed::kSum), nullptr);
  EXPECT_THROW(args.in(Mixed::kBias), InternalError);
}

TEST(Extent, IsAValueOrAnOperandOrNothing) {
  EXPECT_EQ(Extent().kind(), Extent::Kind::kNone);
  EXPECT_EQ(Extent(ValueId()), Extent());
  EXPECT_EQ(Extent(ValueId(3)).value(), ValueId(3));
  EXPECT_EQ(Extent::own_output(2).index(), 2);
  EXPECT_FALSE(Extent::own_output(2) == Extent::own_input(2));
  EXPECT_THROW(Extent::own_input(0).value(), InternalError);
  EXPECT_THROW(Extent().value(), InternalError);
}

TEST(ValueType, SaysItsFormatAndWhereItsExtentIs) {
  ValueType type{DType::kBF16, {8, 12}, 0, Extent::own_output(1)};
  EXPECT_EQ(type.to_string(), "bf16 [<=8 by output 1, 12]");
  type.extent = ValueId(5);
  type.scale = ScaleLayout::row();
  EXPECT_EQ(type.to_string(), "bf16 row [<=8 by %5, 12]");
  EXPECT_EQ(type.num_bytes(), type.format().num_bytes({8, 12}));
}

TEST(IdVector, GivesIdsInOrder) {
  IdVector<ValueId, int> values;
  EXPECT_TRUE(values.empty());
  EXPECT_EQ(values.add(7), ValueId(0));
  EXPECT_EQ(values.add(8), ValueId(1));
  EXPECT_EQ(values[ValueId(1)], 8);
  EXPECT_THROW(values.at(ValueId(2)), std::out_of_range);
  EXPECT_EQ((IdVector<ValueId, bool>(3, true)[ValueId(2)]), true);
}

}  // namespace
}  // namespace tessera

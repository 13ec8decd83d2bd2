#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include <stdexcept>
#include <string>
#include <vector>

#include "grouped.h"

namespace rival {

using cute::_1;
using cute::_128;
using cute::_2;
using cute::_256;
using cute::_64;
using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;
using Element = cutlass::bfloat16_t;
using Sizes = cute::Shape<int, int, int>;  // of one group's product

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
inline void check(cutlass::Status status) {
  if (status != cutlass::Status::kSuccess)
    throw std::runtime_error(cutlass::cutlassGetStatusString(status));
}

template <Schedule kSchedule>
struct Schedules;
template <>
struct Schedules<Schedule::kCooperative> {
  using Tile = cute::Shape<_128, _256, _64>;
  using Main = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};
template <>
struct Schedules<Schedule::kPingpong> {
  using Tile = cute::Shape<_128, _128, _64>;
  using Main = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

/// Out is row-major; Source is what is added to, void where nothing is.
template <typename LayoutA, typename LayoutB, typename Source, typename Out, Schedule kSchedule>
struct Kernel {
  using Tile = typename Schedules<kSchedule>::Tile;
  using Cluster = cute::Shape<_2, _1, _1>;
  static constexpr int kAlignment = 16 / sizeof(Element);
  static constexpr int kOutAlignment = 16 / sizeof(Out);

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Source, RowMajor*,
      kOutAlignment, Out, RowMajor*, kOutAlignment, typename Schedules<kSchedule>::Epilogue,
      cutlass::epilogue::fusion::LinearCombination<Out, float, Source, float>>::CollectiveOp;
  using Main = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA*, kAlignment, Element,
      LayoutB*, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      typename Schedules<kSchedule>::Main>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cutlass::gemm::GroupProblemShape<Sizes>, Main, Epilogue>>;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t num_bytes) { check(cudaMalloc(&data_, num_bytes + 1)); }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : memory_(values.size() * sizeof(T)) {
    check(cudaMemcpy(memory_.as<T>(), values.data(), values.size() * sizeof(T),
                     cudaMemcpyHostToDevice));
  }
  T* get() const { return memory_.as<T>(); }

 private:
  DeviceMemory memory_;
};

/// One group's product as CUTLASS has it: y [m, n] = a [m, k] · b [n, k]ᵀ, and the steps between
/// neighbours along the dim that is not contiguous.
struct Group {
  int m, n, k;
  int64_t a_step, b_step, y_step;
  const Element* a;
  const Element* b;
  void* y;
};

template <typename Stride>
Stride with_step(int64_t step) {
  Stride stride{};
  if constexpr (cute::is_static_v<cute::remove_cvref_t<decltype(cute::get<0>(stride))>>) {
    cute::get<1>(stride) = step;
  } else {
    cute::get<0>(stride) = step;
  }
  return stride;
}

template <typename T, typename Get>
std::vector<T> list(const std::vector<Group>& groups, const Get& get) {
  std::vector<T> values;
  for (const Group& group : groups) values.push_back(get(group));
  return values;
}

template <typename Source, typename Out, typename Gemm>
class GroupedProduct final : public Product {
 public:
  GroupedProduct(const std::vector<Group>& groups, const Problem& problem)
      : sizes_(list<Sizes>(groups,
                           [](const Group& g) {
                             return Sizes{g.m, g.n, g.k};
                           })),
        a_(list<const Element*>(groups, [](const Group& g) { return g.a; })),
        b_(list<const Element*>(groups, [](const Group& g) { return g.b; })),
        y_(list<Out*>(groups, [](const Group& g) { return static_cast<Out*>(g.y); })),
        a_strides_(
            list<StrideA>(groups, [](const Group& g) { return with_step<StrideA>(g.a_step); })),
        b_strides_(
            list<StrideB>(groups, [](const Group& g) { return with_step<StrideB>(g.b_step); })),
        y_strides_(
            list<StrideY>(groups, [](const Group& g) { return with_step<StrideY>(g.y_step); })),
        arguments_(make_arguments(static_cast<int>(groups.size()), problem)),
        workspace_(Gemm::get_workspace_size(arguments_)) {
    check(gemm_.can_implement(arguments_));
    check(gemm_.initialize(arguments_, workspace_.template as<void>()));
  }

  void run(cudaStream_t stream) override { check(gemm_.run(stream)); }

 private:
  using StrideA = typename Gemm::GemmKernel::InternalStrideA;
  using StrideB = typename Gemm::GemmKernel::InternalStrideB;
  using StrideY = typename Gemm::GemmKernel::InternalStrideD;
  using Arguments = typename Gemm::Arguments;

  /// Sizes are the GPU's alone, as after a router.
  Arguments make_arguments(int num_groups, const Problem& problem) const {
    Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {num_groups, sizes_.get(), nullptr},
        {a_.get(), a_strides_.get(), b_.get(), b_strides_.get()},
        {{}, nullptr, y_strides_.get(), y_.get(), y_strides_.get()},
        cutlass::KernelHardwareInfo::make_kernel_hardware_info<typename Gemm::GemmKernel>(0)};
    arguments.epilogue.thread.alpha = 1;
    arguments.epilogue.thread.beta = 0;
    if constexpr (!std::is_void_v<Source>) {
      arguments.epilogue.thread.beta = problem.accumulate != 0 ? 1.0F : 0.0F;
      arguments.epilogue.ptr_C = const_cast<const Out**>(y_.get());
    }
    arguments.scheduler.max_swizzle_size = problem.swizzle;
    return arguments;
  }

  DeviceArray<Sizes> sizes_;
  DeviceArray<const Element*> a_, b_;
  DeviceArray<Out*> y_;
  DeviceArray<StrideA> a_strides_;
  DeviceArray<StrideB> b_strides_;
  DeviceArray<StrideY> y_strides_;
  Arguments arguments_;
  DeviceMemory workspace_;
  Gemm gemm_;
};

template <typename LayoutA, typename LayoutB, typename Source, typename Out>
std::unique_ptr<Product> make_product(const std::vector<Group>& groups, const Problem& problem) {
  using Cooperative = typename Kernel<LayoutA, LayoutB, Source, Out, Schedule::kCooperative>::Gemm;
  using Pingpong = typename Kernel<LayoutA, LayoutB, Source, Out, Schedule::kPingpong>::Gemm;
  if (problem.schedule == Schedule::kPingpong)
    return std::make_unique<GroupedProduct<Source, Out, Pingpong>>(groups, problem);
  return std::make_unique<GroupedProduct<Source, Out, Cooperative>>(groups, problem);
}

/// group(e, first row, number of rows) of each expert.
template <typename MakeGroup>
std::vector<Group> list_groups(const Problem& problem, const MakeGroup& group) {
  std::vector<Group> groups;
  for (int64_t e = 0; e < problem.num_experts; ++e) {
    const int64_t begin = problem.offsets[e];
    groups.push_back(group(e, begin, static_cast<int>(problem.offsets[e + 1] - begin)));
  }
  return groups;
}

}  // namespace rival

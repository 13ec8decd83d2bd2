#include <cstring>

#include "ops/collective/head_exchange.h"
#include "ops/collective/ragged_kernels.h"

namespace tessera {
namespace {

using collective::WorkThen;

/// A matrix of rows [T, P · width] and the same as parts [P, T, width].
struct Parts {
  int64_t num_parts = 1;
  int64_t rows = 0;
  int64_t part_bytes = 0;  ///< of one row's part

  void split(const std::byte* rows_TP, std::byte* parts_PT) const {
    for_each([&](int64_t in_rows, int64_t in_parts) {
      std::memcpy(parts_PT + in_parts, rows_TP + in_rows, part_bytes);
    });
  }
  void join(const std::byte* parts_PT, std::byte* rows_TP) const {
    for_each([&](int64_t in_rows, int64_t in_parts) {
      std::memcpy(rows_TP + in_rows, parts_PT + in_parts, part_bytes);
    });
  }

 private:
  template <typename Copy>
  void for_each(const Copy& copy) const {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t part = 0; part < num_parts; ++part)
        copy((row * num_parts + part) * part_bytes, (part * rows + row) * part_bytes);
    }
  }
};

std::byte* bytes_of(const Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data);
}

Pending gather_heads(const GatherHeads& op, const Args<GatherHeads>& args) {
  using Op = GatherHeads;
  Communicator& comm = op.comm();
  const Tensor& x = args.in(Op::kX);
  if (comm.size() == 1) return comm.all_to_all(x, args.out(Op::kY));
  const Tensor parts{args.workspace.data(), x.dtype, args.out(Op::kY).shape};
  Parts{comm.size(), x.shape[0], row_bytes(args.out(Op::kY))}.split(bytes_of(x), bytes_of(parts));
  return comm.all_to_all(parts, args.out(Op::kY));
}

Pending scatter_heads(const ScatterHeads& op, const Args<ScatterHeads>& args) {
  using Op = ScatterHeads;
  Communicator& comm = op.comm();
  const Tensor& x = args.in(Op::kX);
  if (comm.size() == 1) return comm.all_to_all(x, args.out(Op::kY));
  const Tensor parts{args.workspace.data(), x.dtype, x.shape};
  const Parts layout{comm.size(), args.out(Op::kY).shape[0], row_bytes(x)};
  return Pending(std::make_unique<WorkThen>(comm.all_to_all(x, parts), [=, out = args.out(Op::kY)] {
    layout.join(bytes_of(parts), bytes_of(out));
  }));
}

std::vector<int64_t> read_counts(const KernelArgs& /*args*/, const Tensor& tensor) {
  const auto counts = tensor.span<int64_t>();
  return {counts.begin(), counts.end()};
}

int64_t workspace_bytes(const HeadExchange& op, std::span<const ValueType> inputs) {
  return op.parts_bytes(inputs);
}

}  // namespace

void add_collective_cpu(KernelTable& table) {
  collective::add_kernels(table);
  collective::add_ragged_kernels<read_counts>(table);
  add_kernel<GatherHeads>(table, gather_heads, {.workspace = workspace_bytes});
  add_kernel<ScatterHeads>(table, scatter_heads, {.workspace = workspace_bytes});
}

}  // namespace tessera

#include <cstring>
#include <functional>

#include "comm/rows.h"
#include "ops/collective/head_exchange.h"
#include "ops/collective/ragged_collective.h"

namespace tessera {
namespace {

Communicator& comm_of(const Operator& op) {
  return static_cast<const CollectiveOperator&>(op).comm();
}

Pending all_gather(const Operator& op, const KernelArgs& args) {
  return comm_of(op).all_gather(args.in(0), args.out(0));
}

Pending reduce_scatter(const Operator& op, const KernelArgs& args) {
  return comm_of(op).reduce_scatter(args.in(0), args.out(0));
}

Pending all_reduce_constant(const Operator& op, const KernelArgs& args) {
  return comm_of(op).all_reduce(args.in(0), args.out(0));
}

Pending all_to_all(const Operator& op, const KernelArgs& args) {
  return comm_of(op).all_to_all(args.in(0), args.out(0));
}

/// Zeros the rows that no rank fills. The exchange leaves them alone, so it may be under way.
void clear_rows_after(const Tensor& out, int64_t num_rows) {
  ensure(num_rows <= out.shape[0], "{} rows arrive in a value of shape {}", num_rows,
         out.shape.to_string());
  const int64_t num_bytes = (out.shape[0] - num_rows) * row_bytes(out);
  if (num_bytes > 0) std::memset(row_data(out, num_rows), 0, static_cast<size_t>(num_bytes));
}

Pending all_to_all_v(const Operator& op, const KernelArgs& args) {
  const auto receive_rows = args.in(2).span<int64_t>();
  clear_rows_after(args.out(0), sum_rows(receive_rows));
  return comm_of(op).all_to_all_v(args.in(0), args.out(0), args.in(1).span<int64_t>(),
                                  receive_rows);
}

Pending all_gather_v(const Operator& op, const KernelArgs& args) {
  const auto counts = args.in(1).span<int64_t>();
  clear_rows_after(args.out(0), sum_rows(counts));
  return comm_of(op).all_gather_v(args.in(0), args.out(0), counts);
}

Pending reduce_scatter_v(const Operator& op, const KernelArgs& args) {
  const auto counts = args.in(1).span<int64_t>();
  clear_rows_after(args.out(0), counts[static_cast<size_t>(comm_of(op).rank())]);
  return comm_of(op).reduce_scatter_v(args.in(0), args.out(0), counts);
}

/// An exchange with a step to take when it is complete.
class WorkThen final : public Work {
 public:
  WorkThen(Pending pending, std::function<void()> then)
      : pending_(std::move(pending)), then_(std::move(then)) {}

  void wait() override {
    pending_.wait();
    then_();
  }
  bool done() override { return pending_.done(); }
  /// The destructor of pending_, which follows, abandons the exchange.
  void abandon() noexcept override {}

 private:
  Pending pending_;
  std::function<void()> then_;
};

/// A matrix of rows [T, P · width] and the same as parts [P, T, width].
struct Parts {
  int64_t num_parts = 1;
  int64_t rows = 0;
  int64_t part_bytes = 0;  ///< of one row's part

  void split(const std::byte* rows_TP, std::byte* parts_PT) const {
    for_each([&](int64_t in_rows, int64_t in_parts) {
      std::memcpy(parts_PT + in_parts, rows_TP + in_rows, static_cast<size_t>(part_bytes));
    });
  }
  void join(const std::byte* parts_PT, std::byte* rows_TP) const {
    for_each([&](int64_t in_rows, int64_t in_parts) {
      std::memcpy(rows_TP + in_rows, parts_PT + in_parts, static_cast<size_t>(part_bytes));
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

Pending gather_heads(const Operator& op, const KernelArgs& args) {
  Communicator& comm = comm_of(op);
  const Tensor& x = args.in(0);
  if (comm.size() == 1) return comm.all_to_all(x, args.out(0));
  const Tensor parts{args.workspace.data(), x.dtype, args.out(0).shape};
  Parts{comm.size(), x.shape[0], row_bytes(args.out(0))}.split(bytes_of(x), bytes_of(parts));
  return comm.all_to_all(parts, args.out(0));
}

Pending scatter_heads(const Operator& op, const KernelArgs& args) {
  Communicator& comm = comm_of(op);
  const Tensor& x = args.in(0);
  if (comm.size() == 1) return comm.all_to_all(x, args.out(0));
  const Tensor parts{args.workspace.data(), x.dtype, x.shape};
  const Parts layout{comm.size(), args.out(0).shape[0], row_bytes(x)};
  return Pending(std::make_unique<WorkThen>(comm.all_to_all(x, parts), [=, out = args.out(0)] {
    layout.join(bytes_of(parts), bytes_of(out));
  }));
}

}  // namespace

void add_collective_cpu(KernelTable& table) {
  table["all_gather"] = all_gather;
  table["reduce_scatter"] = reduce_scatter;
  table["all_reduce_constant"] = all_reduce_constant;
  table["all_to_all"] = all_to_all;
  table["all_to_all_v"] = all_to_all_v;
  table["all_gather_v"] = all_gather_v;
  table["reduce_scatter_v"] = reduce_scatter_v;
  table["gather_heads"] = gather_heads;
  table["scatter_heads"] = scatter_heads;
}

}  // namespace tessera

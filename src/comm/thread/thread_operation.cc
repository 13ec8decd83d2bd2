#include "comm/thread/thread_operation.h"

#include <fmt/ranges.h>

#include <cstring>

#include "comm/reduce.h"
#include "comm/rows.h"

namespace tessera {
namespace {

using Posts = std::vector<ThreadPost>;

void all_gather(const Posts& posts) {
  const std::vector<int64_t>& rows = posts[0].rows;
  for (size_t from = 0; from < posts.size(); ++from) {
    const int64_t begin = rows_before(rows, static_cast<int64_t>(from));
    const int64_t bytes = rows[from] * row_bytes(posts[from].in);
    for (const ThreadPost& post : posts)
      copy_bytes(posts[from].in.data, row_data(post.out, begin), bytes);
  }
}

void reduce_scatter(const Posts& posts) {
  std::vector<const void*> inputs(posts.size());
  for (size_t to = 0; to < posts.size(); ++to) {
    const int64_t begin = rows_before(posts[to].rows, static_cast<int64_t>(to));
    for (size_t from = 0; from < posts.size(); ++from)
      inputs[from] = row_data(posts[from].in, begin);
    reduce_elements(posts[to].in.dtype, posts[to].op, inputs, posts[to].out.data,
                    posts[to].rows[to] * row_elements(posts[to].in));
  }
}

// The first rank's output is computed, the others' are copies: so one place decides the bits, and
// any output may be its rank's input.
void all_reduce(const Posts& posts) {
  std::vector<const void*> inputs(posts.size());
  for (size_t from = 0; from < posts.size(); ++from) inputs[from] = posts[from].in.data;
  const Tensor& result = posts[0].out;
  reduce_elements(result.dtype, posts[0].op, inputs, result.data, result.num_elements());
  for (const ThreadPost& post : posts) copy_bytes(result.data, post.out.data, result.num_bytes());
}

void all_to_all(const Posts& posts) {
  for (size_t from = 0; from < posts.size(); ++from) {
    for (size_t to = 0; to < posts.size(); ++to) {
      const int64_t source = rows_before(posts[from].rows, static_cast<int64_t>(to));
      const int64_t target = rows_before(posts[to].receive_rows, static_cast<int64_t>(from));
      copy_bytes(row_data(posts[from].in, source), row_data(posts[to].out, target),
                 posts[from].rows[to] * row_bytes(posts[from].in));
    }
  }
}

void broadcast(const Posts& posts) {
  const Tensor& root = posts[posts[0].root].in;
  for (const ThreadPost& post : posts) copy_bytes(root.data, post.in.data, root.num_bytes());
}

int64_t bytes_each(CommKind kind, const ThreadPost& post) {
  const bool rows_differ = kind == CommKind::kAllGather || kind == CommKind::kReduceScatter ||
                           kind == CommKind::kAllToAll;
  return rows_differ ? row_bytes(post.in) : post.in.num_bytes();
}

std::string describe_post(CommKind kind, const ThreadPost& post) {
  const char* each = kind == CommKind::kAllToAll ? "rows out" : "rows";
  std::string text = fmt::format("{} of {} bytes of {}", comm_kind_name(kind),
                                 bytes_each(kind, post), dtype_name(post.in.dtype));
  if (!post.rows.empty()) text += fmt::format(", {} {}", each, fmt::join(post.rows, " "));
  if (!post.receive_rows.empty())
    text += fmt::format(", rows in {}", fmt::join(post.receive_rows, " "));
  if (kind == CommKind::kBroadcast) text += fmt::format(", from {}", post.root);
  return text;
}

bool fits(const ThreadOperation& operation, size_t a, size_t b) {
  const ThreadPost& one = operation.posts[a];
  const ThreadPost& other = operation.posts[b];
  if (operation.kind == CommKind::kBarrier) return true;
  const bool same = one.in.dtype == other.in.dtype && one.op == other.op &&
                    one.root == other.root &&
                    bytes_each(operation.kind, one) == bytes_each(operation.kind, other);
  if (operation.kind == CommKind::kAllToAll) return same && one.rows[b] == other.receive_rows[a];
  return same && one.rows == other.rows;
}

void check_posts(const ThreadGroup& group, const ThreadOperation& operation) {
  const bool pairs = operation.kind == CommKind::kAllToAll;
  for (size_t a = 0; a < (pairs ? operation.posts.size() : 1); ++a) {
    for (size_t b = 0; b < operation.posts.size(); ++b) {
      ensure(fits(operation, a, b),
             "collective {} of group \"{}\" (ranks {}): member {} brings {}; member {} brings {}",
             operation.number, group.name, fmt::join(group.ranks, " "), a,
             describe_post(operation.kind, operation.posts[a]), b,
             describe_post(operation.kind, operation.posts[b]));
    }
  }
}

void run_message(const ThreadGroup& group, const ThreadOperation& operation) {
  const Tensor& from = operation.posts[0].in;
  const Tensor& to = operation.posts[1].in;
  ensure(from.num_bytes() == to.num_bytes(),
         "message {} in group \"{}\" (ranks {}): {} bytes sent, {} expected", operation.number,
         group.name, fmt::join(group.ranks, " "), from.num_bytes(), to.num_bytes());
  copy_bytes(from.data, to.data, from.num_bytes());
}

}  // namespace

void run_thread_operation(const ThreadGroup& group, const ThreadOperation& operation) {
  if (operation.kind == CommKind::kSend) return run_message(group, operation);
  check_posts(group, operation);
  switch (operation.kind) {
    case CommKind::kAllGather:
      return all_gather(operation.posts);
    case CommKind::kReduceScatter:
      return reduce_scatter(operation.posts);
    case CommKind::kAllReduce:
      return all_reduce(operation.posts);
    case CommKind::kAllToAll:
      return all_to_all(operation.posts);
    case CommKind::kBroadcast:
      return broadcast(operation.posts);
    default:
      return;  // a barrier moves nothing
  }
}

}  // namespace tessera

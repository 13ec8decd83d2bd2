#include "grouped.cuh"

namespace rival {

std::unique_ptr<Product> make_wgrad(const Problem& p) {
  const auto* const narrow = static_cast<const Element*>(p.a);
  const auto* const wide = static_cast<const Element*>(p.b);
  auto* const grad = static_cast<float*>(p.y);
  const auto groups = list_groups(p, [&](int64_t e, int64_t row, int num_rows) -> Group {
    // The main loop does not clear its sums where the reduction is empty; a group of no rows of
    // the result is passed over.
    return {.m = num_rows == 0 ? 0 : static_cast<int>(p.inner),
            .n = static_cast<int>(p.hidden),
            .k = num_rows,
            .a_step = p.inner,
            .b_step = p.hidden,
            .y_step = p.hidden,
            .a = narrow + row * p.inner,
            .b = wide + row * p.hidden,
            .y = grad + e * p.inner * p.hidden};
  });
  return make_product<ColumnMajor, RowMajor, float, float>(groups, p);
}

}  // namespace rival

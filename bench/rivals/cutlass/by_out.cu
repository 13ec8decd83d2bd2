#include "grouped.cuh"

namespace rival {

std::unique_ptr<Product> make_by_out(const Problem& p) {
  const auto* const a = static_cast<const Element*>(p.a);
  const auto* const weight = static_cast<const Element*>(p.b);
  auto* const y = static_cast<Element*>(p.y);
  const auto groups = list_groups(p, [&](int64_t e, int64_t row, int num_rows) -> Group {
    return {.m = num_rows,
            .n = static_cast<int>(p.inner),
            .k = static_cast<int>(p.hidden),
            .a_step = p.hidden,
            .b_step = p.hidden,
            .y_step = p.inner,
            .a = a + row * p.hidden,
            .b = weight + e * p.inner * p.hidden,
            .y = y + row * p.inner};
  });
  return make_product<RowMajor, ColumnMajor, void, Element>(groups, p);
}

}  // namespace rival

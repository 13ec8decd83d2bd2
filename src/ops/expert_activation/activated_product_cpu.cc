#include "ops/expert_activation/activated_product.h"

namespace tessera {
namespace {

const KernelTable& parts() {
  static const KernelTable kTable = [] {
    KernelTable table;
    add_grouped_matmul_cpu(table);
    add_expert_activation_cpu(table);
    return table;
  }();
  return kTable;
}

void activated_product(const Operator& op, const KernelArgs& args) {
  run_activated_product(static_cast<const ActivatedProduct&>(op), args, parts());
}

void activation_grad_product(const Operator& op, const KernelArgs& args) {
  run_activation_grad_product(static_cast<const ActivationGradProduct&>(op), args, parts());
}

}  // namespace

void add_activated_product_cpu(KernelTable& table) {
  table["activated_product"] = activated_product;
  table["activation_grad_product"] = activation_grad_product;
}

}  // namespace tessera

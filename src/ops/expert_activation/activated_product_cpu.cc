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

void activated_product(const ActivatedProduct& op, const Args<ActivatedProduct>& args) {
  run_activated_product(op, args, parts());
}

void activation_grad_product(const ActivationGradProduct& op,
                             const Args<ActivationGradProduct>& args) {
  run_activation_grad_product(op, args, parts());
}

/// Of the product, which is the one step with scratch memory.
int64_t product_bytes(const GroupedMatmul& product, std::span<const ValueType> inputs) {
  return parts().find(product.name())->second.workspace_bytes(product, inputs);
}

int64_t activated_product_workspace(const ActivatedProduct& op, std::span<const ValueType> inputs) {
  const auto of_product = inputs.first(op.num_product_inputs());
  return activated_product_bytes(op, inputs, product_bytes(op.product(), of_product));
}

int64_t activation_grad_product_workspace(const ActivationGradProduct& op,
                                          std::span<const ValueType> inputs) {
  const auto of_product = inputs.first(ActivationGradProduct::kPre);
  return activation_grad_product_bytes(op, inputs, product_bytes(op.product(), of_product));
}

}  // namespace

void add_activated_product_cpu(KernelTable& table) {
  add_kernel<ActivatedProduct>(table, activated_product,
                               {.workspace = activated_product_workspace});
  add_kernel<ActivationGradProduct>(table, activation_grad_product,
                                    {.workspace = activation_grad_product_workspace});
}

}  // namespace tessera

#include "core/process/cpu_level.h"
#include "python.h"

NB_MODULE(_tessera, module) {
  using namespace tessera::python;
  module.doc() = "The native part of tessera; use the package.";
  module.attr("__version__") = TESSERA_VERSION;
  add_errors(module);
  add_config(module);
  add_model(module);
  add_trainer(module);
  add_checkpoint(module);
  add_data(module);
  add_commands(module);
}

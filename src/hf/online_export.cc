#include "hf/online_export.h"

#include "core/error.h"
#include "core/file/file.h"
#include "hf/export_files.h"
#include "hf/folder_builder.h"
#include "hf/merged_adapters.h"
#include "hf/tensor_writer.h"
#include "model/weights/parameters.h"

namespace tessera {

OnlineExport::OnlineExport(ExportRequest request, std::map<std::string, Shape> shapes)
    : given_(std::move(request)),
      decoder_(plain_request(given_)),
      work_(prepare_export(decoder_, given_.model,
                           {.where = "the model in memory",
                            .shapes = std::move(shapes),
                            .merges = given_.model.lora.is_on()})),
      model_type_(work_.family->model_type),
      notes_(work_.notes) {
  if (given_.model.lora.is_on()) {
    notes_.push_back(
        fmt::format("adapters of rank {} are merged into the weights", given_.model.lora.rank));
  }
}

int64_t OnlineExport::num_bytes() const {
  return count_bytes(work_.map.hf);
}

void OnlineExport::write(const std::filesystem::path& target, const HeldTensors& tensors,
                         const std::map<std::string, std::string>& files) const {
  FolderBuilder folder(target);
  folder.require_space(num_bytes());
  ConversionProgress progress(decoder_.options.progress, num_bytes());
  const auto source = given_.model.lora.is_on()
                          ? make_merged_source(work_.map, tensors, given_.model)
                          : make_held_source(work_.map, tensors);
  write_weights(folder.path(), work_, *source, decoder_, progress);
  const NonFiniteTensors& wrong = source->nonfinite();
  require(wrong.empty(), "{}; nothing was written to {}", wrong.empty() ? "" : wrong.describe(),
          target.string());
  write_companions(folder.path(), work_, decoder_);
  for (const auto& [name, text] : files) write_file_synced(folder.path() / name, text);
  folder.publish();
}

}  // namespace tessera

#include "core/process/build_id.h"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace tessera {
namespace {

constexpr size_t align_note(size_t size) {
  return (size + 3) / 4 * 4;
}

std::string to_hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<int>(byte));
  return text;
}

/// The build ID among the notes of a segment; empty where it is not there.
std::string find_build_id(std::span<const std::byte> notes) {
  constexpr std::string_view kOwner("GNU\0", 4);
  ElfW(Nhdr) note{};
  while (notes.size() >= sizeof(note)) {
    std::memcpy(&note, notes.data(), sizeof(note));
    const size_t name = sizeof(note);
    const size_t content = name + align_note(note.n_namesz);
    const size_t end = content + align_note(note.n_descsz);
    if (end > notes.size()) return "";
    const auto* owner = reinterpret_cast<const char*>(notes.data() + name);
    if (note.n_type == NT_GNU_BUILD_ID && std::string_view(owner, note.n_namesz) == kOwner)
      return to_hex(notes.subspan(content, note.n_descsz));
    notes = notes.subspan(end);
  }
  return "";
}

/// Called for each loaded file; the first is the program itself.
int visit(dl_phdr_info* file, size_t /*size*/, void* result) {
  auto& id = *static_cast<std::string*>(result);
  for (int i = 0; i < file->dlpi_phnum && id.empty(); ++i) {
    const ElfW(Phdr)& segment = file->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* begin = reinterpret_cast<const std::byte*>(file->dlpi_addr + segment.p_vaddr);
    id = find_build_id({begin, segment.p_memsz});
  }
  return 1;
}

}  // namespace

std::string program_build_id() {
  std::string id;
  dl_iterate_phdr(visit, &id);
  return id;
}

}  // namespace tessera

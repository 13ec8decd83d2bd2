# Writes OUTPUT, a C++ source that holds each file of FILES, hardware descriptions, as text under its name.
set(source "#include \"sim/hardware_texts.h\"\n\nnamespace tessera {\nnamespace {\n\nconst HardwareText kTexts[] = {\n")
foreach(file IN LISTS FILES)
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} text)
  string(APPEND source "    {\"${name}\", R\"hardware(${text})hardware\"},\n")
endforeach()
string(APPEND source "};\n\n}  // namespace\n\nstd::span<const HardwareText> hardware_texts() {\n  return kTexts;\n}\n\n}  // namespace tessera\n")
file(WRITE ${OUTPUT} "${source}")

# Writes OUTPUT, a C++ source that holds each file of ASSETS as a string: page.html becomes kPageHtml of
# train/metrics/report_assets.h.
set(source "#include \"train/metrics/report_assets.h\"\n\nnamespace tessera {\n\n")
foreach(asset IN LISTS ASSETS)
  get_filename_component(name ${asset} NAME)
  string(REGEX MATCH "^([a-z])([a-z]*)[.]([a-z])([a-z]*)$" matched ${name})
  string(TOUPPER ${CMAKE_MATCH_1} first)
  string(TOUPPER ${CMAKE_MATCH_3} second)
  set(constant "k${first}${CMAKE_MATCH_2}${second}${CMAKE_MATCH_4}")
  file(READ ${asset} text)
  string(APPEND source "const std::string_view ${constant} = R\"asset(${text})asset\";\n\n")
endforeach()
string(APPEND source "}  // namespace tessera\n")
file(WRITE ${OUTPUT} "${source}")

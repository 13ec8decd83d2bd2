# Every dependency of the CPU build, all from Debian or Ubuntu; docs/dependencies.md says why each is here.
find_package(OpenMP REQUIRED)
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(GTest REQUIRED)

# dnnl-config.cmake demands OpenCL's development files, which the CPU engine does not use.
find_library(DNNL_LIBRARY dnnl REQUIRED)
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.hpp REQUIRED)
add_library(tessera_dnnl INTERFACE)
target_include_directories(tessera_dnnl SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
target_link_libraries(tessera_dnnl INTERFACE ${DNNL_LIBRARY})

find_path(TOMLPLUSPLUS_INCLUDE_DIR toml++/toml.h REQUIRED)
find_path(CLI11_INCLUDE_DIR CLI/CLI.hpp REQUIRED)
find_path(FMT_INCLUDE_DIR fmt/format.h REQUIRED)
add_library(tessera_fmt INTERFACE)
target_include_directories(tessera_fmt SYSTEM INTERFACE ${FMT_INCLUDE_DIR})
target_compile_definitions(tessera_fmt INTERFACE FMT_HEADER_ONLY)

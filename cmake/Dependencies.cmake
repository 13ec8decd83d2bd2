# Every dependency of the CPU build, all from Debian or Ubuntu; docs/dependencies.md says why each is here.
find_package(OpenMP REQUIRED)
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(GTest REQUIRED)
find_package(ZLIB REQUIRED)
find_package(LibLZMA REQUIRED)

# dnnl-config.cmake demands OpenCL's development files, which the CPU engine does not use.
find_library(DNNL_LIBRARY dnnl REQUIRED)
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.hpp REQUIRED)
add_library(tessera_dnnl INTERFACE)
target_include_directories(tessera_dnnl SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
target_link_libraries(tessera_dnnl INTERFACE ${DNNL_LIBRARY})

find_path(TOMLPLUSPLUS_INCLUDE_DIR toml++/toml.h REQUIRED)
find_path(CLI11_INCLUDE_DIR CLI/CLI.hpp REQUIRED)

# The library, not FMT_HEADER_ONLY, which adds seconds to the compilation of every file.
find_library(FMT_LIBRARY fmt REQUIRED)
find_path(FMT_INCLUDE_DIR fmt/format.h REQUIRED)
add_library(tessera_fmt INTERFACE)
target_include_directories(tessera_fmt SYSTEM INTERFACE ${FMT_INCLUDE_DIR})
target_link_libraries(tessera_fmt INTERFACE ${FMT_LIBRARY})

# Regular expressions, Unicode normal forms and SentencePiece models of tokenizers.
find_library(PCRE2_LIBRARY pcre2-8 REQUIRED)
find_path(PCRE2_INCLUDE_DIR pcre2.h REQUIRED)
find_library(UTF8PROC_LIBRARY utf8proc REQUIRED)
find_path(UTF8PROC_INCLUDE_DIR utf8proc.h REQUIRED)
find_library(SENTENCEPIECE_LIBRARY sentencepiece REQUIRED)
find_path(SENTENCEPIECE_INCLUDE_DIR sentencepiece_processor.h REQUIRED)
add_library(tessera_text INTERFACE)
target_include_directories(tessera_text SYSTEM INTERFACE ${PCRE2_INCLUDE_DIR} ${UTF8PROC_INCLUDE_DIR}
                                                         ${SENTENCEPIECE_INCLUDE_DIR})
target_link_libraries(tessera_text INTERFACE ${PCRE2_LIBRARY} ${UTF8PROC_LIBRARY} ${SENTENCEPIECE_LIBRARY})

# Which processors and memory belong together.
find_library(HWLOC_LIBRARY hwloc REQUIRED)
find_path(HWLOC_INCLUDE_DIR hwloc.h REQUIRED)
add_library(tessera_hwloc INTERFACE)
target_include_directories(tessera_hwloc SYSTEM INTERFACE ${HWLOC_INCLUDE_DIR})
target_link_libraries(tessera_hwloc INTERFACE ${HWLOC_LIBRARY})

# HTTP for `tessera serve`. The distributions' library is built with TLS and compression, on which the sizes of its
# classes depend; a header without a library has all in itself.
find_path(HTTPLIB_INCLUDE_DIR httplib.h REQUIRED)
find_library(HTTPLIB_LIBRARY cpp-httplib)
add_library(tessera_httplib INTERFACE)
target_include_directories(tessera_httplib SYSTEM INTERFACE ${HTTPLIB_INCLUDE_DIR})
target_link_libraries(tessera_httplib INTERFACE Threads::Threads)
if(HTTPLIB_LIBRARY)
  target_link_libraries(tessera_httplib INTERFACE ${HTTPLIB_LIBRARY})
  target_compile_definitions(tessera_httplib INTERFACE CPPHTTPLIB_OPENSSL_SUPPORT CPPHTTPLIB_ZLIB_SUPPORT
                                                       CPPHTTPLIB_BROTLI_SUPPORT)
endif()

# zstd's CMake files differ between the distributions.
find_library(ZSTD_LIBRARY zstd REQUIRED)
find_path(ZSTD_INCLUDE_DIR zstd.h REQUIRED)
add_library(tessera_compression INTERFACE)
target_include_directories(tessera_compression SYSTEM INTERFACE ${ZSTD_INCLUDE_DIR})
target_link_libraries(tessera_compression INTERFACE ZLIB::ZLIB LibLZMA::LibLZMA ${ZSTD_LIBRARY})

# For runs of several ranks (src/comm/mpi).
find_package(MPI COMPONENTS CXX)
if(NOT MPI_CXX_FOUND)
  message(NOTICE "MPI was not found: the program will run single ranks only, and tests of several are left out")
endif()

# CUDA 13, where it is: kernels with Hopper's own instructions.
find_program(TESSERA_NVCC nvcc PATHS /usr/local/cuda/bin $ENV{CUDA_HOME}/bin)
set(nvcc_release 0)
if(TESSERA_NVCC)
  execute_process(COMMAND ${TESSERA_NVCC} --version OUTPUT_VARIABLE nvcc_version)
  string(REGEX MATCH "release ([0-9]+)" _ "${nvcc_version}")
  set(nvcc_release ${CMAKE_MATCH_1})
endif()
if(nvcc_release GREATER_EQUAL 13)
  option(TESSERA_CUDA "Build the kernels for Hopper GPUs (needs nvcc 13)" ON)
else()
  message(NOTICE "nvcc 13 was not found: the kernels for Hopper GPUs are left out")
  option(TESSERA_CUDA "Build the kernels for Hopper GPUs (needs nvcc 13)" OFF)
endif()
if(TESSERA_CUDA)
  set(CMAKE_CUDA_COMPILER ${TESSERA_NVCC})
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc 13's
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  endif()
  find_package(CUDAToolkit 13 REQUIRED)

  # cuDNN's headers alone: the library is loaded when the program first needs it.
  find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${CMAKE_SOURCE_DIR}/.deps/cudnn_frontend/include)
  if(CUDNN_INCLUDE_DIR AND CUDNN_FRONTEND_INCLUDE_DIR)
    set(TESSERA_CUDNN ON)
    add_library(tessera_cudnn INTERFACE)
    target_include_directories(tessera_cudnn SYSTEM INTERFACE ${CUDNN_FRONTEND_INCLUDE_DIR} ${CUDNN_INCLUDE_DIR})
    target_link_libraries(tessera_cudnn INTERFACE CUDA::cudart_static ${CMAKE_DL_LIBS})
  else()
    set(TESSERA_CUDNN OFF)
    message(NOTICE "cuDNN's headers were not found (scripts/bootstrap.sh fetches its frontend): attention runs on the "
                   "project's own kernels alone")
  endif()

  # NCCL's header alone, as above: several GPUs load the library.
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  if(NCCL_INCLUDE_DIR)
    set(TESSERA_NCCL ON)
    add_library(tessera_nccl INTERFACE)
    target_include_directories(tessera_nccl SYSTEM INTERFACE ${NCCL_INCLUDE_DIR})
    target_link_libraries(tessera_nccl INTERFACE ${CMAKE_DL_LIBS})
  else()
    set(TESSERA_NCCL OFF)
    message(NOTICE "nccl.h was not found: the program will train on single GPUs only")
  endif()
endif()

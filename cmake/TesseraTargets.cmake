# Helpers that give every folder of src/ the same shape: a static library of its sources, one test program of its
# *_test.cc files, and the compile flags of the project.

add_library(tessera_flags INTERFACE)
target_include_directories(tessera_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
set(TESSERA_CXX_FLAGS -Wall -Wextra -Wno-missing-field-initializers -Werror=return-type -Wno-psabi
                      -march=${TESSERA_MARCH} -fno-math-errno -ffp-contract=fast)
# GCC 12 takes its own headers of AVX-512 and of strings for faulty (its bugs 105593, 105651 and 105329). Such faults of
# ours are left to clang-tidy, the sanitizers and newer compilers.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND TESSERA_CXX_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized -Wno-array-bounds -Wno-restrict
                                -Wno-stringop-overflow -Wno-stringop-overread)
endif()
if(CMAKE_UNITY_BUILD)
  list(APPEND TESSERA_CXX_FLAGS -Wno-subobject-linkage)  # takes the files of a unity build for headers
endif()
target_compile_options(tessera_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${TESSERA_CXX_FLAGS}>")
if(TESSERA_SANITIZE)
  target_compile_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer
                                                 -fno-sanitize-recover=all)
  target_link_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()

# Tests are compiled for a short build: the libraries are what must be fast, and what the sanitizers watch in full.
set(TESSERA_TEST_FLAGS $<$<CONFIG:Release>:-O1>)
if(TESSERA_SANITIZE)
  set(TESSERA_TEST_FLAGS -O0 -fno-sanitize=undefined)
endif()

# Headers that nearly every file includes are compiled once: half of the time of most files. nlohmann/json is not among
# them, since a precompiled header costs its users time too.
set(TESSERA_COMMON_HEADERS <algorithm> <cstdint> <cstring> <filesystem> <functional> <map> <memory> <optional> <span>
                           <string> <string_view> <variant> <vector> <fmt/format.h>)

# tessera_precompile(NAME header...): NAME holds the precompiled headers that tessera_use_precompiled gives to others.
function(tessera_precompile name)
  if(TESSERA_PCH)
    foreach(header ${ARGN})
      target_precompile_headers(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${header}>)
    endforeach()
  endif()
endfunction()

function(tessera_use_precompiled name owner)
  if(TESSERA_PCH AND NOT name STREQUAL owner)
    target_precompile_headers(${name} REUSE_FROM ${owner})
  endif()
endfunction()

# tessera_library(NAME DIR lib...): static library of DIR/*.cc (but tests and what is for CUDA) that uses lib...
function(tessera_library name dir)
  file(GLOB sources CONFIGURE_DEPENDS ${dir}/*.cc)
  list(FILTER sources EXCLUDE REGEX "_(test|bench|cuda)\\.cc$")
  set(kernels ${sources})
  list(FILTER kernels INCLUDE REGEX "_cpu\\.cc$")
  set_source_files_properties(${kernels} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)  # long enough alone
  if(sources)
    add_library(${name} STATIC ${sources})
    target_link_libraries(${name} PUBLIC tessera_flags ${ARGN})
    tessera_use_precompiled(${name} tessera_core)
  else()
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE tessera_flags ${ARGN})
  endif()
endfunction()

# tessera_tests(NAME DIR lib...): one test program of DIR/*_test.cc. Files that end in _slow_test.cc go to a second
# program whose tests carry the label "slow" (left out without TESSERA_SLOW_TESTS).
function(tessera_tests name dir)
  if(NOT TESSERA_TESTS)
    return()
  endif()
  file(GLOB tests CONFIGURE_DEPENDS ${dir}/*_test.cc)
  list(FILTER tests EXCLUDE REGEX "_cuda_test\\.cc$")
  set(slow ${tests})
  list(FILTER tests EXCLUDE REGEX "_slow_test\\.cc$")
  list(FILTER slow INCLUDE REGEX "_slow_test\\.cc$")
  if(tests)
    tessera_test_program(${name} "" "${tests}" ${ARGN})
  endif()
  if(slow AND TESSERA_SLOW_TESTS)
    tessera_test_program(${name}_slow "slow" "${slow}" ${ARGN})
  endif()
endfunction()

function(tessera_test_program name labels sources)
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE ${ARGN} GTest::gmock GTest::gtest GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE TESSERA_TEST_DATA="${CMAKE_SOURCE_DIR}/tests/data"
                                             TESSERA_BINARY="$<TARGET_FILE_DIR:${name}>")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests UNITY_BUILD OFF)
  target_compile_options(${name} PRIVATE ${TESSERA_TEST_FLAGS})
  tessera_use_precompiled(${name} tessera_test_headers)
  tessera_add_test(${name} "${labels}")
endfunction()

# Programs that run for long are several entries of ctest, each with a share of the tests, so that they run beside each
# other and one program does not run on alone at the end.
set(TESSERA_SHARDS_cli_test 4)
set(TESSERA_SHARDS_model_test 4)
set(TESSERA_SHARDS_train_test 4)

# Tiny models wait for threads more than they compute, so what stands above the operators is tested on one; threads in
# kernels are tested where the kernels are, and in the programs that cli_test starts.
set(TESSERA_ONE_THREAD hf_test model_test train_test)

function(tessera_add_test name labels)
  set(environment "")
  if(name IN_LIST TESSERA_ONE_THREAD)
    list(APPEND environment OMP_NUM_THREADS=1)
  endif()
  if(NOT DEFINED TESSERA_SHARDS_${name})
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 600 ENVIRONMENT "${environment}")
    if("gpu" IN_LIST labels)
      # Some fill a GPU's memory on purpose, so no two run at a time.
      set_tests_properties(${name} PROPERTIES RESOURCE_LOCK gpu TIMEOUT 1800)
    endif()
    return()
  endif()
  set(shards ${TESSERA_SHARDS_${name}})
  math(EXPR last "${shards} - 1")
  foreach(shard RANGE ${last})
    set(entry ${name}.${shard})
    set(part ${environment} GTEST_TOTAL_SHARDS=${shards} GTEST_SHARD_INDEX=${shard})
    add_test(NAME ${entry} COMMAND ${name})
    # The higher COST starts first.
    set_tests_properties(${entry} PROPERTIES LABELS "${labels}" TIMEOUT 600 COST 100 ENVIRONMENT "${part}")
  endforeach()
endfunction()

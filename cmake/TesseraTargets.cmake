# Helpers that give every folder of src/ the same shape: a static library of its sources, one test program of its
# *_test.cc files, and the compile flags of the project.

add_library(tessera_flags INTERFACE)
target_include_directories(tessera_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
set(TESSERA_CXX_FLAGS -Wall -Wextra -Wno-missing-field-initializers -Werror=return-type -Wno-psabi
                      -march=x86-64-v3 -fno-math-errno -ffp-contract=fast)
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
  target_compile_definitions(tessera_flags INTERFACE TESSERA_SANITIZED)
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

# tessera_library(NAME DIRS lib...): static library of the *.cc files (except tests and what is for CUDA) in the list of
# folders DIRS, that uses lib...
function(tessera_library name dirs)
  list(TRANSFORM dirs APPEND /*.cc)
  file(GLOB sources CONFIGURE_DEPENDS ${dirs})
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

# tessera_cuda_library(NAME SOURCES lib...): static library of host code and kernels for GPUs.
function(tessera_cuda_library name sources)
  add_library(${name} STATIC ${sources})
  target_link_libraries(${name} PUBLIC tessera_flags ${ARGN} CUDA::cudart_static ${CMAKE_DL_LIBS})
  set_target_properties(${name} PROPERTIES UNITY_BUILD OFF)
  tessera_use_precompiled(${name} tessera_core)
endfunction()

# CPU levels above that of the whole program, AVX2 (docs/design.md): their names as in core/process/cpu_level.h. Files with vector
# code are compiled for each. What such an object has of inline functions and templates must be its own: the linker would
# otherwise be free to take that copy for all callers, on processors without these instructions too. -fno-weak makes them
# local, and the test cpu_level_objects looks for what is not. Its warnings of copies are those of constants, hence -w;
# the same code has its warnings as it is compiled for AVX2.
set(TESSERA_FLAGS_avx512 -march=x86-64-v4)
set(TESSERA_FLAGS_avx512bf16 -march=x86-64-v4 -mavx512bf16)
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND TESSERA_CPU_LEVELS)
  message(NOTICE "Only GCC keeps the code of CPU levels apart: this program will have AVX2 alone")
  set(TESSERA_CPU_LEVELS "")
endif()
foreach(level ${TESSERA_CPU_LEVELS})
  if(NOT DEFINED TESSERA_FLAGS_${level})
    message(FATAL_ERROR "TESSERA_CPU_LEVELS: \"${level}\" is not avx512 or avx512bf16")
  endif()
  add_library(tessera_level_${level} INTERFACE)
  target_compile_options(tessera_level_${level} INTERFACE ${TESSERA_FLAGS_${level}} -fno-weak -w)
endforeach()

# tessera_leveled(LEVELS source...): the sources, in folders of this directory, are compiled for those of LEVELS that the
# program has, as well as for AVX2.
function(tessera_leveled levels)
  set(definitions TESSERA_VECTOR_SOURCE)
  foreach(level ${levels})
    if(level IN_LIST TESSERA_CPU_LEVELS)
      string(TOUPPER TESSERA_HAS_${level} definition)
      list(APPEND definitions ${definition})
    endif()
  endforeach()
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_DEFINITIONS "${definitions}")
  foreach(source ${ARGN})
    set_property(DIRECTORY APPEND PROPERTY TESSERA_LEVELED_${source} ${levels})
  endforeach()
endfunction()

# tessera_add_levels(NAME lib...): the objects of the library NAME that are for levels above AVX2.
function(tessera_add_levels name)
  foreach(level ${TESSERA_CPU_LEVELS})
    get_target_property(sources ${name} SOURCES)
    set(chosen "")
    foreach(source ${sources})
      cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} OUTPUT_VARIABLE relative)
      get_property(levels DIRECTORY PROPERTY TESSERA_LEVELED_${relative})
      if(level IN_LIST levels)
        list(APPEND chosen ${source})
      endif()
    endforeach()
    if(chosen)
      add_library(${name}_${level} OBJECT ${chosen})
      # Last, since the last -march counts.
      target_link_libraries(${name}_${level} PRIVATE tessera_flags ${ARGN} tessera_level_${level})
      list(APPEND objects $<TARGET_OBJECTS:${name}_${level}>)
      set_property(GLOBAL APPEND PROPERTY TESSERA_LEVEL_OBJECTS $<TARGET_OBJECTS:${name}_${level}>)
    endif()
  endforeach()
  if(objects)
    target_sources(${name} PRIVATE ${objects})
  endif()
endfunction()

# tessera_tests(NAME DIRS lib...): one test program of the *_test.cc files in the list of folders DIRS. Files that end in
# _slow_test.cc go to a second program whose tests carry the label "slow" (left out without TESSERA_SLOW_TESTS).
function(tessera_tests name dirs)
  if(NOT TESSERA_TESTS)
    return()
  endif()
  list(TRANSFORM dirs APPEND /*_test.cc)
  file(GLOB tests CONFIGURE_DEPENDS ${dirs})
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
set(TESSERA_ONE_THREAD hf_test model_test train_test tune_test)

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

# tessera_gpu_tests(NAME SOURCES lib...): a test program for machines with a GPU; elsewhere ctest shows it as skipped.
function(tessera_gpu_tests name sources)
  tessera_test_program(${name} "gpu" "${sources}" ${ARGN})
  set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "no GPUs?: ")
endfunction()

# tessera_test_levels(NAME LEVELS): the test program also with CPU levels below the machine's highest, which has an entry
# of its own. Where a level is missing the program says so, and the entry is skipped. A machine with AVX2 alone, the least
# that the program runs on, has that entry only.
set(TESSERA_MACHINE_FLAGS "")
if(EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo TESSERA_MACHINE_FLAGS REGEX "^flags" LIMIT_COUNT 1)
endif()
function(tessera_test_levels name levels)
  if(NOT TARGET ${name})
    return()
  endif()
  if(TESSERA_MACHINE_FLAGS AND NOT TESSERA_MACHINE_FLAGS MATCHES " avx512f")
    list(REMOVE_ITEM levels avx2)
  endif()
  foreach(level ${levels})
    add_test(NAME ${name}.${level} COMMAND ${name})
    set_tests_properties(${name}.${level} PROPERTIES TIMEOUT 600 ENVIRONMENT TESSERA_CPU=${level}
                         SKIP_REGULAR_EXPRESSION "TESSERA_CPU: this pro")
  endforeach()
endfunction()

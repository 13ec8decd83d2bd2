# Helpers that give every folder of src/ the same shape: a static library of its sources, one test program of its
# *_test.cc files, and the compile flags of the project.

add_library(tessera_flags INTERFACE)
target_include_directories(tessera_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_options(tessera_flags INTERFACE -Wall -Wextra -Werror=return-type -Wno-psabi -march=${TESSERA_MARCH}
                                               -fno-math-errno -ffp-contract=fast)
if(TESSERA_SANITIZE)
  target_compile_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer
                                                 -fno-sanitize-recover=all)
  target_link_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()

# tessera_library(NAME DIR lib...): static library of DIR/*.cc (tests and benchmarks left out) that uses lib...
function(tessera_library name dir)
  file(GLOB sources CONFIGURE_DEPENDS ${dir}/*.cc)
  list(FILTER sources EXCLUDE REGEX "_(test|bench)\\.cc$")
  if(sources)
    add_library(${name} STATIC ${sources})
    target_link_libraries(${name} PUBLIC tessera_flags ${ARGN})
  else()
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE tessera_flags ${ARGN})
  endif()
endfunction()

# tessera_tests(NAME DIR lib...): one test program of DIR/*_test.cc. Files that end in _slow_test.cc go to a second
# program whose tests carry the label "slow".
function(tessera_tests name dir)
  if(NOT TESSERA_TESTS)
    return()
  endif()
  file(GLOB tests CONFIGURE_DEPENDS ${dir}/*_test.cc)
  set(slow ${tests})
  list(FILTER tests EXCLUDE REGEX "_slow_test\\.cc$")
  list(FILTER slow INCLUDE REGEX "_slow_test\\.cc$")
  if(tests)
    tessera_test_program(${name} "" "${tests}" ${ARGN})
  endif()
  if(slow)
    tessera_test_program(${name}_slow "slow" "${slow}" ${ARGN})
  endif()
endfunction()

function(tessera_test_program name labels sources)
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE ${ARGN} GTest::gmock GTest::gtest GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE TESSERA_TEST_DATA="${CMAKE_SOURCE_DIR}/tests/data"
                                             TESSERA_BINARY="$<TARGET_FILE_DIR:${name}>")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 600)
endfunction()

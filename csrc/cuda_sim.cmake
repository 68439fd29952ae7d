# The CUDA kernels on the simulator: the same .cu files, compiled as C++ against sim/cuda.
add_library(glm5_cuda_sim OBJECT
  sim/cuda/async_copy.cpp sim/cuda/block.cpp sim/cuda/fault.cpp sim/cuda/fibre.cpp sim/cuda/guarded.cpp
  sim/cuda/hopper.cpp sim/cuda/launch.cpp sim/cuda/matrix.cpp sim/cuda/race.cpp sim/cuda/settings.cpp)
# Line numbers without a debugger's rest, and paths as they stand in the tree: faults are told with them. No fortified
# longjmp: it refuses to leave a fibre's stack.
target_compile_options(glm5_options INTERFACE -g1 -U_FORTIFY_SOURCE "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=")
set_target_properties(glm5_options PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_SOURCE_DIR}/include;${CMAKE_CURRENT_SOURCE_DIR}")
target_compile_definitions(glm5_options INTERFACE GLM5_CUDA_SIM=1)
target_link_libraries(glm5_cuda_sim PRIVATE glm5_options)

list(TRANSFORM GLM5_CUDA_OPS REPLACE "(.+)" "cuda/\\1.cu" OUTPUT_VARIABLE kernels)
list(APPEND kernels sim/cuda/selftest/hopper.cu sim/cuda/selftest/memory.cu sim/cuda/selftest/warps.cu)
set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++")
add_library(glm5_kernels STATIC
  runtime/check.cpp runtime/paged.cpp runtime/scratch.cpp runtime/thread_pool.cpp
  ${kernels} $<TARGET_OBJECTS:glm5_cuda_sim>)
target_link_libraries(glm5_kernels PUBLIC glm5_options Threads::Threads ${CMAKE_DL_LIBS})

# Defines cudasched_cuda_headers (cuda.h and cupti.h; nothing of CUDA is ever linked). Looked for in the header wheels of
# the building Python (nvidia-cuda-runtime, -crt, -cupti 13.0.*), then in the toolkit.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(s.submodule_search_locations) if s else '')"
  OUTPUT_VARIABLE nvidia_packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
set(cuda_hints "")
foreach(package IN LISTS nvidia_packages)
  list(APPEND cuda_hints "${package}/cu13/include")
endforeach()
list(APPEND cuda_hints "$ENV{CUDA_HOME}/include" "$ENV{CUDA_PATH}/include" /usr/local/cuda/include)
list(APPEND cupti_hints ${cuda_hints} "$ENV{CUDA_HOME}/extras/CUPTI/include" "$ENV{CUDA_PATH}/extras/CUPTI/include"
     /usr/local/cuda/extras/CUPTI/include)
find_path(CUDASCHED_CUDA_INCLUDE cuda.h HINTS ${cuda_hints} NO_DEFAULT_PATH)
find_path(CUDASCHED_CUPTI_INCLUDE cupti.h HINTS ${cupti_hints} NO_DEFAULT_PATH)
# A wheel of its own; an environment with PyTorch has the other two without it.
find_path(CUDASCHED_CRT_INCLUDE crt/host_defines.h HINTS ${cuda_hints} NO_DEFAULT_PATH)
if(NOT CUDASCHED_CUDA_INCLUDE OR NOT CUDASCHED_CUPTI_INCLUDE OR NOT CUDASCHED_CRT_INCLUDE)
  message(FATAL_ERROR "cudasched needs the CUDA 13.0 headers cuda.h, cupti.h and crt/host_defines.h (no GPU, no driver). "
    "Get them with\n  pip install 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cupti==13.0.*'\n"
    "(plain `pip install .` does so by itself), or point CUDA_HOME at a toolkit that has them. "
    "Found cuda.h: ${CUDASCHED_CUDA_INCLUDE}, cupti.h: ${CUDASCHED_CUPTI_INCLUDE}, crt: ${CUDASCHED_CRT_INCLUDE}.")
endif()
file(STRINGS "${CUDASCHED_CUDA_INCLUDE}/cuda.h" cuda_version_line REGEX "^#define CUDA_VERSION ")
string(REGEX MATCH "[0-9]+" cuda_version "${cuda_version_line}")
if(cuda_version LESS 13000)
  message(FATAL_ERROR "cudasched needs CUDA 13.0 headers or later to build (programs may use any CUDA); "
    "${CUDASCHED_CUDA_INCLUDE}/cuda.h is version ${cuda_version}. Install the header wheels: "
    "pip install 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cupti==13.0.*'")
endif()
cudasched_link_headers(cuda_headers "${CUDASCHED_CUDA_INCLUDE}" "${CUDASCHED_CUPTI_INCLUDE}" "${CUDASCHED_CRT_INCLUDE}")
add_library(cudasched_cuda_headers INTERFACE)
target_include_directories(cudasched_cuda_headers SYSTEM INTERFACE ${cuda_headers})

// Conversion of a node's command from and to the driver's structures. Called with the driver's mutex held.
#pragma once

#include <cuda.h>

#include <memory>

#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {

// A kernel that is given as a CUkernel is the current context's; a function brings its own.
Command read_params(const CUDA_KERNEL_NODE_PARAMS_v1& params);
Command read_params(const CUDA_KERNEL_NODE_PARAMS& params);
Command read_params(const CUDA_MEMCPY3D& params);
Command read_params(const CUDA_MEMSET_NODE_PARAMS& params);
Command read_params(const CUDA_HOST_NODE_PARAMS& params);
// Not of child graph, memory or conditional nodes: NOT_SUPPORTED.
Command read_params(const CUgraphNodeParams& params);
Command read_params(CUevent event);

// The kernel's parameters are where the node keeps them, until it changes.
void write_params(Node& node, CUDA_KERNEL_NODE_PARAMS_v1& params);
void write_params(Node& node, CUDA_KERNEL_NODE_PARAMS& params);
void write_params(const CopyCommand& copy, CUDA_MEMCPY3D& params);
void write_params(const SetCommand& set, CUDA_MEMSET_NODE_PARAMS& params);
void write_params(const HostCommand& host, CUDA_HOST_NODE_PARAMS& params);
void write_params(const EventCommand& of, CUevent& event);
void write_params(const GraphMemoryCommand& of, CUDA_MEM_ALLOC_NODE_PARAMS& params);
void write_params(const GraphMemoryCommand& of, CUdeviceptr& address);

}  // namespace cudasched::simulated_driver

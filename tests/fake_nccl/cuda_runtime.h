// cuda_runtime.h - the little of CUDA's runtime that runtime/comm_nccl.cpp names, for fake_nccl.cpp.
#pragma once
typedef struct FakeStream *cudaStream_t;
typedef enum { cudaSuccess = 0 } cudaError_t;
extern "C" cudaError_t cudaGetDeviceCount(int *count);

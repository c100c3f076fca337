// cuda_runtime.h - the little of CUDA's runtime that runtime/comm_nccl.cpp names, for fake_nccl.cpp.
#pragma once
typedef struct FakeStream *cudaStream_t;
#define CUDART_VERSION 13000
typedef enum { cudaSuccess = 0 } cudaError_t;
typedef enum { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 } cudaDriverEntryPointQueryResult;
enum { cudaEnableDefault = 0 };
extern "C" cudaError_t cudaGetDeviceCount(int *count);
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **entry, unsigned version, unsigned long long flags,
                                                        cudaDriverEntryPointQueryResult *found);

// nccl.h - the part of NCCL's interface that runtime/comm_nccl.cpp uses, for fake_nccl.cpp. Names and meanings are
// NCCL's own (its user guide, "API"); values are not, so that nothing compiled with this may be linked with NCCL.
#pragma once
#include "cuda_runtime.h"
#include <stddef.h>

#define NCCL_VERSION_CODE 22803

typedef struct ncclComm *ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int blocking, CTAPolicy; } ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER {1, 0}
typedef struct ncclWindow *ncclWindow_t;
enum { NCCL_CTA_POLICY_ZERO = 2, NCCL_WIN_COLL_SYMMETRIC = 1 };

typedef enum { ncclSuccess, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError, ncclInProgress } ncclResult_t;
typedef enum { ncclSum, ncclMax, ncclMin } ncclRedOp_t;
typedef enum { ncclUint8, ncclFloat16, ncclBfloat16, ncclFloat32, ncclFloat64, ncclDouble = ncclFloat64 } ncclDataType_t;

extern "C" {
ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclAllGather(const void *send, void *receive, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllReduce(const void *send, void *receive, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *send, void *receive, size_t n, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void *send, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void *receive, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclMemAlloc(void **data, size_t bytes);
ncclResult_t ncclMemFree(void *data);
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *data, size_t bytes, ncclWindow_t *window, int flags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
}

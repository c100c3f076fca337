// kernel_trace.c - a library that CUDA loads into a program to write down which kernel ran when: the source of scripts/profile.py.
//
// CUDA 12 and later call InitializeInjection of the library that CUDA_INJECTION64_PATH names, before their first call. CUPTI then hands over
// buffers of records, of kernels inside graphs as well. KERNEL_TRACE names the file; a line is: stream, start and end in ns, name.
// Source: CUPTI's documentation, Activity API.
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

enum { BUFFER_BYTES = 8 << 20 };
static FILE *trace;

static void check(CUptiResult result, const char *what) {
    const char *reason = "unknown";
    if (result == CUPTI_SUCCESS) return;
    cuptiGetResultString(result, &reason);
    fprintf(stderr, "error: kernel_trace: %s: %s\n", what, reason);
    exit(1);
}

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *bytes, size_t *max_records) {
    *buffer = (uint8_t *)aligned_alloc(8, BUFFER_BYTES);
    *bytes = *buffer ? BUFFER_BYTES : 0;
    *max_records = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t bytes, size_t valid) {
    CUpti_Activity *record = NULL;
    (void)context;
    (void)stream;
    (void)bytes;
    while (trace && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const CUpti_ActivityKernel9 *k = (const CUpti_ActivityKernel9 *)record;
            fprintf(trace, "%u\t%llu\t%llu\t%s\n", k->streamId, (unsigned long long)k->start, (unsigned long long)k->end, k->name);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const CUpti_ActivityMemcpy5 *c = (const CUpti_ActivityMemcpy5 *)record;
            fprintf(trace, "%u\t%llu\t%llu\tcopy %d, %s bytes\n", c->streamId, (unsigned long long)c->start, (unsigned long long)c->end, c->copyKind,
                    c->bytes < 1 << 20 ? "few" : "many");
        }
    }
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(1); // 1: also what is not complete; the program ends
    fclose(trace);
    trace = NULL; // for buffers that come late
}

int InitializeInjection(void) {
    const char *path = getenv("KERNEL_TRACE");
    trace = fopen(path ? path : "kernel_trace.tsv", "w");
    if (!trace) {
        perror("error: kernel_trace: cannot write the file that KERNEL_TRACE names");
        exit(1);
    }
    check(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "cuptiActivityRegisterCallbacks");
    check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "kernels");
    check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY), "copies");
    atexit(finish);
    return 1;
}

// device.h - where memory lives and in which order work happens: memory, streams, events, copies.
//
// Two implementations with the same names, device_cpu.cpp and device_cuda.cpp; the Makefile links one of them. No other
// file of the host code calls CUDA. Failures of the device end the program with a message; nothing returns an error.
//
// Order: work on one stream happens in the order of the calls. Two streams are ordered only by event_record on one and
// stream_wait_event on the other. The host sees a result only after stream_sync or event_sync.
#pragma once
#include "tensor.h"

typedef void *Stream; // null is never a valid stream of the CUDA backend; the CPU backend ignores the value
typedef void *Event;

typedef enum { COPY_TO_DEVICE, COPY_TO_HOST, COPY_ON_DEVICE } CopyKind;

typedef struct {
    char name[128];          // "NVIDIA H200", or the model of the CPU
    bool is_gpu;
    int compute_capability;  // 90 for 9.0; 0 on the CPU
    int driver_version;      // CUDA's number, 13000 for 13.0; 0 on the CPU
    int runtime_version;
    int64_t memory_bytes;    // of the GPU, or of this machine (container limit included)
    int threads;             // CPU threads that kernels may use
} DeviceInfo;

// What device `index` of this host is, without using it. False: there is none, or its driver does not answer. A planner needs no
// more, and may be called before device_init or without it.
bool device_probe(int index, DeviceInfo *info);

// Picks device `index` of this host and checks that driver, runtime and GPU fit together. Call once, first.
void device_init(int index);
DeviceInfo device_info(void);

void *device_malloc(int64_t bytes);       // contents undefined; 256-byte aligned
void device_free(void *p);                // CUDA waits for all streams first: never between the transfers of a pipeline, which wait for other ranks' hosts
void *pinned_malloc(int64_t bytes);       // host memory that copies to and from the device can run beside computation
void pinned_free(void *p);
// The same for gigabytes: zeros, touched by all threads, on whole pages, of which the first pinned_bytes are pinned, since that takes the
// system its time for each page. *pin false leaves all unpinned: copies then go through buffers of the driver, and the caller waits for
// them. Where pinning is refused, or nothing is to be pinned, *pin becomes false.
void *pinned_region_malloc(int64_t bytes, int64_t pinned_bytes, bool *pin);
void pinned_region_free(void *p, int64_t bytes, bool pinned);
int64_t device_allocated_bytes(void);     // by device_malloc, and counted by device_count, now
int64_t device_peak_bytes(void);          // the most that this was since the last device_peak_reset
void device_peak_reset(void);             // the peak is what is allocated now
void device_count(int64_t bytes);         // so many more (or, negative, fewer) of the device's bytes were allocated elsewhere for this program
int64_t device_free_bytes(void);          // what the device says is still free
int64_t device_frees(void);               // pieces given back by device_free so far: an address from before may be another's

Stream stream_create(void);
Stream stream_create_urgent(void);        // its kernels go before those of other streams: small ones that others wait for
void stream_destroy(Stream s);
void stream_sync(Stream s);               // the host waits for everything enqueued on s
void stream_wait_event(Stream s, Event e);

Event event_create(void);
void event_destroy(Event e);
void event_record(Event e, Stream s);
void event_sync(Event e);                 // the host waits for the work before the last event_record
double event_elapsed_ms(Event from, Event to);

void device_copy(void *dst, const void *src, int64_t bytes, CopyKind kind, Stream s);
void device_memset(void *p, int byte, int64_t bytes, Stream s);

// A job enqueues work on one stream, the same work whenever the bytes of its arguments are the same. Recorded, it becomes a graph, which
// is launched as a whole and cheaper for the host than its kernels one by one. A graph goes on doing what it was recorded
// with, whatever has changed since: addresses, sizes, numbers. The CPU backend, which has nothing to launch, keeps the arguments
// and calls the job with them, so that a graph which is used where it should not be does the same wrong there.
typedef void *Graph;
typedef void (*DeviceJob)(const void *args);
Graph graph_record(DeviceJob job, const void *args, int64_t bytes, Stream s); // does not do the work; the job neither waits nor allocates
void graph_launch(Graph g, Stream s);
void graph_free(Graph g);                 // null is none; work that is under way ends undisturbed

// device_cpu.h - inside the CPU backend: work that is pending on a stream, and who must wait for it.
//
// Kernels, copies and fills run on the host the moment they are called. Collectives do not: they start when they are
// enqueued and their results are put in place when somebody waits for them, as late as the rules of device.h allow, so that
// a program which forgets a wait goes wrong on a laptop too. Only the CPU kernels, device_cpu.cpp and comm_mpi.cpp include
// this file. All of it belongs to the thread that enqueues work.
//
// In DEBUG the backend is stricter than a GPU:
//  - Device addresses carry a mark that makes them useless until a kernel, a copy or a collective takes it off: the host
//    that reads device memory faults at once (x86-64: an address with bit 47 set and the ones above clear is none).
//  - What a collective will write, and the host's end of a copy to it, read as NaN until they are waited for.
//  - Work on two streams that touches the same memory without an event between is a bug that ends the program
//    (device_races.h).
#pragma once
#include "device.h"

#ifdef DEBUG
enum { DEVICE_STRICT = 1 };
#else
enum { DEVICE_STRICT = 0 };
#endif
#if defined(DEBUG) && defined(__x86_64__)
#define DEVICE_MARK ((uintptr_t)1 << 47)
#else
#define DEVICE_MARK ((uintptr_t)0)
#endif

// The address behind what device_malloc returned, or behind a place in it; host addresses stay.
static inline void *device_cpu_address(const void *p) { return (void *)((uintptr_t)p & ~DEVICE_MARK); }

// False only if p is certain not to be device memory.
static inline bool device_cpu_is_device(const void *p) { return ((uintptr_t)p & DEVICE_MARK) == DEVICE_MARK; }
static inline bool device_cpu_is_host(const void *p) { return ((uintptr_t)p & DEVICE_MARK) == 0; }

// Bytes that a piece of work touches; `at` without the mark.
typedef struct {
    const void *at;
    int64_t bytes;
    bool written;
} DeviceRange;

// Work that has been started and will be finished by a wait. The owner embeds this as the first field of its own struct.
typedef struct DeviceWork {
    DeviceRange range[2];                 // what it touches; unused ones have 0 bytes
    void (*finish)(struct DeviceWork *w); // waits for it, puts its results in place, frees w
    struct DeviceWork *next;              // from here on private to device_cpu.cpp
    uint64_t ticket;
} DeviceWork;

// Work `name` (a literal) is about to start on s: finishes what is pending there and touches the same memory, if either side
// writes it.
void device_cpu_order(const char *name, Stream s, const DeviceRange *range, int n);

// w has been started and is now the last work of s.
void device_cpu_enqueue(Stream s, DeviceWork *w);

// Work `name` (a literal) that is done at once touches these bytes, of the device or of the host: finishes everything that is
// pending on s. Returns the address to use; null stays null. s may be null: nothing is pending there.
void *device_cpu_touch(const char *name, Stream s, const void *at, int64_t bytes, bool written);

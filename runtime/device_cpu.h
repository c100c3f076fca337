// device_cpu.h - inside the CPU backend: work that is pending on a stream, and who must wait for it.
//
// Kernels, copies and fills run on the host the moment they are called. Collectives do not: they start when they are
// enqueued and their results are put in place when somebody waits for them, as late as the rules of device.h allow, so that
// a program which forgets a wait goes wrong on a laptop too. Only the CPU kernels, device_cpu.cpp and comm_mpi.cpp include
// this file. All of it belongs to the thread that enqueues work.
#pragma once
#include "device.h"

// Bytes that a piece of work touches.
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

// Finishes what is pending on s and touches the same memory, if either side writes it. Call before work is started.
void device_cpu_order(Stream s, const DeviceRange *range, int n);

// w has been started and is now the last work of s.
void device_cpu_enqueue(Stream s, DeviceWork *w);

// Work that is done at once touches these bytes of device memory, or of the host's: finishes what is pending on s. Returns the
// address to use; null stays null.
void *device_cpu_touch(Stream s, const void *at, int64_t bytes, bool written);

// Finishes everything that is pending on s. s may be null: nothing is pending there.
void device_cpu_settle(Stream s);

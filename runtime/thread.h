// thread.h - threads of our own beside the main one.
//
// A thread's stack would else be as large as `ulimit -s` says where the program is started: 8 MiB here, 256 KiB there,
// gigabytes elsewhere. Signals are the main thread's business; a new thread inherits that all are blocked.
#pragma once
#include <pthread.h>
#include <signal.h>

enum { THREAD_STACK = 2 << 20 }; // what glibc gives without a limit: libraries that are called from threads get by with it

// 0, or the error's number.
static inline int thread_start(pthread_t *thread, void *(*work)(void *), void *arg) {
    sigset_t all, before;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, THREAD_STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, &attr, work, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return error;
}

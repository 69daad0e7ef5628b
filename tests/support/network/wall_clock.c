/* A wall clock that is wrong, for one process tree: preloaded (LD_PRELOAD), it adds what the file WALL_CLOCK says, a
 * 64-bit number of nanoseconds, to each answer about the time of day. The file may change at any time; without one the
 * clock is right. Clocks that only run are left alone, and so is what the kernel waits for: whoever works out a point
 * of this clock and has the kernel wait for it waits as much too long. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_ns;

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("WALL_CLOCK");
    int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor < 0)
        return;
    void *mapped = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped != MAP_FAILED)
        offset_ns = mapped;
    close(descriptor);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (failed || !offset_ns || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return failed;
    int64_t ns = now->tv_sec * INT64_C(1000000000) + now->tv_nsec + *offset_ns;
    now->tv_sec = ns / INT64_C(1000000000);
    now->tv_nsec = ns % INT64_C(1000000000);
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict unused) {
    struct timespec exact;
    (void)unused;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *also) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (also)
        *also = exact.tv_sec;
    return exact.tv_sec;
}

// A team of threads that runs one function each and waits for all at a barrier: what a loop over time needs, where a
// step is a few microseconds and starting a parallel region for each would cost as much.
#pragma once
#include <sched.h>
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

struct fuse_team {
    int64_t members = 1;
    alignas(64) uint32_t arrived = 0;
    alignas(64) uint32_t round = 0;

    // Returns when all members have called it; what they wrote before is seen after. A member that waits long gives its
    // core away: where threads outnumber cores, the one it waits for may need it.
    void wait() {
        if (members == 1) return;
        const uint32_t now = __atomic_load_n(&round, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)members) {
            __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&round, now + 1, __ATOMIC_RELEASE);
            return;
        }
        for (int64_t spins = 0; __atomic_load_n(&round, __ATOMIC_ACQUIRE) == now; ++spins) {
            if (spins < 1024) {
                pause();
            } else {
                sched_yield();
            }
        }
    }

    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
};

// One member's share of a kernel; 0, or 1 where it found an index out of range.
using fuse_member = int (*)(char *const *args, fuse_team *team, int64_t member);

// Runs `share` on at most `wanted` threads, fewer where torch or OpenMP allows fewer; 1 where any share returned 1.
static inline int fuse_run_team(fuse_member share, char *const *args, int64_t wanted) {
    fuse_team team;
    int failed = 0;
#ifdef _OPENMP
    const int64_t most = omp_get_max_threads();
    if (wanted > most) wanted = most;
    if (wanted > 1) {
#pragma omp parallel num_threads((int)wanted) reduction(| : failed)
        {
#pragma omp single
            team.members = omp_get_num_threads();
            failed |= share(args, &team, omp_get_thread_num());
        }
        return failed;
    }
#endif
    return share(args, &team, 0);
}

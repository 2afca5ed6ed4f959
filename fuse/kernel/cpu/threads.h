// A team of threads that runs one function each and waits for all at a barrier: what a loop over time needs, where a
// step is a few microseconds and starting a parallel region for each would cost as much.
//
// A member that waits longer than a few microseconds sleeps until the last one arrives. Where it has waited longer than
// it has worked, other processes take processors away: the members go, and the first does the rest of the steps alone.
#pragma once
#include <stdint.h>
#include <time.h>
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

enum : int64_t {
    FUSE_SPIN = 50000,        // nanoseconds after which a member that waits gives its processor away
    FUSE_PATIENCE = 1000000,  // nanoseconds that members may wait beyond what they work
};

static inline int64_t fuse_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

struct fuse_team {
    int64_t members = 1;  // changed by the last one to arrive, while the others wait
    alignas(64) uint32_t arrived = 0;
    alignas(64) uint32_t round = 0;
    uint32_t asleep = 0, over = 0, is_left = 0;
    int64_t began = 0, waited = 0;

    // Returns when all members have called it; what they wrote before is seen after. False where this member is not needed
    // any more: the first one does what is left.
    bool wait(int64_t member) {
        if (members == 1) return member == 0;
        const uint32_t now = __atomic_load_n(&round, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)members) {
            __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
            if (__atomic_load_n(&is_left, __ATOMIC_RELAXED)) members = 1;
            __atomic_fetch_add(&round, 1, __ATOMIC_SEQ_CST);
            wake(&round);
        } else {
            int64_t spins = 0;
            while (spins < 64 && __atomic_load_n(&round, __ATOMIC_ACQUIRE) == now) {
                pause();
                ++spins;
            }
            if (spins == 64) wait_long(now);
        }
        return member < members;
    }

    // The last call of a member: those that are not needed any more sleep until the first is done.
    void end(int64_t member) {
        if (!wait(member)) {
            sleep_while(&over, 0);
        } else if (member == 0) {
            __atomic_store_n(&over, 1, __ATOMIC_SEQ_CST);
            wake(&over);
        }
    }

  private:
    __attribute__((noinline)) void wait_long(uint32_t now) {
        const int64_t start = fuse_now(), others = members - 1;
        do {
            for (int64_t spins = 0; spins < 64; ++spins) {
                if (__atomic_load_n(&round, __ATOMIC_ACQUIRE) != now) return;
                pause();
            }
        } while (fuse_now() - start < FUSE_SPIN);
        sleep_while(&round, now);
        const int64_t end = fuse_now();
        const int64_t late = __atomic_add_fetch(&waited, end - start, __ATOMIC_RELAXED) / others;
        const int64_t worked = end - began - late;
        if (late > FUSE_PATIENCE + others * worked) __atomic_store_n(&is_left, 1, __ATOMIC_RELAXED);
    }

    void sleep_while(uint32_t *word, uint32_t value) {
        __atomic_fetch_add(&asleep, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value) {
#ifdef __linux__
            syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
            sched_yield();
#endif
        }
        __atomic_fetch_sub(&asleep, 1, __ATOMIC_RELAXED);
    }

    // To be called after the word has changed: a member counts itself among those asleep before it looks at the word.
    void wake(uint32_t *word) {
#ifdef __linux__
        if (__atomic_load_n(&asleep, __ATOMIC_SEQ_CST)) {
            syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
        }
#endif
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
        team.began = fuse_now();
#pragma omp parallel num_threads((int)wanted) reduction(| : failed)
        {
            __atomic_store_n(&team.members, omp_get_num_threads(), __ATOMIC_RELAXED);  // all of them store the same
            failed |= share(args, &team, omp_get_thread_num());
            team.end(omp_get_thread_num());
        }
        return failed;
    }
#endif
    return share(args, &team, 0);
}

// A team of threads with a barrier, for loops over time: a step takes a few microseconds, as much as starting a
// parallel region.
//
// A member that waits longer than FUSE_SPIN sleeps until the last one arrives. If members have waited longer than they
// worked, other processes use the processors: then all but the first leave, and it runs the remaining steps alone.
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
    FUSE_SPIN = 50000,        // nanoseconds that a member spins before it sleeps
    FUSE_PATIENCE = 1000000,  // nanoseconds by which waiting may exceed work before the team is dissolved
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

    // The barrier: returns when all members have called it, and makes their writes visible. False if this member is no
    // longer needed, because the first member does the rest.
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

    // The last call of a member; members that are no longer needed sleep until the first is done.
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

    // Wakes sleeping members. Call it after the word has changed: a member counts itself as asleep before it reads the
    // word.
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

// The function of one member of the team; returns 0, or 1 if an index is out of range.
using fuse_member = int (*)(char *const *args, fuse_team *team, int64_t member);

// Runs `share` on at most `wanted` threads, or fewer if torch or OpenMP allows fewer; returns 1 if any member returns
// 1.
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

// The number of threads for each kernel, chosen from measured times of kernels.
//
//     all threads  --slower than half of them would be-->  half, a quarter, ... one  --after a pause-->  twice as many
//
// The threads of a kernel wait for each other. If other processes use the processors too, one of the threads often does not run,
// and the others wait for its next time slice. The time with fewer threads is measured while there are fewer. More threads are
// tried after a pause, which doubles each time. Results do not depend on the number of threads.

#include <cstdint>
#include <ctime>
#ifdef __linux__
#include <sched.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// A number shared by all calls of the process, which may run at the same time. Reads and writes are atomic; of two updates at
// the same time one may be lost.
template <typename Number>
struct Shared {
    Number value;

    operator Number() const {
        Number now;
        __atomic_load(&value, &now, __ATOMIC_RELAXED);
        return now;
    }
    void operator=(Number next) { __atomic_store(&value, &next, __ATOMIC_RELAXED); }
};

// All in nanoseconds.
constexpr double GRACE = 200e3;         // a loss of one kernel that does not count: threads have to wake
constexpr double START = 1e6;           // credit at the start: the time that all threads may lose before they gained any
constexpr double MOST = 10e6;           // the largest credit
constexpr int64_t SHORTEST = 20000000;  // the first pause
constexpr int64_t LONGEST = 1000000000;

// Time of a kernel with half of the threads, relative to all: expected, and the limits of the measured factor.
constexpr double HALF = 2, LEAST = 1.5, WORST = 8;

int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

int64_t processors() {
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
    return INT32_MAX;
}

// The least time of one kernel launch of a program.
struct Least {
    int64_t nanoseconds;  // with all `threads`; -1: the kernel runs on one thread
    int64_t threads;
};

// The threads for one run of a kernel: `members` of the `all` that it may use, which is `all` halved `halvings` times.
struct Turn {
    int64_t all, members, halvings;
};

class Crowd {
  public:
    // The threads for a kernel that begins now and may use `allowed`.
    Turn begin(int64_t now, int64_t allowed) {
        const int64_t level = level_at(now, allowed), all = allowed < available ? allowed : int64_t(available);
        return {all, all >> level ? all >> level : 1, level};
    }

    // Account for a kernel that took `elapsed` and ended now.
    void end(int64_t now, int64_t elapsed, Turn turn, Least &least) {
        if (turn.all == 1) return;
        if (turn.halvings == 0) {
            const bool is_known = least.threads == turn.all;
            if (!is_known || elapsed < least.nanoseconds) {
                least = {elapsed, turn.all};
            } else {
                least.nanoseconds += (elapsed - least.nanoseconds) / 64;  // the least time may have had its data in a cache
            }
            if (!is_known) return;
        }
        if (least.threads == turn.all) took(now, elapsed, double(least.nanoseconds) * turn.all / turn.members, turn);
    }

  private:
    Shared<int64_t> available{0}, halvings{0}, until{0}, pause{SHORTEST};
    Shared<double> credit{START}, slower{HALF}, expected{0}, spent{0};

    // How often the threads are halved now; one time fewer once the pause is over.
    int64_t level_at(int64_t now, int64_t allowed) {
        const int64_t level = halvings;
        if ((level == 0 && allowed <= available) || now < until) return level;
        available = processors();
        if (level == 0) {
            until = now + LONGEST;
            return 0;
        }
        slower = expected > 0 ? within(LEAST, spent / expected, WORST) : HALF;
        go_to(level - 1, now);
        credit = 0;
        return level - 1;
    }

    void go_to(int64_t level, int64_t now) {
        halvings = level;
        until = now + pause;
        expected = 0;
        spent = 0;
    }

    // Update the credit. `usual` is the expected time of the kernel with as many members on idle processors.
    void took(int64_t now, double elapsed, double usual, Turn turn) {
        if (turn.halvings) {
            expected = expected + usual / 2;
            spent = spent + elapsed;
        }
        if (turn.members == 1) return;
        const double gain = usual * slower - elapsed;
        const double sum = credit + (gain > 0 ? gain / 2 : gain < -GRACE ? gain : 0);
        slower = slower + (HALF - slower) / 256;
        credit = sum < MOST ? sum : MOST;
        if (sum >= MOST) pause = SHORTEST;
        if (sum >= 0) return;
        go_to(turn.halvings + 1, now);
        pause = 2 * pause < LONGEST ? 2 * pause : LONGEST;
    }

    static double within(double low, double x, double high) { return x < low ? low : x > high ? high : x; }
};

Crowd crowd;

}  // namespace

/* Waiting for other processes: a word in shared memory that a thread sleeps on, and that others change to wake it. */
#ifndef TRIPOOL_FUTEX_H
#define TRIPOOL_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_FUTEX 1
#else
#define HAVE_FUTEX 0
#endif

/* One line per sleeper. `polled`: another thread of its process looks for its work, so it need not be woken. */
typedef struct {
    _Atomic uint32_t word, asleep, polled;
} Signal;

/* After the store that the sleeper looks for. Either this sees `asleep`, or the sleeper sees the store. */
static void wake(Signal *s) {
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load(&s->asleep) || atomic_load(&s->polled)) return;
    atomic_fetch_add(&s->word, 1);
#if HAVE_FUTEX
    syscall(SYS_futex, &s->word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

/* Before the last look at what is waited for. */
static uint32_t prepare_sleep(Signal *s) {
    const uint32_t word = atomic_load(&s->word);
    atomic_store(&s->asleep, 1);
    atomic_thread_fence(memory_order_seq_cst);
    return word;
}

static void end_sleep(Signal *s) { atomic_store(&s->asleep, 0); }

/* Until it is woken, or for `ns`. */
static void sleep_on(Signal *s, uint32_t word, int64_t ns) {
    const struct timespec limit = {ns / 1000000000, ns % 1000000000};
#if HAVE_FUTEX
    syscall(SYS_futex, &s->word, FUTEX_WAIT, word, &limit, NULL, 0);
#else
    (void)word;
    nanosleep(&limit, NULL);
#endif
}

#endif

/* How far a copy loop may go before its thread returns to the interpreter. pace.py has the same structure. */
#include <stdint.h>
#include <time.h>

enum { OTHERS_WAIT = 1, STOP = 2 }; /* bits of `look` */
enum { LOOK_NS = 10000000 };        /* a thread returns after so long anyway, so that deadlines are looked at */

struct pace {
    uint64_t step_bytes, step_pieces;   /* between two looks */
    uint64_t slice_bytes, piece_cost;   /* a step of small pieces costs `piece_cost` bytes for each */
    uint64_t copied;                    /* bytes of the plan that are in place, in its order; others read it */
    uint64_t used;                      /* what the steps have cost since it was last set to 0, in bytes */
    uint32_t look;                      /* others write it while the loop runs */
};

static inline uint64_t nanoseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static inline void note_step(struct pace *p, uint64_t nbytes, uint64_t pieces)
{
    p->used += nbytes > pieces * p->piece_cost ? nbytes : pieces * p->piece_cost;
}

/* Whoever reads `copied` may read these bytes. */
static inline void note_copied(struct pace *p, uint64_t nbytes)
{
    __atomic_store_n(&p->copied, p->copied + nbytes, __ATOMIC_RELEASE);
}

static inline int must_return(struct pace *p)
{
    uint32_t look = __atomic_load_n(&p->look, __ATOMIC_RELAXED);

    return look & STOP || (look & OTHERS_WAIT && p->used >= p->slice_bytes);
}

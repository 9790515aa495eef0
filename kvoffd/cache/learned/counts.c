/* What one daemon leaves to the next: what was counted of classes, not which keys there were. */
#include "learned.h"

#include <string.h>

static const uint64_t MOST = (uint64_t)1 << 62; /* bytes, keys and requests that may have been counted */
static const double MOST_SUM = 1e30;

struct counts {
    uint32_t classes, bins;
    uint64_t lifetime, now, keys, requests;
    double past, returned[CLASSES][BINS], forgotten[CLASSES][BINS], accessed[CLASSES];
};

enum refusal { GOOD, CUT_OFF, OTHER_LAYOUT, OTHER_POOL, BAD_COUNTS };

uint64_t kvoffd_learned_counts_bytes(void)
{
    return sizeof(struct counts);
}

void kvoffd_learned_counts(const struct learned *l, struct counts *counts)
{
    counts->classes = CLASSES;
    counts->bins = BINS;
    counts->lifetime = l->known.lifetime;
    counts->now = l->known.now;
    counts->keys = l->known.keys;
    counts->requests = l->known.requests;
    counts->past = l->past;
    memcpy(counts->returned, l->returned, sizeof l->returned);
    memcpy(counts->forgotten, l->forgotten, sizeof l->forgotten);
    memcpy(counts->accessed, l->accessed, sizeof l->accessed);
}

static int all_counts(const double *values, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        if (!(values[i] >= 0 && values[i] <= MOST_SUM))
            return 0;
    return 1;
}

/* Goes on with the counts of an earlier daemon, before anything else. Returns why not, and has changed nothing then, or 0.
 * Lives that had not ended are left out: their keys are not known any more.
 */
uint64_t kvoffd_learned_restore(struct learned *l, const uint8_t *from, uint64_t nbytes)
{
    static struct counts counts;

    if (nbytes != sizeof counts)
        return CUT_OFF;
    memcpy(&counts, from, sizeof counts);
    if (counts.classes != CLASSES || counts.bins != BINS)
        return OTHER_LAYOUT;
    if (counts.lifetime != l->known.lifetime)
        return OTHER_POOL;
    if (!all_counts(counts.returned[0], CLASSES * BINS) || !all_counts(counts.forgotten[0], CLASSES * BINS) ||
        !all_counts(counts.accessed, CLASSES) || !all_counts(&counts.past, 1) || counts.now > MOST ||
        counts.keys > MOST || counts.requests > MOST)
        return BAD_COUNTS;
    l->known.now = counts.now;
    l->known.keys = counts.keys;
    l->known.requests = counts.requests;
    l->past = counts.past;
    enter_epoch(l);
    memcpy(l->returned, counts.returned, sizeof l->returned);
    memcpy(l->forgotten, counts.forgotten, sizeof l->forgotten);
    memcpy(l->accessed, counts.accessed, sizeof l->accessed);
    work_out(l);
    order_cells(l);
    plan_learning(l);
    return GOOD;
}

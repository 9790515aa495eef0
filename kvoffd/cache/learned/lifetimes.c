/* How long keys of each class take to come back, learned from those that did, and what a block of them is worth by it.
 *
 * A life begins when a request touches a key and ends when the next one does; of lives that go on, and of those that were
 * forgotten, it is known that they took longer (they are censored: Kaplan and Meier, "Nonparametric Estimation from
 * Incomplete Observations", 1958). What a block is worth is the most hits by some age for the room it takes until then,
 * both expected (J. C. Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979). Ages are in accessed bytes.
 */
#include "learned.h"

#include <string.h>

/* Of a block, in hits. */
static const double WRITE_COST = 0.03;
/* A class's hazard is as its group's until it had as many keys as so many mean requests. */
static const double PRIOR_REQUESTS = 60;
/* The same for a class's multiplier, in keys that came back. */
static const double MULTIPLIER_REQUESTS = 10;
/* A multiplier below 1 is believed of an age as far as keys of the class were watched at it, in mean requests: what was
 * asked for once a night does not come back at noon, and must not be taken for dead by that. */
static const double WATCHED_REQUESTS = 2;
static const double HIGHEST_HAZARD = 0.95;
/* What nobody was watched at is guessed. Blocks go as if so many came back in an age bin as in the one before: bins grow
 * with age, so that without evidence the oldest go first. They are stored as if so many came back in each, since a late
 * return is seen late. */
static const double HOPED = 0.01;

/* Standard deviations of a lead that may not be by chance: to take chance for a lead costs little, and there are few
 * requests in a lifetime. */
static const double SURE = 1;
/* A smaller one, in pools, is not worth it: what was learned is at its worst when the pool has just become full. */
static const double LEAST_LEAD = 0.15;
/* Of the lead, in a pool lifetime. */
static const double LEAD_KEPT = 1 - 1.0 / 256;
enum { FIRST_JUDGED = 8, MOST_STAYS = 1024 };

static double least(double a, double b)
{
    return a < b ? a : b;
}

static int bin_of(const struct learned *l, double age)
{
    int bin = BINS - 1;

    while (bin && l->edges[bin] > age)
        bin--;
    return bin;
}

int age_bin(const struct learned *l, uint64_t since)
{
    return bin_of(l, (double)(l->known.now - since));
}

uint64_t epoch_bytes(const struct learned *l)
{
    uint64_t bytes = l->known.lifetime / EPOCHS_IN_LIFETIME;

    return bytes ? bytes : 1;
}

void begin_lives(struct learned *l, const struct span *s, uint64_t keys)
{
    uint64_t epoch = s->since / epoch_bytes(l);

    if (epoch + EPOCHS_KEPT > l->epoch)
        l->open[s->kind][epoch % EPOCHS_KEPT] += keys * weight_of(s);
}

/* `ends`: by age bin, what kind of end it is; NULL for lives that should not have been counted. */
void end_lives(struct learned *l, const struct span *s, uint64_t keys, double *ends)
{
    uint64_t epoch = s->since / epoch_bytes(l);

    if (ends)
        ends[age_bin(l, s->since)] += keys * weight_of(s);
    if (epoch + EPOCHS_KEPT > l->epoch)
        l->open[s->kind][epoch % EPOCHS_KEPT] -= keys * weight_of(s);
}

/* Time has passed: lives that began too long ago are watched no more. */
void enter_epoch(struct learned *l)
{
    uint64_t now = l->known.now / epoch_bytes(l), first = l->epoch + 1;

    if (now > l->epoch + EPOCHS_KEPT)
        first = now - EPOCHS_KEPT + 1;
    for (uint64_t epoch = first; epoch <= now; epoch++)
        for (int kind = 0; kind < CLASSES; kind++) {
            double *lives = &l->open[kind][epoch % EPOCHS_KEPT];
            if (*lives > 0)
                l->forgotten[kind][BINS - 1] += *lives;
            *lives = 0;
        }
    l->epoch = now;
}

/* Bytes of keys of all classes that did not come back so far, by the age up to which they were watched. */
static void add_unseen(const struct learned *l, double unseen[CLASSES][BINS])
{
    uint64_t first = l->epoch < EPOCHS_KEPT ? 0 : l->epoch - EPOCHS_KEPT + 1;
    int bin[EPOCHS_KEPT];

    for (uint64_t epoch = first; epoch <= l->epoch; epoch++) {
        double age = (double)l->known.now - (double)(epoch * epoch_bytes(l)) - epoch_bytes(l) / 2;
        bin[epoch % EPOCHS_KEPT] = bin_of(l, age);
    }
    for (int kind = 0; kind < CLASSES; kind++) {
        memcpy(unseen[kind], l->forgotten[kind], sizeof unseen[kind]);
        for (uint64_t at = 0; at < EPOCHS_KEPT && at <= l->epoch; at++)
            if (l->open[kind][at] > 0)
                unseen[kind][bin[at]] += l->open[kind][at];
    }
}

/* Classes of one group are likely alike: those of one pause, and those of one kind where there are no pauses. */
static int group_of(int kind)
{
    if (kind >= APPENDED && kind < BRANCH)
        return CLASSES + 4 + (kind - APPENDED) / 8;
    if (kind >= CONTINUED && kind < APPENDED)
        return CLASSES + (kind - CONTINUED) / 6;
    return kind;
}

/* What a block is worth from one age on: the most hits that it brings by a later one, less those that it costs, for the
 * room that it takes until then. */
static double most_hits(const struct learned *l, const double hazard[BINS], int age, double cost)
{
    double alive = 1, hits = 0, room = 0, most = -1e300;

    for (int bin = age; bin < BINS - 1; bin++) {
        room += alive * (l->edges[bin + 1] - l->edges[bin]) * (1 - hazard[bin] / 2);
        hits += alive * hazard[bin];
        alive *= 1 - hazard[bin];
        if (hits - cost > most * room)
            most = (hits - cost) / room;
    }
    return most;
}

/* The part that came back of what was watched, as far as that is much beside what a guess counts as. */
static double hazard_of(double returned, double watched, double guess, double prior)
{
    return least(HIGHEST_HAZARD, (returned + prior * least(HIGHEST_HAZARD, guess)) / (watched + prior));
}

void work_out(struct learned *l)
{
    enum { GROUPS = CLASSES + 8 };
    static double unseen[CLASSES][BINS], at_risk[CLASSES][BINS]; /* one thread calls */
    double all_bytes = l->past + l->known.now;
    double mean = (all_bytes ? all_bytes : 1) / (double)(l->known.requests ? l->known.requests : 1);
    double prior = PRIOR_REQUESTS * mean, enough = MULTIPLIER_REQUESTS * mean, watched_enough = WATCHED_REQUESTS * mean;
    double common[BINS], hoped[BINS], events[CLASSES] = { 0 }, expected[CLASSES] = { 0 };
    double group_events[GROUPS] = { 0 }, group_expected[GROUPS] = { 0 };

    add_unseen(l, unseen);
    for (int kind = 0; kind < CLASSES; kind++) {
        double later = 0;
        for (int bin = BINS - 1; bin >= 0; bin--) {
            /* A life that is not watched to its end counts half in its last bin. */
            at_risk[kind][bin] = later + l->returned[kind][bin] + unseen[kind][bin] / 2;
            later += l->returned[kind][bin] + unseen[kind][bin];
        }
    }
    for (int bin = 0; bin < BINS; bin++) {
        double returned = 0, all = 0;
        for (int kind = 0; kind < CLASSES; kind++) {
            returned += l->returned[kind][bin];
            all += at_risk[kind][bin];
        }
        common[bin] = (returned + (bin ? common[bin - 1] : HOPED) * mean) / (all + mean);
        hoped[bin] = (returned + HOPED * mean) / (all + mean);
        for (int kind = 0; kind < CLASSES; kind++) {
            events[kind] += l->returned[kind][bin];
            expected[kind] += at_risk[kind][bin] * common[bin];
        }
    }
    for (int kind = 0; kind < CLASSES; kind++) {
        group_events[group_of(kind)] += events[kind];
        group_expected[group_of(kind)] += expected[kind];
    }
    for (int kind = 0; kind < CLASSES; kind++) {
        int group = group_of(kind);
        double of_group = (group_events[group] + enough) / (group_expected[group] + enough);
        double multiplier = (events[kind] + enough * of_group) / (expected[kind] + enough), hope[BINS];
        for (int bin = 0; bin < BINS; bin++) {
            double watched = at_risk[kind][bin] / (at_risk[kind][bin] + watched_enough);
            double factor = multiplier < 1 ? watched * multiplier + 1 - watched : multiplier;
            double own = l->returned[kind][bin], seen = at_risk[kind][bin];
            l->hazard[kind][bin] = hazard_of(own, seen, factor * common[bin], prior);
            hope[bin] = hazard_of(own, seen, factor * hoped[bin], prior);
        }
        l->admission_worth[kind] = most_hits(l, hope, 0, WRITE_COST);
        l->worth[kind][BINS - 1] = 0;
        for (int age = 0; age < BINS - 1; age++)
            l->worth[kind][age] = most_hits(l, l->hazard[kind], age, 0);
    }
}

/* Where an LRU would have had more hits, for longer than by chance, it is done as an LRU does for some lifetimes: loads
 * that are not told apart by any class are served worse by what was learned of classes. */
void judge(struct learned *l)
{
    if (l->known.now < l->judge_at || l->known.now < FIRST_JUDGED * l->known.lifetime)
        return;
    l->judge_at = l->known.now + l->known.lifetime;
    if (l->known.as_lru) {
        l->known.as_lru = 0;
        l->lead = l->lead_squares = 0;
        return;
    }
    int chance = l->lead * l->lead <= SURE * SURE * l->lead_squares;
    if (l->lead > LEAST_LEAD * l->known.lifetime && !chance) {
        l->known.as_lru = 1;
        l->judge_at = l->known.now + l->stays * l->known.lifetime;
        if (l->stays < MOST_STAYS)
            l->stays *= 2;
        return;
    }
    if (l->lead < 0 && !chance)
        l->stays = FEWEST_STAYS;
    l->lead *= LEAD_KEPT;
    l->lead_squares *= LEAD_KEPT;
}

/* State of the policy `learned`: spans of keys, the cells that order them, and how long keys take to return.
 *
 * learned.py owns one `struct learned` and calls the functions that begin with kvoffd_. Not thread-safe. A key is
 * identified by a hash of 64 bits, never 0, and nothing else of it is stored. Two keys with equal hashes are confused:
 * with 100 million keys that happens in one of 3,700 daemons, and costs one wrong decision about a block.
 */
#define WORDS 2 /* struct place */
#include "../system/slot_index.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BINS = 17, /* age bins of a class */
    CLASSES = 77,
    CELLS = CLASSES * BINS,
    EPOCHS_IN_LIFETIME = 4, /* lives that began in one epoch are counted together */
    EPOCHS_KEPT = 320,
    AHEAD = 8, /* distance in keys from a lookup to its prefetch */
    MOST_SEEN = UINT16_MAX, /* limit of sightings and turns */
    PAGE = 4096,
};

/* Classes of keys. learned.py describes them. */
enum {
    RECOVERED = 0, /* blocks of an earlier daemon whose keys are unknown */
    STORED = 1, /* stored keys that no lookup requested, such as generated text */
    LAST = 2, /* the last part of a prompt, behind its last whole unit */
    SHARED = 3, /* by sightings: 6 */
    CONTINUED = 9, /* known keys of a conversation, by pause, turn and new text: 4 x 2 x 3 */
    APPENDED = 33, /* new keys of a conversation: 4 x 2 x 4 */
    BRANCH = 65, /* new keys behind a known part that other requests continued differently, by number: 6 */
    FIRST = 71, /* new keys of a new conversation, by number: 6 */
};

/* Consecutive keys of one chain that the same request touched last and that have the same class. A later request takes
 * keys from the front, and forgetting from the back: keys have places, of which [low, high) remain. Spans are
 * identified by number; 0 means none. */
struct span {
    struct keys *keys;
    uint64_t since; /* accessed bytes when the lives of its keys began */
    uint32_t pages; /* pages of a block */
    uint32_t seen; /* last walk that visited it */
    uint32_t low, top, high; /* places from `top` on have no blocks */
    uint32_t held; /* number of blocks */
    uint32_t previous, next; /* neighbours in the cell while it has blocks */
    uint16_t sightings; /* requests that saw the keys */
    uint16_t turn; /* number of the request in its conversation; 0 for stored keys */
    uint32_t behind; /* number of the request's keys behind `high` */
    uint32_t before, child; /* neighbours in the request */
    uint32_t older, younger; /* neighbours in the order in which spans are forgotten */
    uint8_t kind; /* class */
    uint8_t age_bin;
    uint8_t met : 1; /* found by the current request */
    uint8_t old : 1; /* older than the remembered history: keys that lose their block are forgotten */
    uint8_t closed : 1; /* a store of its keys was rejected, which rejects the later keys of its request too */
};

/* A span's keys. */
struct keys {
    uint32_t base, room; /* place of the first key, and number of keys */
    uint64_t hashes[]; /* followed by the handles of their blocks, 0 for none */
};

/* Location of a key. */
struct place {
    uint64_t hash; /* 0 if the entry is empty */
    uint32_t span, place;
};

struct row { /* ordered spans, linked by two of their fields */
    uint32_t first, last;
};

/* Fields that learned.py reads, and sets to continue with an earlier daemon's state. */
struct known {
    uint64_t lifetime; /* bytes that the pool holds */
    uint64_t now; /* bytes accessed so far */
    uint64_t requests; /* requests that accessed them */
    uint64_t known_keys, blocks, spans;
    uint64_t known_bytes; /* bytes that blocks of all known keys have, or would have */
    uint64_t nbytes; /* memory of the policy */
    uint64_t as_lru; /* set by learned.py: evict as an LRU, and admit everything */
    double lowest; /* lowest score of a block at the last offer; INFINITY if there was none */
};

/* Counters and the scores computed from them; learned.py reads them, and sets the first three. */
struct counts {
    double returned[CLASSES][BINS], forgotten[CLASSES][BINS]; /* bytes of lives by the age at which they ended */
    double accessed[CLASSES]; /* bytes of the requests' keys, by the class that they got */
    double hazard[CLASSES][BINS]; /* chance to return in each age bin, if not returned before */
    double score[CLASSES][BINS]; /* expected hits per accessed byte until they occur */
    double edges[BINS]; /* accessed bytes at which age bins begin */
    uint64_t cell_bytes[CELLS]; /* bytes of blocks by class and age bin */
};

struct learned {
    struct known known;
    struct counts counts;
    double admission_score[CLASSES];
    struct slot_index places; /* places of known keys */
    struct span *spans; /* [span_room] by number; those from `span_top` on were never used */
    uint32_t span_room, span_top, unused_spans; /* unused spans are linked by `child` */
    uint64_t keys_bytes; /* memory of all spans' keys */
    struct row oldest; /* spans that are not old, in the order in which they are forgotten */
    uint64_t age_at, learn_at, learn_after, learned_at, epoch;
    uint32_t aged; /* cells whose spans were moved since `age_at` */
    double open[CLASSES][EPOCHS_KEPT]; /* bytes of unfinished lives by the epoch in which they began */
    struct row cells[CELLS]; /* spans that have blocks, by class and age bin; the oldest first */
    uint16_t rank[CELLS], by_rank[CELLS]; /* ranks by ascending score */
    uint64_t filled[(CELLS + 63) / 64]; /* bit set of the ranks of non-empty cells */
    uint32_t walks;
    uint64_t recorded_keys, recorded_bytes; /* recorded keys and bytes of the current request */
    void *scratch;
    uint64_t scratch_bytes;
};

/* --- memory and the table of keys --- */

/* Returns memory for the current call. Memory from earlier calls becomes invalid. */
static void *scratch(struct learned *l, uint64_t nbytes)
{
    if (nbytes > l->scratch_bytes || !l->scratch) {
        free(l->scratch);
        l->scratch = or_end(malloc(nbytes + 1)); /* so that 0 bytes succeed too */
        l->scratch_bytes = nbytes;
    }
    return l->scratch;
}

/* Returns the place of a key, or an empty place. */
static struct place *find_place(const struct learned *l, uint64_t hash)
{
    struct place *there = (struct place *)home(&l->places, hash);

    while (there->hash && there->hash != hash)
        there++;
    return there;
}

/* Prefetches the place of a key. */
static void fetch_place(const struct learned *l, uint64_t hash)
{
    __builtin_prefetch(home(&l->places, hash));
}

/* Sets the place of a key, which may be new. */
static void set_place(struct learned *l, uint64_t hash, uint32_t span, uint32_t place)
{
    struct place *there = find_place(l, hash);

    if (!there->hash) {
        there = (struct place *)new_place(&l->places, hash);
        l->known.known_keys++;
    }
    *there = (struct place){ .hash = hash, .span = span, .place = place };
}

/* Forgets a key if it belongs to this span. */
static void remove_place(struct learned *l, uint64_t hash, uint32_t span)
{
    struct place *there = find_place(l, hash);

    if (!there->hash || there->span != span)
        return;
    remove_at(&l->places, &there->hash);
    l->known.known_keys--;
}

/* Returns the bytes of a block. */
static uint64_t weight_of(const struct span *s)
{
    return (uint64_t)s->pages * PAGE;
}

/* Returns the address of a key's hash; the hashes of later keys follow. */
static uint64_t *hash_at(struct span *s, uint32_t place)
{
    return &s->keys->hashes[place - s->keys->base];
}

/* Returns the address of the handle of a key's block; the handles of later keys follow. */
static uint32_t *handle_at(struct span *s, uint32_t place)
{
    return (uint32_t *)(s->keys->hashes + s->keys->room) + (place - s->keys->base);
}

/* --- how long keys take to return --- */

/* Estimated from the keys that did return, and used to score the blocks.
 *
 * A life of a key begins when a request touches it and ends when the next one does. Unfinished and forgotten lives are
 * known to take longer than they were watched: they are censored (Kaplan and Meier, "Nonparametric Estimation from
 * Incomplete Observations", 1958). A block's score is the maximum over ages of the expected hits up to that age, per
 * expected space used until then (J. C. Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979). Ages are in
 * accessed bytes.
 */

/* Cost of storing a block, in hits. */
static const double WRITE_COST = 0.03;
/* Weight of a group's hazard in that of a class, in keys of this many mean requests. */
static const double PRIOR_REQUESTS = 60;
/* The same for a class's multiplier, in keys that returned. */
static const double MULTIPLIER_REQUESTS = 10;
/* Weight, in mean requests, against a multiplier below 1 at ages at which few keys of the class were watched: text that
 * is requested once a night does not return at noon, which is no evidence that it never does. */
static const double WATCHED_REQUESTS = 2;
static const double HIGHEST_HAZARD = 0.95;
/* Guess for ages without evidence. For eviction, an age bin without evidence gets the hazard of the bin before: bins
 * grow with age, so the oldest blocks go first. For admission, each such bin gets this hazard, because late returns are
 * seen late.
 */
static const double HOPED = 0.01;

static int bin_of(const struct learned *l, double age)
{
    int bin = BINS - 1;

    while (bin && l->counts.edges[bin] > age)
        bin--;
    return bin;
}

static int age_bin(const struct learned *l, uint64_t since)
{
    return bin_of(l, (double)(l->known.now - since));
}

static uint64_t epoch_bytes(const struct learned *l)
{
    uint64_t bytes = l->known.lifetime / EPOCHS_IN_LIFETIME;

    return bytes ? bytes : 1;
}

static void begin_lives(struct learned *l, const struct span *s, uint64_t keys)
{
    uint64_t epoch = s->since / epoch_bytes(l);

    if (epoch + EPOCHS_KEPT > l->epoch)
        l->open[s->kind][epoch % EPOCHS_KEPT] += keys * weight_of(s);
}

/* Ends lives. `ends`: counter by age bin for this kind of end; NULL if the lives should not count. */
static void end_lives(struct learned *l, const struct span *s, uint64_t keys, double *ends)
{
    uint64_t epoch = s->since / epoch_bytes(l);

    if (ends)
        ends[age_bin(l, s->since)] += keys * weight_of(s);
    if (epoch + EPOCHS_KEPT > l->epoch)
        l->open[s->kind][epoch % EPOCHS_KEPT] -= keys * weight_of(s);
}

/* Enters the current epoch: lives that began too long ago are not watched any more. */
static void enter_epoch(struct learned *l)
{
    uint64_t now = l->known.now / epoch_bytes(l), first = l->epoch + 1;

    if (now > l->epoch + EPOCHS_KEPT)
        first = now - EPOCHS_KEPT + 1;
    for (uint64_t epoch = first; epoch <= now; epoch++)
        for (int kind = 0; kind < CLASSES; kind++) {
            double *lives = &l->open[kind][epoch % EPOCHS_KEPT];
            if (*lives > 0)
                l->counts.forgotten[kind][BINS - 1] += *lives;
            *lives = 0;
        }
    l->epoch = now;
}

/* Adds up the bytes of keys that did not return so far, by class and the age up to which they were watched. */
static void add_unseen(const struct learned *l, double unseen[CLASSES][BINS])
{
    uint64_t first = l->epoch < EPOCHS_KEPT ? 0 : l->epoch - EPOCHS_KEPT + 1;
    int bin[EPOCHS_KEPT];

    for (uint64_t epoch = first; epoch <= l->epoch; epoch++) {
        double age = (double)l->known.now - (double)(epoch * epoch_bytes(l)) - epoch_bytes(l) / 2;
        bin[epoch % EPOCHS_KEPT] = bin_of(l, age);
    }
    for (int kind = 0; kind < CLASSES; kind++) {
        memcpy(unseen[kind], l->counts.forgotten[kind], sizeof unseen[kind]);
        for (uint64_t at = 0; at < EPOCHS_KEPT && at <= l->epoch; at++)
            if (l->open[kind][at] > 0)
                unseen[kind][bin[at]] += l->open[kind][at];
    }
}

/* Returns the group of a class. Classes of a group are likely similar: they have the same pause, or else kind. */
static int group_of(int kind)
{
    if (kind >= APPENDED && kind < BRANCH)
        return CLASSES + 4 + (kind - APPENDED) / 8;
    if (kind >= CONTINUED && kind < APPENDED)
        return CLASSES + (kind - CONTINUED) / 6;
    return kind;
}

/* Returns a block's score from an age on: the most expected hits less `cost`, per space used, by any later age. */
static double most_hits(const struct learned *l, const double hazard[BINS], int age, double cost)
{
    double alive = 1, hits = 0, space = 0, most = -1e300;

    for (int bin = age; bin < BINS - 1; bin++) {
        space += alive * (l->counts.edges[bin + 1] - l->counts.edges[bin]) * (1 - hazard[bin] / 2);
        hits += alive * hazard[bin];
        alive *= 1 - hazard[bin];
        if (hits - cost > most * space)
            most = (hits - cost) / space;
    }
    return most;
}

/* Returns the returned part of the watched bytes, combined with a guess that weighs `prior` bytes. */
static double hazard_of(double returned, double watched, double guess, double prior)
{
    return fmin(HIGHEST_HAZARD, (returned + prior * fmin(HIGHEST_HAZARD, guess)) / (watched + prior));
}

static void work_out(struct learned *l)
{
    enum { GROUPS = CLASSES + 8 };
    static double unseen[CLASSES][BINS], at_risk[CLASSES][BINS]; /* static is safe: only one thread calls */
    double all_bytes = l->known.now;
    double mean = (all_bytes ? all_bytes : 1) / (double)(l->known.requests ? l->known.requests : 1);
    double prior = PRIOR_REQUESTS * mean, enough = MULTIPLIER_REQUESTS * mean, watched_enough = WATCHED_REQUESTS * mean;
    double common[BINS], hoped[BINS], events[CLASSES] = { 0 }, expected[CLASSES] = { 0 };
    double group_events[GROUPS] = { 0 }, group_expected[GROUPS] = { 0 };

    add_unseen(l, unseen);
    for (int kind = 0; kind < CLASSES; kind++) {
        double later = 0;
        for (int bin = BINS - 1; bin >= 0; bin--) {
            /* A life that was not watched to its end counts half in its last bin. */
            at_risk[kind][bin] = later + l->counts.returned[kind][bin] + unseen[kind][bin] / 2;
            later += l->counts.returned[kind][bin] + unseen[kind][bin];
        }
    }
    for (int bin = 0; bin < BINS; bin++) {
        double returned = 0, all = 0;
        for (int kind = 0; kind < CLASSES; kind++) {
            returned += l->counts.returned[kind][bin];
            all += at_risk[kind][bin];
        }
        common[bin] = (returned + (bin ? common[bin - 1] : HOPED) * mean) / (all + mean);
        hoped[bin] = (returned + HOPED * mean) / (all + mean);
        for (int kind = 0; kind < CLASSES; kind++) {
            events[kind] += l->counts.returned[kind][bin];
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
            double own = l->counts.returned[kind][bin], seen = at_risk[kind][bin];
            l->counts.hazard[kind][bin] = hazard_of(own, seen, factor * common[bin], prior);
            hope[bin] = hazard_of(own, seen, factor * hoped[bin], prior);
        }
        l->admission_score[kind] = most_hits(l, hope, 0, WRITE_COST);
        l->counts.score[kind][BINS - 1] = 0;
        for (int age = 0; age < BINS - 1; age++)
            l->counts.score[kind][age] = most_hits(l, l->counts.hazard[kind], age, 0);
    }
}

/* --- eviction order: by age within cells, and cells by their score --- */

enum { NEAR = 64, MOVED_AT_ONCE = 512, AGINGS = 32, MOVED_CELLS = CLASSES * (BINS - 1) };
static const uint64_t LOWEST = 2047; /* mask that covers all cell numbers */
_Static_assert(CELLS <= 2048, "the number of a cell has eleven bits");

static uint32_t cell_of(const struct span *s)
{
    return s->kind * BINS + s->age_bin;
}

/* Links a span into its cell behind another one, or first if `before` is 0. */
static void link_in(struct learned *l, uint32_t number, uint32_t before)
{
    struct span *own = &l->spans[number];
    struct row *row = &l->cells[cell_of(own)];

    own->previous = before;
    own->next = before ? l->spans[before].next : row->first;
    *(before ? &l->spans[before].next : &row->first) = number;
    *(own->next ? &l->spans[own->next].previous : &row->last) = number;
}

static void set_filled(struct learned *l, uint32_t cell)
{
    uint64_t bit = (uint64_t)1 << (l->rank[cell] & 63), *word = &l->filled[l->rank[cell] >> 6];

    *word = l->cells[cell].first ? *word | bit : *word & ~bit;
}

/* Puts a span that has blocks into its cell, ordered by age within the last NEAR spans. */
static void fill_cell(struct learned *l, uint32_t number)
{
    uint32_t cell = cell_of(&l->spans[number]), before = l->cells[cell].last;

    for (int steps = 0; before && l->spans[before].since > l->spans[number].since && steps < NEAR; steps++)
        before = l->spans[before].previous;
    link_in(l, number, before);
    set_filled(l, cell);
}

/* Takes a span out of its cell because it loses its blocks, or moves to another cell. */
static void leave_cell(struct learned *l, uint32_t number)
{
    struct span *own = &l->spans[number];
    struct row *row = &l->cells[cell_of(own)];

    *(own->previous ? &l->spans[own->previous].next : &row->first) = own->next;
    *(own->next ? &l->spans[own->next].previous : &row->last) = own->previous;
    own->previous = own->next = 0;
    set_filled(l, cell_of(own));
}

/* Counts blocks that a span in a cell got, or lost if `blocks` is negative. */
static void add_blocks(struct learned *l, const struct span *s, int64_t blocks)
{
    l->counts.cell_bytes[cell_of(s)] += blocks * (int64_t)weight_of(s);
}

/* Moves spans whose age bin has ended to the next bin, a limited number at a time. */
static void move_cells(struct learned *l)
{
    if (l->aged == MOVED_CELLS && l->known.now >= l->age_at) {
        l->age_at = l->known.now + l->known.lifetime / AGINGS;
        l->aged = 0;
    }
    for (int moved = 0; l->aged < MOVED_CELLS; l->aged++) {
        uint32_t kind = l->aged / (BINS - 1), bin = BINS - 2 - l->aged % (BINS - 1), number;
        double limit = (double)l->known.now - l->counts.edges[bin + 1];
        while ((number = l->cells[kind * BINS + bin].first) && l->spans[number].since <= limit) {
            if (moved++ == MOVED_AT_ONCE)
                return;
            leave_cell(l, number);
            add_blocks(l, &l->spans[number], -(int64_t)l->spans[number].held);
            l->spans[number].age_bin++;
            add_blocks(l, &l->spans[number], l->spans[number].held);
            fill_cell(l, number);
        }
    }
}

static int by_value(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

    return a < b ? -1 : a > b;
}

/* Sorts the cells after their scores have changed. */
static void order_cells(struct learned *l)
{
    uint64_t keys[CELLS];

    /* The sort key has the bits of a score, which is never negative, except for the lowest bits, which are too small to
     * matter: these put the oldest first. */
    for (int cell = 0; cell < CELLS; cell++) {
        memcpy(&keys[cell], &l->counts.score[cell / BINS][cell % BINS], sizeof *keys);
        keys[cell] = (keys[cell] & ~LOWEST) + (BINS - 1 - cell % BINS) * CLASSES + cell / BINS;
    }
    qsort(keys, CELLS, sizeof *keys, by_value);
    memset(l->filled, 0, sizeof l->filled);
    for (int rank = 0; rank < CELLS; rank++) {
        uint64_t place = keys[rank] & LOWEST;
        uint16_t cell = place % CLASSES * BINS + BINS - 1 - place / CLASSES;
        l->by_rank[rank] = cell;
        l->rank[cell] = rank;
        set_filled(l, cell);
    }
}

/* --- spans, and the order in which they are forgotten --- */

enum { REMEMBERED_POOLS = 16, GHOST_DIVISOR = 50, FEWEST = 1024, WASTED = 32 };
enum { FORGOTTEN_AT_ONCE = 2048 };

/* Returns the memory of a span's keys, including malloc's overhead. */
static uint64_t keys_bytes(uint32_t keys)
{
    uint64_t nbytes = sizeof(struct keys) + keys * (sizeof(uint64_t) + sizeof(uint32_t)) + sizeof(size_t);

    return (nbytes + 15) / 16 * 16;
}

/* Allocates a span's keys, the first at the place `low`, and copies `count` of them. */
static void make_keys(struct learned *l, struct span *s, const uint64_t *hashes, const uint32_t *handles, uint32_t count)
{
    s->keys = or_end(malloc(sizeof *s->keys + count * (sizeof *hashes + sizeof *handles)));
    s->keys->base = s->low;
    s->keys->room = count;
    l->keys_bytes += keys_bytes(count);
    memcpy(s->keys->hashes, hashes, count * sizeof *hashes);
    if (handles)
        memcpy(s->keys->hashes + count, handles, count * sizeof *handles);
    else
        memset(s->keys->hashes + count, 0, count * sizeof *handles);
}

static void free_keys(struct learned *l, struct keys *keys)
{
    l->keys_bytes -= keys_bytes(keys->room);
    free(keys);
}

/* Returns a new span without keys, whose other fields are 0. */
static uint32_t new_span(struct learned *l, uint64_t weight)
{
    uint32_t number = l->unused_spans;

    if (number) {
        l->unused_spans = l->spans[number].child;
    } else {
        number = l->span_top++;
        if (number == l->span_room) { /* large memory moves without a copy */
            l->span_room *= 2;
            l->spans = or_end(realloc(l->spans, l->span_room * sizeof *l->spans));
        }
    }
    memset(&l->spans[number], 0, sizeof *l->spans);
    l->spans[number].pages = (weight < l->known.lifetime ? weight : l->known.lifetime) / PAGE;
    l->known.spans++;
    return number;
}

/* Gives a span its keys, without blocks, and sets their places. */
static void set_keys(struct learned *l, uint32_t number, const uint64_t *hashes, uint32_t count)
{
    struct span *s = &l->spans[number];

    s->high = count;
    make_keys(l, s, hashes, NULL, count);
    for (uint32_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            fetch_place(l, hashes[i + AHEAD]);
        set_place(l, hashes[i], number, i);
    }
}

/* Begins a span whose keys' lives began at `since`. It is not linked into any order yet. */
static uint32_t begin_span(struct learned *l, const uint64_t *hashes, uint32_t count, int kind, uint64_t weight, uint64_t since)
{
    uint32_t number = new_span(l, weight);
    struct span *s = &l->spans[number];

    s->since = since;
    s->sightings = 1;
    s->kind = kind;
    set_keys(l, number, hashes, count);
    l->known.known_bytes += count * weight_of(s);
    begin_lives(l, s, count);
    return number;
}

static void leave_order(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    *(s->older ? &l->spans[s->older].younger : &l->oldest.first) = s->younger;
    *(s->younger ? &l->spans[s->younger].older : &l->oldest.last) = s->older;
    s->older = s->younger = 0;
}

/* Links a span into the order of forgetting, before another one or, if that is 0, as the youngest. */
static void link_before(struct learned *l, uint32_t number, uint32_t younger)
{
    struct span *s = &l->spans[number];

    s->younger = younger;
    s->older = younger ? l->spans[younger].older : l->oldest.last;
    *(s->older ? &l->spans[s->older].younger : &l->oldest.first) = number;
    *(younger ? &l->spans[younger].older : &l->oldest.last) = number;
}

/* Removes a span without keys. */
static void bury(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (!s->old)
        leave_order(l, number);
    if (s->before)
        l->spans[s->before].child = s->child;
    if (s->child)
        l->spans[s->child].before = s->before;
    free_keys(l, s->keys);
    memset(s, 0, sizeof *s);
    s->child = l->unused_spans;
    l->unused_spans = number;
    l->known.spans--;
}

/* Recounts the blocks of a span. */
static void count_blocks(struct span *s)
{
    s->held = 0;
    s->top = s->low;
    for (uint32_t i = s->low; i < s->high; i++)
        if (*handle_at(s, i)) {
            s->held++;
            s->top = i + 1;
        }
}

/* Moves the keys of a span that has lost some to smaller arrays if much is unused; removes the span if none is left. */
static void compact(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];
    struct keys *before = s->keys;

    if (s->low == s->high) {
        bury(l, number);
        return;
    }
    uint32_t wasted = before->room - (s->high - s->low);
    if (wasted < WASTED || wasted < s->high - s->low)
        return;
    make_keys(l, s, hash_at(s, s->low), handle_at(s, s->low), s->high - s->low);
    free_keys(l, before);
}

/* Forgets up to `most` of the span's last keys, behind its last block; returns how many. */
static uint32_t forget_tail(struct learned *l, uint32_t number, uint64_t most)
{
    struct span *s = &l->spans[number];
    uint32_t keys = s->high - s->top < most ? s->high - s->top : most;

    if (!keys)
        return 0;
    for (uint32_t i = s->high - keys; i < s->high; i++) {
        if (i + AHEAD < s->high)
            fetch_place(l, *hash_at(s, i + AHEAD));
        remove_place(l, *hash_at(s, i), number);
    }
    end_lives(l, s, keys, l->counts.forgotten[s->kind]);
    l->known.known_bytes -= keys * weight_of(s);
    s->behind += keys;
    s->high -= keys;
    compact(l, number);
    return keys;
}

/* Corrects `top` after keys of a span got or lost blocks, or were taken; then shrinks the span. */
static void settle_span(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (s->top < s->low || !s->held)
        s->top = s->low;
    while (s->top > s->low && !*handle_at(s, s->top - 1))
        s->top--;
    if (!s->old || !forget_tail(l, number, UINT32_MAX))
        compact(l, number);
}

/* Splits a span before a place that is not its first; returns the span of the later keys. */
static uint32_t split_span(struct learned *l, uint32_t number, uint32_t place)
{
    uint32_t rest = new_span(l, weight_of(&l->spans[number])), had = l->spans[number].held;
    struct span *s = &l->spans[number], *r = &l->spans[rest];
    uint32_t count = s->high - place;

    *r = *s;
    r->low = r->previous = r->next = r->older = r->younger = 0;
    r->before = number;
    if (r->child)
        l->spans[r->child].before = rest;
    s->child = rest;
    set_keys(l, rest, hash_at(s, place), count);
    memcpy(handle_at(r, 0), handle_at(s, place), count * sizeof(uint32_t));
    s->high = place;
    s->behind += count;
    count_blocks(r);
    count_blocks(s);
    if (!r->old)
        link_before(l, rest, number);
    if (r->held)
        link_in(l, rest, number);
    if (had && !s->held)
        leave_cell(l, number);
    settle_span(l, number);
    return rest;
}

/* Takes the first keys out of a span, and writes the handles of their blocks. The keys' places become invalid. */
static void take_keys(struct learned *l, uint32_t number, uint32_t count, uint32_t *handles)
{
    struct span *s = &l->spans[number];
    uint32_t had = s->held;

    memcpy(handles, handle_at(s, s->low), count * sizeof *handles);
    for (uint32_t i = 0; i < count && s->held; i++)
        s->held -= handles[i] != 0;
    add_blocks(l, s, (int64_t)s->held - had);
    l->known.known_bytes -= count * weight_of(s);
    s->low += count;
    if (had && !s->held)
        leave_cell(l, number);
    settle_span(l, number);
}

/* Forgets the oldest keys while too many are remembered. `added`: keys that were added, or lost their blocks. */
static void forget_some(struct learned *l, uint64_t added)
{
    uint64_t most_bytes = (1 + REMEMBERED_POOLS) * l->known.lifetime, most = FORGOTTEN_AT_ONCE + 2 * added;

    for (uint64_t done = 0; done < most; done++) {
        /* Keys with blocks do not count: the pool limits them. */
        uint64_t ghosts = l->known.known_keys - l->known.blocks;
        uint64_t nbytes = ghosts * (2 * sizeof(struct place) + 12) + l->known.spans * (sizeof(struct span) + keys_bytes(0));
        uint32_t number = l->oldest.first;
        if (!number || (l->known.known_bytes <= most_bytes && nbytes <= l->known.lifetime / GHOST_DIVISOR))
            break;
        if (l->spans[number].high - l->spans[number].top <= most - done) {
            leave_order(l, number);
            l->spans[number].old = 1;
        }
        done += forget_tail(l, number, most - done);
    }
    l->known.nbytes = sizeof *l + l->places.nbytes + l->span_top * sizeof *l->spans + l->keys_bytes;
}

/* --- spans and classes of the keys that requests look up and stores offer --- */

/* Unit for amounts of text, and the most tokens that a request may omit of the one that it continues. */
enum { UNIT_TOKENS = 512 };
enum { FEWEST_LEARNED = 40, MEMORY_REQUESTS = 8000, EVIDENCE_PART = 50, TIME_PART = 32 };

static const uint32_t NEW_UNITS[] = { 2, 4, 8, 16, 32 }, SIGHTINGS[] = { 1, 2, 3, 4, 8 };
static const double PAUSES[] = { 0.5, 2, 8 }; /* in pool lifetimes */

#define LENGTH(array) (int)(sizeof(array) / sizeof *(array))

/* Returns how many of the limits are at most `value`. */
static int step_of(uint64_t value, const uint32_t *limits, int count)
{
    int step = 0;

    while (step < count && limits[step] <= value)
        step++;
    return step;
}

/* --- keys --- */

/* Writes the hashes of `count` concatenated keys. `name` distinguishes equal keys of different groups. */
static void hash_keys(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                   uint64_t *hashes)
{
    for (uint64_t i = 0; i < count; i++, keys += key_bytes) {
        uint64_t found = hash_of(&l->places, name, keys, key_bytes);
        hashes[i] = found ? found : 1;
    }
}

/* The same for keys that are given from the last to the first. */
static void hash_backwards(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                           uint64_t *hashes)
{
    for (uint64_t i = 0; i < count; i++)
        hash_keys(l, name, keys + (count - 1 - i) * key_bytes, 1, key_bytes, hashes + i);
}

/* Removes repeated hashes; returns how many are left. The size of `seen` is a power of two above `count`. */
static uint64_t leave_out_repeats(uint64_t *hashes, uint64_t count, uint32_t *seen, uint64_t room)
{
    uint64_t kept = 0;

    memset(seen, 0, room * sizeof *seen);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = hashes[i];
        while (seen[at & (room - 1)] && hashes[seen[at & (room - 1)] - 1] != hashes[i])
            at++;
        if (!seen[at & (room - 1)]) {
            hashes[kept++] = hashes[i];
            seen[at & (room - 1)] = kept;
        }
    }
    return kept;
}

/* Returns how many of the first keys have consecutive places in one span, or none; writes the first one's place. */
static uint32_t run_length(const struct learned *l, const uint64_t *hashes, uint32_t count, struct place *first)
{
    uint32_t length = 1;

    *first = *find_place(l, hashes[0]);
    for (; length < count; length++) {
        if (length + AHEAD < count)
            fetch_place(l, hashes[length + AHEAD]);
        const struct place *there = find_place(l, hashes[length]);
        if (!there->hash != !first->hash)
            break;
        if (there->hash && (there->span != first->span || there->place != first->place + length))
            break;
    }
    if (!first->hash)
        first->span = 0;
    return length;
}

/* --- requests --- */

/* Consecutive keys of a request that get one span. */
struct segment {
    uint32_t begin, end, sightings;
    uint32_t span; /* span that had these keys */
    int kind;
};

/* One group's part of a request. */
struct request {
    uint64_t *hashes;
    uint32_t *handles; /* blocks of its keys */
    struct segment *segments;
    uint32_t count, met, made, turn;
    uint64_t tokens; /* tokens of a block */
    int pause, new;
    uint64_t left_out; /* tokens of the previous request that this one lacks */
};

/* Finds the known keys at the start of the chain, in spans that begin with them. Each span becomes a segment. */
static void meet(struct learned *l, struct request *r)
{
    while (r->met < r->count && find_place(l, r->hashes[r->met])->hash) {
        struct place first;
        uint32_t keys = run_length(l, r->hashes + r->met, r->count - r->met, &first);
        struct span *s = &l->spans[first.span];
        if (s->met || first.place != s->low)
            break;
        s->met = 1;
        r->segments[r->made++] = (struct segment){ r->met, r->met + keys, 0, first.span, 0 };
        r->met += keys;
    }
}

/* Computes the features from which the classes of the request's keys follow. */
static void describe(const struct learned *l, struct request *r)
{
    uint64_t units = (r->tokens * (r->count - r->met) + UNIT_TOKENS - 1) / UNIT_TOKENS;

    r->new = step_of(units, NEW_UNITS, LENGTH(NEW_UNITS));
    r->turn = 1;
    if (!r->made)
        return;
    const struct segment *last = &r->segments[r->made - 1];
    const struct span *s = &l->spans[last->span];
    double pause = (double)(l->known.now - s->since) / l->known.lifetime;
    while (r->pause < LENGTH(PAUSES) && PAUSES[r->pause] <= pause)
        r->pause++;
    r->left_out = r->tokens * ((uint64_t)s->behind + (s->high - s->low) - (last->end - last->begin));
    if (r->left_out > UNIT_TOKENS)
        return;
    uint32_t turn = 0;
    for (uint32_t i = r->made; i-- && !turn;)
        turn = l->spans[r->segments[i].span].turn;
    r->turn = turn < MOST_SEEN ? 1 + (turn ? turn : 1) : turn;
}

static int later_turn(const struct request *r)
{
    return (r->turn < 4 ? r->turn : 4) / 2 - 1;
}

/* Returns the class of keys that were seen this many times before. */
static int known_class(const struct request *r, uint32_t sightings)
{
    if (r->turn == 1 || sightings >= r->turn)
        return SHARED + step_of(sightings, SIGHTINGS, LENGTH(SIGHTINGS));
    return CONTINUED + (r->pause * 2 + later_turn(r)) * 3 + (r->new < 2 ? r->new : 2);
}

/* Returns the class of keys that were never seen. */
static int new_class(const struct request *r)
{
    static const uint8_t NEWS[] = { 0, 1, 2, 2, 3, 3 };

    if (r->turn > 1)
        return APPENDED + (r->pause * 2 + later_turn(r)) * 4 + NEWS[r->new];
    if (r->left_out > UNIT_TOKENS && r->tokens * r->met > UNIT_TOKENS)
        return BRANCH + r->new;
    return FIRST + r->new;
}

/* Ends the lives of the known keys, which returned, and takes them out of their spans. */
static void take_known(struct learned *l, struct request *r)
{
    for (uint32_t i = 0; i < r->made; i++) {
        struct segment *found = &r->segments[i];
        uint32_t number = found->span, keys = found->end - found->begin;
        struct span *s = &l->spans[number];
        s->met = 0;
        end_lives(l, s, keys, l->counts.returned[s->kind]);
        found->kind = known_class(r, s->sightings);
        found->sightings = s->sightings + (s->sightings < MOST_SEEN);
    }
    for (uint32_t i = 0; i < r->made; i++)
        take_keys(l, r->segments[i].span, r->segments[i].end - r->segments[i].begin, r->handles + r->segments[i].begin);
}

/* Takes keys out of their spans; their lives do not count. `forgotten`: forgets them too. */
static void take_out(struct learned *l, const uint64_t *hashes, uint32_t count, uint32_t *handles, int forgotten)
{
    for (uint32_t i = 0; i < count;) {
        struct place first;
        uint32_t keys = run_length(l, hashes + i, count - i, &first), number = first.span;
        if (number) {
            if (first.place > l->spans[number].low)
                number = split_span(l, number, first.place);
            end_lives(l, &l->spans[number], keys, NULL);
            for (uint32_t at = i; forgotten && at < i + keys; at++)
                remove_place(l, hashes[at], number);
            take_keys(l, number, keys, handles + i);
        }
        i += keys;
    }
}

/* Forgets keys, given from the last to the first, that lost their blocks. Returns how many had one. */
uint64_t kvoffd_learned_forget(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    uint64_t *hashes = scratch(l, count * (sizeof *hashes + sizeof(uint32_t))), blocks = 0;
    uint32_t *handles = (uint32_t *)(hashes + count);

    hash_backwards(l, name, keys, count, key_bytes, hashes);
    memset(handles, 0, count * sizeof *handles);
    take_out(l, hashes, count, handles, 1);
    for (uint64_t i = 0; i < count; i++)
        blocks += handles[i] != 0;
    l->known.blocks -= blocks;
    return blocks;
}

static void add_segment(struct request *r, uint32_t begin, uint32_t end, int kind)
{
    if (begin < end)
        r->segments[r->made++] = (struct segment){ begin, end, 1, 0, kind };
}

/* Joins neighbouring segments of one class and equal sightings; known keys and new ones always differ in these. */
static void join_segments(struct request *r)
{
    uint32_t made = 0;

    for (uint32_t i = 1; i < r->made; i++) {
        struct segment *last = &r->segments[made], *one = &r->segments[i];
        if (last->kind == one->kind && last->sightings == one->sightings) {
            last->end = one->end;
        } else {
            r->segments[++made] = *one;
        }
    }
    r->made = made + 1;
}

/* Makes the spans of the request; its last span is the first to be forgotten. */
static void add_spans(struct learned *l, struct request *r, uint64_t weight)
{
    uint32_t before = 0;

    for (uint32_t i = 0; i < r->made; i++) {
        const struct segment *one = &r->segments[i];
        uint32_t keys = one->end - one->begin;
        uint32_t number = begin_span(l, r->hashes + one->begin, keys, one->kind, weight, l->known.now);
        struct span *s = &l->spans[number];
        l->counts.accessed[one->kind] += keys * weight;
        s->sightings = one->sightings;
        s->turn = r->turn;
        s->behind = r->count - one->end;
        s->before = before;
        if (before)
            l->spans[before].child = number;
        memcpy(handle_at(s, 0), r->handles + one->begin, keys * sizeof *r->handles);
        count_blocks(s);
        if (s->held) {
            fill_cell(l, number);
            add_blocks(l, s, s->held);
        }
        before = number;
    }
    for (uint32_t number = before; number; number = l->spans[number].before)
        link_before(l, number, 0);
}

/* Records one group's part of a request, up to as many keys as fit the pool: known keys returned, and all get new
 * classes. */
static void record(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes, uint64_t weight,
                 uint64_t tokens)
{
    uint64_t seen = 2;

    if (count > l->known.lifetime / weight)
        count = l->known.lifetime / weight;
    while (seen <= count)
        seen *= 2;
    seen *= 2;
    uint64_t each = sizeof(uint64_t) + sizeof(struct segment) + sizeof(uint32_t);
    uint8_t *memory = scratch(l, (count + 2) * each + seen * sizeof(uint32_t));
    struct request r = { .hashes = (uint64_t *)memory, .tokens = tokens };
    r.segments = (struct segment *)(r.hashes + count);
    r.handles = (uint32_t *)(r.segments + count + 2);
    if (!count)
        return;
    hash_keys(l, name, keys, count, key_bytes, r.hashes);
    r.count = count;
    meet(l, &r);
    if (r.met < r.count) /* known keys at the start are all different */
        r.count = leave_out_repeats(r.hashes, count, r.handles + count, seen);
    memset(r.handles, 0, r.count * sizeof *r.handles);
    describe(l, &r);
    take_known(l, &r);
    if (r.met < r.count) {
        /* Number of keys in the last part of the prompt, behind its last whole unit. */
        uint32_t part = (tokens * r.count - 1) % UNIT_TOKENS / tokens + 1;
        uint32_t last = r.count > part ? r.count - part : 0;
        /* Known keys behind an unknown one did not serve this request: their lives do not count. */
        take_out(l, r.hashes + r.met, r.count - r.met, r.handles + r.met, 0);
        if (last < r.met)
            last = r.met;
        add_segment(&r, r.met, last, new_class(&r));
        add_segment(&r, last, r.count, LAST);
    }
    join_segments(&r);
    add_spans(l, &r, weight);
    l->recorded_keys += r.count;
    l->recorded_bytes += r.count * weight;
}

/* Plans the next learning: once the evidence has grown a little, and no later than after a pool lifetime. When the pool
 * has just become full, earlier results say nothing about half of its blocks' ages. */
static void plan_learning(struct learned *l)
{
    double later = (double)l->known.now / TIME_PART;
    uint64_t more = (l->known.requests < MEMORY_REQUESTS ? l->known.requests : MEMORY_REQUESTS) / EVIDENCE_PART;

    l->learned_at = l->known.requests;
    l->learn_at = l->known.now + (later < l->known.lifetime ? (uint64_t)later : l->known.lifetime);
    l->learn_after = l->known.requests + (more > FEWEST_LEARNED ? more : FEWEST_LEARNED);
}

/* Computes the scores of all classes, and reduces the weight of older counts. */
static void learn(struct learned *l)
{
    double kept = 1;

    for (uint64_t requests = l->known.requests - l->learned_at; requests; requests--)
        kept *= 1 - 1.0 / MEMORY_REQUESTS;
    work_out(l);
    order_cells(l);
    plan_learning(l);
    for (int kind = 0; kind < CLASSES; kind++) {
        l->counts.accessed[kind] *= kept;
        for (int bin = 0; bin < BINS; bin++) {
            l->counts.returned[kind][bin] *= kept;
            l->counts.forgotten[kind][bin] *= kept;
        }
    }
}

/* Records one group's part of a request; the last part also advances the time. */
void kvoffd_learned_record(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                         uint64_t weight, uint64_t tokens, uint64_t is_last)
{
    record(l, name, keys, count, key_bytes, weight, tokens);
    if (!is_last || !l->recorded_keys)
        return;
    l->known.requests++;
    l->known.now += l->recorded_bytes;
    enter_epoch(l);
    forget_some(l, l->recorded_keys);
    l->recorded_keys = l->recorded_bytes = 0;
    move_cells(l);
    if (l->known.now >= l->learn_at && l->known.requests >= l->learn_after)
        learn(l);
}

/* --- stores --- */

struct offer {
    double score;
    uint64_t keys;
};

static const double REJECTED = -1;

static double lowest_score(const struct learned *l)
{
    for (uint32_t word = 0; word < sizeof l->filled / sizeof *l->filled; word++)
        if (l->filled[word]) {
            uint32_t cell = l->by_rank[word * 64 + __builtin_ctzll(l->filled[word])];
            return l->counts.score[cell / BINS][cell % BINS];
        }
    return INFINITY;
}

/* Writes the scores of keys without blocks in runs, at most `count`; returns how many. `starts`: index of the first key
 * of each chain; the first is 0. */
uint64_t kvoffd_learned_admit(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                               uint64_t weight, const uint64_t *starts, uint64_t chains, struct offer *offers)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes), made = 0;

    forget_some(l, count); /* limits keys that are stored without a request, too */
    l->known.lowest = lowest_score(l);
    hash_keys(l, name, keys, count, key_bytes, hashes);
    for (uint64_t chain = 0; chain < chains; chain++) {
        uint64_t end = chain + 1 < chains ? starts[chain + 1] : count;
        double score = INFINITY;
        for (uint64_t i = starts[chain]; i < end;) {
            struct place first;
            uint32_t length = run_length(l, hashes + i, end - i, &first), number = first.span;
            if (!number) {
                number = begin_span(l, hashes + i, length, STORED, weight, l->known.now);
                link_before(l, number, 0);
            }
            double own = l->known.as_lru ? INFINITY : l->admission_score[l->spans[number].kind];
            if (l->spans[number].closed)
                own = REJECTED;
            score = own < score ? own : score;
            if (made && offers[made - 1].score == score)
                offers[made - 1].keys += length;
            else
                offers[made++] = (struct offer){ score, length };
            i += length;
        }
    }
    return made;
}

/* Rejects offered keys and the later keys of their requests. */
void kvoffd_learned_rejected(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes);

    hash_keys(l, name, keys, count, key_bytes, hashes);
    for (uint64_t i = 0; i < count;) {
        struct place first;
        uint32_t length = run_length(l, hashes + i, count - i, &first);
        for (uint32_t number = first.span; number && !l->spans[number].closed; number = l->spans[number].child)
            l->spans[number].closed = 1;
        i += length;
    }
}

/* --- blocks of known keys, by handle --- */

/* Spans that one call visits to find a request's last one; and blocks without a request that are entered together, as a
 * request for some of them takes time in proportion to their number. */
enum { MOST_STEPS = 1024, MOST_TOGETHER = 1024 };

/* Adds blocks of keys, both from the last to the first. Returns 0, or 1 if a key has a block: not all are added. */
uint64_t kvoffd_learned_insert(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                               uint64_t weight, const uint32_t *numbers)
{
    uint64_t *hashes = scratch(l, MOST_TOGETHER * sizeof *hashes);

    for (uint64_t together; count; count -= together, keys += together * key_bytes, numbers += together) {
        together = count < MOST_TOGETHER ? count : MOST_TOGETHER;
        hash_backwards(l, name, keys, together, key_bytes, hashes);
        for (uint64_t i = 0; i < together;) {
            struct place first;
            uint32_t length = run_length(l, hashes + i, together - i, &first), number = first.span;
            if (!number) {
                number = begin_span(l, hashes + i, length, RECOVERED, weight, l->known.now);
                link_before(l, number, 0);
                first.place = 0;
            }
            struct span *s = &l->spans[number];
            uint32_t *blocks = handle_at(s, first.place);
            for (uint32_t at = 0; at < length; at++) {
                if (blocks[at])
                    return 1;
                blocks[at] = numbers[together - 1 - i - at] + 1; /* 0 means none */
            }
            if (first.place + length > s->top)
                s->top = first.place + length;
            s->held += length;
            if (s->held == length) {
                s->age_bin = age_bin(l, s->since);
                fill_cell(l, number);
            }
            add_blocks(l, s, length);
            i += length;
        }
        l->known.blocks += together;
    }
    return 0;
}

/* Removes blocks of keys, from the last to the first. Returns 0, or 1 if a key has none: not all are removed then. */
uint64_t kvoffd_learned_remove(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes);

    hash_backwards(l, name, keys, count, key_bytes, hashes);
    for (uint64_t i = 0; i < count;) {
        struct place first;
        uint32_t length = run_length(l, hashes + i, count - i, &first);
        if (!first.span)
            return 1;
        struct span *s = &l->spans[first.span];
        uint32_t *blocks = handle_at(s, first.place);
        for (uint32_t at = 0; at < length; at++) {
            if (!blocks[at])
                return 1;
            blocks[at] = 0;
        }
        s->held -= length;
        add_blocks(l, s, -(int64_t)length);
        if (!s->held)
            leave_cell(l, first.span);
        settle_span(l, first.span);
        i += length;
    }
    l->known.blocks -= count;
    forget_some(l, count);
    return 0;
}

/* Returns the last span of a request, from this one on, that the current walk has not visited; if the request has very
 * many spans, one of the next MOST_STEPS. */
static uint32_t deepest(const struct learned *l, uint32_t number)
{
    uint32_t child, steps = 0;

    while ((child = l->spans[number].child) && l->spans[child].seen != l->walks && steps++ < MOST_STEPS)
        number = child;
    return number;
}

/* Writes the blocks of a span, preceded by those of later spans of its request from the last one on, so that chains get
 * no holes. Returns how many blocks are written in total. */
static uint64_t walk(struct learned *l, uint32_t oldest, uint32_t *handles, uint64_t found, uint64_t most)
{
    if (l->spans[oldest].seen == l->walks)
        return found;
    for (uint32_t number = deepest(l, oldest);; number = l->spans[number].before) {
        struct span *s = &l->spans[number];
        s->seen = l->walks;
        for (uint32_t at = s->top; s->held && at-- > s->low;) {
            uint32_t handle = *handle_at(s, at);
            if (handle)
                handles[found++] = handle - 1;
            if (found == most)
                return found;
        }
        if (number == oldest)
            return found;
    }
}

/* The same in the order of an LRU: the oldest span of all cells first. */
static uint64_t walk_by_age(struct learned *l, uint32_t *handles, uint64_t most)
{
    uint32_t next[CELLS], found = 0;

    for (int cell = 0; cell < CELLS; cell++)
        next[cell] = l->cells[cell].first;
    for (;;) {
        int oldest = -1;
        for (int cell = 0; cell < CELLS; cell++)
            if (next[cell] && (oldest < 0 || l->spans[next[cell]].since < l->spans[next[oldest]].since))
                oldest = cell;
        if (oldest < 0 || found == most)
            return found;
        found = walk(l, next[oldest], handles, found, most);
        next[oldest] = l->spans[next[oldest]].next;
    }
}

/* Writes up to `most` blocks with scores below `below`, in eviction order; returns how many. */
uint64_t kvoffd_learned_candidates(struct learned *l, double below, uint32_t *handles, uint64_t most)
{
    uint64_t found = 0;

    if (!++l->walks)
        l->walks = 1;
    if (l->known.as_lru)
        return walk_by_age(l, handles, most);
    for (uint32_t word = 0; word < sizeof l->filled / sizeof *l->filled; word++)
        for (uint64_t bits = l->filled[word]; bits; bits &= bits - 1) {
            uint32_t cell = l->by_rank[word * 64 + __builtin_ctzll(bits)];
            if (l->counts.score[cell / BINS][cell % BINS] >= below)
                return found;
            for (uint32_t span = l->cells[cell].first; span && found < most; span = l->spans[span].next)
                found = walk(l, span, handles, found, most);
            if (found == most)
                return found;
        }
    return found;
}

/* Returns the chance that a key of a span returns before `within` more bytes are accessed. */
static double chance(const struct learned *l, const struct span *s, uint64_t within)
{
    const double *edges = l->counts.edges;
    double left = 1, age = (double)(l->known.now - s->since), until = age + within;

    for (int bin = bin_of(l, age); bin < BINS && edges[bin] < until; bin++) {
        double end = bin + 1 < BINS ? edges[bin + 1] : 2 * edges[bin];
        double part = (fmin(until, end) - fmin(fmax(age, edges[bin]), end)) / (end - edges[bin]);
        left *= pow(1 - l->counts.hazard[s->kind][bin], part);
    }
    return 1 - left;
}

/* Writes the chance of each key, 1 if unknown. */
void kvoffd_learned_chances(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                            uint64_t within, double *chances)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes);

    hash_keys(l, name, keys, count, key_bytes, hashes);
    for (uint64_t i = 0; i < count; i++) {
        const struct place *there = find_place(l, hashes[i]);
        chances[i] = there->hash && !l->known.as_lru ? chance(l, &l->spans[there->span], within) : 1;
    }
}

/* --- from one daemon to the next --- */

static const double AGES[BINS] = { 0, 0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 };

/* Makes the state for a pool of `lifetime` bytes. `seed` is secret, so that nobody can choose keys that collide. */
struct learned *kvoffd_learned_new(uint64_t lifetime, const uint64_t seed[2])
{
    struct learned *l = calloc(1, sizeof *l);

    if (!l)
        return NULL;
    l->known.lifetime = lifetime;
    l->learn_at = lifetime / 4;
    for (int bin = 0; bin < BINS; bin++)
        l->counts.edges[bin] = AGES[bin] * lifetime;
    or_end(open_index(&l->places, seed) ? l : NULL);
    l->span_room = FEWEST;
    l->spans = or_end(calloc(FEWEST, sizeof *l->spans));
    l->span_top = 1; /* number 0 means none */
    work_out(l);
    order_cells(l);
    forget_some(l, 0);
    return l;
}

void kvoffd_learned_free(struct learned *l)
{
    for (uint32_t number = 1; number < l->span_top; number++)
        free(l->spans[number].keys);
    free(l->spans);
    close_index(&l->places);
    free(l->scratch);
    free(l);
}

/* Continues with the time and counters of an earlier daemon that learned.py has set; call it first. Unfinished lives
 * are omitted, because their keys are not known any more. */
void kvoffd_learned_resume(struct learned *l)
{
    l->epoch = l->known.now / epoch_bytes(l);
    work_out(l);
    order_cells(l);
    plan_learning(l);
}

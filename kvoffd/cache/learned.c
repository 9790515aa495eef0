/* State and decisions of the policy `learned`. LEARNED.md states the rules, the formulas and why each constant has its
 * value; the sections here have its headings and its names.
 *
 * learned.py owns one `struct learned` and calls the functions that begin with kvoffd_. Not thread-safe.
 */
#define WORDS 2 /* struct place */
#include "../system/slot_index.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- Data --- */

enum { BINS = 17, CLASSES = 77, CELLS = CLASSES * BINS, EPOCHS_IN_LIFETIME = 4, EPOCHS_KEPT = 320 };

/* The first number of each kind of class; learned.py names them all. */
enum { RECOVERED = 0, STORED = 1, LAST = 2, SHARED = 3, CONTINUED = 9, APPENDED = 33, BRANCH = 65, FIRST = 71 };

/* Identified by number; 0 means none. */
struct span {
    struct keys *keys;
    uint64_t since; /* `now` when the lives of its keys began */
    uint32_t pages; /* pages of a block */
    uint32_t walked; /* last walk that visited it */
    uint32_t low, top, high; /* its places are [low, high); those from `top` on have no blocks */
    uint32_t blocks; /* number of blocks */
    uint32_t previous, next; /* neighbours in the cell while it has blocks */
    uint16_t sightings, turn; /* `turn` is 0 for keys that no request has */
    uint32_t behind; /* number of the request's keys behind `high` */
    uint32_t parent, child; /* neighbours in the request */
    uint32_t older, younger; /* neighbours in the order in which spans are forgotten */
    uint8_t class;
    uint8_t age_bin;
    uint8_t matched : 1; /* by the current request */
    uint8_t expired : 1; /* keys that lose their block are forgotten */
    uint8_t rejected : 1; /* its keys' score is REJECTED */
};

/* A span's keys. */
struct keys {
    uint32_t base, capacity; /* place of the first key, and number of keys */
    uint64_t hashes[]; /* followed by the handles of their blocks: a block's number plus 1, 0 for none */
};

/* Location of a key. */
struct place {
    uint64_t hash; /* 0 if the entry is empty */
    uint32_t span, place;
};

struct list { /* ordered spans, linked by two of their fields */
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
    uint64_t as_lru; /* set by LruFallback of learned.py */
    uint64_t tier_lifetime; /* bytes that are requested while tiers keep a block; set by learned.py */
    double lowest; /* lowest score of a block at the last offer; INFINITY if there was none */
};

/* Counters and what is computed from them; learned.py reads them, and sets the first three. */
struct counts {
    double returned[CLASSES][BINS], forgotten[CLASSES][BINS]; /* bytes of lives by the age at which they ended */
    double accessed[CLASSES]; /* bytes of the requests' keys, by the class that they got */
    double hazard[CLASSES][BINS];
    double score[CLASSES][BINS];
    double edges[BINS]; /* ages at which the bins begin */
    uint64_t cell_bytes[CELLS]; /* bytes of blocks by class and age bin */
};

struct learned {
    struct known known;
    struct counts counts;
    double admission_score[CLASSES];
    struct slot_index places; /* places of known keys */
    struct span *spans; /* [span_capacity] by number; those from `span_top` on were never used */
    uint32_t span_capacity, span_top, unused_spans; /* unused spans are linked by `child` */
    uint64_t keys_bytes; /* memory of all spans' keys */
    struct list oldest; /* spans that are not expired, in the order in which they are forgotten */
    uint64_t sweep_at, learn_at, learn_at_request, epoch, decayed_at, decayed_at_request;
    uint32_t swept; /* cells swept; at `sweep_at` the next sweep begins */
    double open[CLASSES][EPOCHS_KEPT]; /* weighted bytes of unfinished lives by the epoch in which they began */
    double weight[EPOCHS_KEPT]; /* of the lives that began in an epoch */
    struct list cells[CELLS]; /* spans that have blocks, by class and age bin; the oldest first */
    uint16_t rank[CELLS], by_rank[CELLS]; /* ranks by ascending score */
    uint64_t filled[(CELLS + 63) / 64]; /* bit set of the ranks of non-empty cells */
    uint32_t walks;
    uint64_t recorded_keys, recorded_bytes; /* recorded keys and bytes of the current request */
    void *scratch;
    uint64_t scratch_bytes;
};

/* --- Time --- */

/* In lifetimes. */
static const double AGES[BINS] = { 0, 0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 };

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

/* --- Keys and spans --- */

enum { PAGE = 4096, AHEAD = 8 /* keys from a lookup to its prefetch */, MIN_SPANS = 1024, MIN_UNUSED = 32 };

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
static uint64_t bytes_of(const struct span *s)
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
    return (uint32_t *)(s->keys->hashes + s->keys->capacity) + (place - s->keys->base);
}

/* Writes the hashes of `count` concatenated keys. `group` distinguishes equal keys. `step`: 1, or -1 for keys that are
 * given from the last to the first. */
static void hash_keys(struct learned *l, uint64_t group, const uint8_t *keys, int64_t count, int64_t key_bytes, int step,
                      uint64_t *hashes)
{
    for (int64_t i = 0; i < count; i++) {
        uint64_t found = hash_of(&l->places, group, keys + (step > 0 ? i : count - 1 - i) * key_bytes, key_bytes);
        hashes[i] = found ? found : 1;
    }
}

/* Removes repeated hashes; returns how many are left. `size` of `seen`: a power of two above `count`. */
static uint64_t drop_repeats(uint64_t *hashes, uint64_t count, uint32_t *seen, uint64_t size)
{
    uint64_t kept = 0;

    memset(seen, 0, size * sizeof *seen);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = hashes[i];
        while (seen[at & (size - 1)] && hashes[seen[at & (size - 1)] - 1] != hashes[i])
            at++;
        if (!seen[at & (size - 1)]) {
            hashes[kept++] = hashes[i];
            seen[at & (size - 1)] = kept;
        }
    }
    return kept;
}

/* Returns how many first keys are consecutive in one span, or are all unknown; writes the first one's place. */
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
    s->keys->capacity = count;
    l->keys_bytes += keys_bytes(count);
    memcpy(s->keys->hashes, hashes, count * sizeof *hashes);
    if (handles)
        memcpy(s->keys->hashes + count, handles, count * sizeof *handles);
    else
        memset(s->keys->hashes + count, 0, count * sizeof *handles);
}

static void free_keys(struct learned *l, struct keys *keys)
{
    l->keys_bytes -= keys_bytes(keys->capacity);
    free(keys);
}

/* Returns a new span without keys, whose other fields are 0. */
static uint32_t new_span(struct learned *l, uint64_t block_bytes)
{
    uint32_t number = l->unused_spans;

    if (number) {
        l->unused_spans = l->spans[number].child;
    } else {
        number = l->span_top++;
        if (number == l->span_capacity) { /* large memory moves without a copy */
            l->span_capacity *= 2;
            l->spans = or_end(realloc(l->spans, l->span_capacity * sizeof *l->spans));
        }
    }
    memset(&l->spans[number], 0, sizeof *l->spans);
    l->spans[number].pages = (block_bytes < l->known.lifetime ? block_bytes : l->known.lifetime) / PAGE;
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

static void leave_age_order(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    *(s->older ? &l->spans[s->older].younger : &l->oldest.first) = s->younger;
    *(s->younger ? &l->spans[s->younger].older : &l->oldest.last) = s->older;
    s->older = s->younger = 0;
}

/* Links a span into the order of forgetting, before another one or, if that is 0, as the youngest. */
static void enter_age_order(struct learned *l, uint32_t number, uint32_t younger)
{
    struct span *s = &l->spans[number];

    s->younger = younger;
    s->older = younger ? l->spans[younger].older : l->oldest.last;
    *(s->older ? &l->spans[s->older].younger : &l->oldest.first) = number;
    *(younger ? &l->spans[younger].older : &l->oldest.last) = number;
}

/* Removes a span without keys. */
static void remove_span(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (!s->expired)
        leave_age_order(l, number);
    if (s->parent)
        l->spans[s->parent].child = s->child;
    if (s->child)
        l->spans[s->child].parent = s->parent;
    free_keys(l, s->keys);
    memset(s, 0, sizeof *s);
    s->child = l->unused_spans;
    l->unused_spans = number;
    l->known.spans--;
}

/* Recounts the blocks of a span. */
static void count_blocks(struct span *s)
{
    s->blocks = 0;
    s->top = s->low;
    for (uint32_t i = s->low; i < s->high; i++)
        if (*handle_at(s, i)) {
            s->blocks++;
            s->top = i + 1;
        }
}

/* Moves the keys of a span that has lost some to smaller arrays if much is unused; removes the span if none is left. */
static void compact(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];
    struct keys *before = s->keys;

    if (s->low == s->high) {
        remove_span(l, number);
        return;
    }
    uint32_t unused = before->capacity - (s->high - s->low);
    if (unused < MIN_UNUSED || unused < s->high - s->low)
        return;
    make_keys(l, s, hash_at(s, s->low), handle_at(s, s->low), s->high - s->low);
    free_keys(l, before);
}

/* --- Classes --- */

enum { UNIT_TOKENS = 512, MAX_COUNTED = UINT16_MAX };
static const uint32_t TEXT_LIMITS[] = { 2, 4, 8, 16, 32 }, SIGHTING_LIMITS[] = { 1, 2, 3, 4, 8 };
static const double PAUSE_LIMITS[] = { 0.5, 2, 8 };

#define LENGTH(array) (int)(sizeof(array) / sizeof *(array))

/* Consecutive keys of a request that get one span. */
struct segment {
    uint32_t begin, end, sightings;
    uint32_t span; /* span that had these keys */
    int class;
};

/* One group's part of a request. */
struct request {
    uint64_t *hashes;
    uint32_t *handles; /* blocks of its keys */
    struct segment *segments;
    uint32_t count, matched, segment_count, turn;
    uint64_t tokens; /* tokens of a block */
    int pause, new_text;
    uint64_t omitted;
};

/* Returns how many of the limits are at most `value`. */
static int step_of(uint64_t value, const uint32_t *limits, int count)
{
    int step = 0;

    while (step < count && limits[step] <= value)
        step++;
    return step;
}

/* Each span that a request matches becomes a segment. */
static void match(struct learned *l, struct request *r)
{
    while (r->matched < r->count && find_place(l, r->hashes[r->matched])->hash) {
        struct place first;
        uint32_t keys = run_length(l, r->hashes + r->matched, r->count - r->matched, &first);
        struct span *s = &l->spans[first.span];
        if (s->matched || first.place != s->low)
            break;
        s->matched = 1;
        r->segments[r->segment_count++] = (struct segment){ r->matched, r->matched + keys, 0, first.span, 0 };
        r->matched += keys;
    }
}

static void compute_features(const struct learned *l, struct request *r)
{
    uint64_t units = (r->tokens * (r->count - r->matched) + UNIT_TOKENS - 1) / UNIT_TOKENS;

    r->new_text = step_of(units, TEXT_LIMITS, LENGTH(TEXT_LIMITS));
    r->turn = 1;
    if (!r->segment_count)
        return;
    const struct segment *last = &r->segments[r->segment_count - 1];
    const struct span *s = &l->spans[last->span];
    double pause = (double)(l->known.now - s->since) / l->known.lifetime;
    while (r->pause < LENGTH(PAUSE_LIMITS) && PAUSE_LIMITS[r->pause] <= pause)
        r->pause++;
    r->omitted = r->tokens * ((uint64_t)s->behind + (s->high - s->low) - (last->end - last->begin));
    if (r->omitted > UNIT_TOKENS)
        return;
    uint32_t turn = 0;
    for (uint32_t i = r->segment_count; i-- && !turn;)
        turn = l->spans[r->segments[i].span].turn;
    r->turn = turn < MAX_COUNTED ? 1 + (turn ? turn : 1) : turn;
}

static int is_later_turn(const struct request *r)
{
    return r->turn >= 4;
}

/* Returns the class of keys that were seen this many times before. */
static int known_class(const struct request *r, uint32_t sightings)
{
    if (r->turn == 1 || sightings >= r->turn)
        return SHARED + step_of(sightings, SIGHTING_LIMITS, LENGTH(SIGHTING_LIMITS));
    return CONTINUED + (r->pause * 2 + is_later_turn(r)) * 3 + (r->new_text < 2 ? r->new_text : 2);
}

/* Returns the class of keys that were never seen. */
static int new_class(const struct request *r)
{
    static const uint8_t APPENDED_TEXT[] = { 0, 1, 2, 2, 3, 3 };

    if (r->turn > 1)
        return APPENDED + (r->pause * 2 + is_later_turn(r)) * 4 + APPENDED_TEXT[r->new_text];
    if (r->omitted > UNIT_TOKENS && r->tokens * r->matched > UNIT_TOKENS)
        return BRANCH + r->new_text;
    return FIRST + r->new_text;
}

/* --- Lives --- */

enum { MIN_NEW_REQUESTS = 40, MEMORY_REQUESTS = 8000, MEMORY_EPOCHS = 16 * EPOCHS_IN_LIFETIME };

static uint64_t epoch_bytes(const struct learned *l)
{
    uint64_t bytes = l->known.lifetime / EPOCHS_IN_LIFETIME;

    return bytes ? bytes : 1;
}

/* Begins lives, in the current epoch. */
static void begin_lives(struct learned *l, const struct span *s, uint64_t keys)
{
    l->open[s->class][l->epoch % EPOCHS_KEPT] += keys * bytes_of(s);
}

/* Ends lives. `ends`: counter by age bin for this kind of end; NULL if the lives should not count. */
static void end_lives(struct learned *l, const struct span *s, uint64_t keys, double *ends)
{
    uint64_t epoch = s->since / epoch_bytes(l);
    double nbytes = keys * bytes_of(s) * l->weight[epoch % EPOCHS_KEPT];

    if (epoch + EPOCHS_KEPT <= l->epoch)
        return; /* they have ended already */
    if (ends)
        ends[age_bin(l, s->since)] += nbytes;
    l->open[s->class][epoch % EPOCHS_KEPT] -= nbytes;
}

/* Begins a span whose keys' lives began at `since`. It is not linked into any order yet. */
static uint32_t begin_span(struct learned *l, const uint64_t *hashes, uint32_t count, int class, uint64_t block_bytes,
                           uint64_t since)
{
    uint32_t number = new_span(l, block_bytes);
    struct span *s = &l->spans[number];

    s->since = since;
    s->sightings = 1;
    s->class = class;
    set_keys(l, number, hashes, count);
    l->known.known_bytes += count * bytes_of(s);
    begin_lives(l, s, count);
    return number;
}

static void scale(double *sums, uint64_t count, double factor)
{
    for (uint64_t i = 0; i < count; i++)
        sums[i] *= factor;
}

/* Reduces the weight of all lives up to now. */
static void decay(struct learned *l, uint64_t epoch)
{
    double by_requests = pow(1 - 1.0 / MEMORY_REQUESTS, l->known.requests - l->decayed_at_request);
    double by_time = pow(1 - 1.0 / MEMORY_EPOCHS, epoch - l->decayed_at), kept = fmax(by_requests, by_time);

    scale(l->counts.returned[0], CLASSES * BINS, kept);
    scale(l->counts.forgotten[0], CLASSES * BINS, kept);
    scale(l->counts.accessed, CLASSES, kept);
    scale(l->open[0], CLASSES * EPOCHS_KEPT, kept);
    scale(l->weight, EPOCHS_KEPT, kept);
    l->decayed_at = epoch;
    l->decayed_at_request = l->known.requests;
}

/* Enters the current epoch: lives that began EPOCHS_KEPT earlier count as forgotten. */
static void enter_epoch(struct learned *l)
{
    uint64_t now = l->known.now / epoch_bytes(l), first = l->epoch + 1;

    if (now > l->epoch && l->known.requests - l->decayed_at_request >= MIN_NEW_REQUESTS)
        decay(l, now);
    if (now > l->epoch + EPOCHS_KEPT)
        first = now - EPOCHS_KEPT + 1;
    for (uint64_t epoch = first; epoch <= now; epoch++)
        for (int class = 0; class < CLASSES; class++) {
            double *lives = &l->open[class][epoch % EPOCHS_KEPT];
            if (*lives > 0)
                l->counts.forgotten[class][BINS - 1] += *lives;
            *lives = 0;
            l->weight[epoch % EPOCHS_KEPT] = 1;
        }
    l->epoch = now;
}

static void sum_unseen(const struct learned *l, double unseen[CLASSES][BINS])
{
    uint64_t first = l->epoch < EPOCHS_KEPT ? 0 : l->epoch - EPOCHS_KEPT + 1;
    int bin[EPOCHS_KEPT];

    for (uint64_t epoch = first; epoch <= l->epoch; epoch++) {
        double age = (double)l->known.now - (double)(epoch * epoch_bytes(l)) - epoch_bytes(l) / 2;
        bin[epoch % EPOCHS_KEPT] = bin_of(l, age);
    }
    for (int class = 0; class < CLASSES; class++) {
        memcpy(unseen[class], l->counts.forgotten[class], sizeof unseen[class]);
        for (uint64_t at = 0; at < EPOCHS_KEPT && at <= l->epoch; at++)
            if (l->open[class][at] > 0)
                unseen[class][bin[at]] += l->open[class][at];
    }
}

/* --- Hazards --- */

static const double HOPED = 0.01, HIGHEST_HAZARD = 0.95;
static const double PRIOR_REQUESTS = 60, MULTIPLIER_REQUESTS = 10, WATCHED_REQUESTS = 2;

/* Returns the number of a class's family; a class without others is its own. */
static int family_of(int class)
{
    if (class >= APPENDED && class < BRANCH)
        return CLASSES + 4 + (class - APPENDED) / 8;
    if (class >= CONTINUED && class < APPENDED)
        return CLASSES + (class - CONTINUED) / 6;
    return class;
}

static double hazard_of(double returned, double at_risk, double guess, double prior)
{
    return fmin(HIGHEST_HAZARD, (returned + prior * fmin(HIGHEST_HAZARD, guess)) / (at_risk + prior));
}

static void sum_at_risk(const struct learned *l, double at_risk[CLASSES][BINS])
{
    static double unseen[CLASSES][BINS]; /* static is safe here and below: only one thread calls */

    sum_unseen(l, unseen);
    for (int class = 0; class < CLASSES; class++) {
        double later = 0;
        for (int bin = BINS - 1; bin >= 0; bin--) {
            at_risk[class][bin] = later + l->counts.returned[class][bin] + unseen[class][bin] / 2;
            later += l->counts.returned[class][bin] + unseen[class][bin];
        }
    }
}

static void estimate_hazards(struct learned *l, double hopeful_hazard[CLASSES][BINS])
{
    enum { FAMILIES = CLASSES + 8 };
    static double at_risk[CLASSES][BINS];
    double all_bytes = l->known.now;
    double mean = (all_bytes ? all_bytes : 1) / (double)(l->known.requests ? l->known.requests : 1);
    double p = PRIOR_REQUESTS * mean, q = MULTIPLIER_REQUESTS * mean, w = WATCHED_REQUESTS * mean;
    double common[BINS], hopeful[BINS], events[CLASSES] = { 0 }, expected[CLASSES] = { 0 };
    double family_events[FAMILIES] = { 0 }, family_expected[FAMILIES] = { 0 };

    sum_at_risk(l, at_risk);
    for (int bin = 0; bin < BINS; bin++) {
        double returned = 0, all = 0;
        for (int class = 0; class < CLASSES; class++) {
            returned += l->counts.returned[class][bin];
            all += at_risk[class][bin];
        }
        common[bin] = (returned + (bin ? common[bin - 1] : HOPED) * mean) / (all + mean);
        hopeful[bin] = (returned + HOPED * mean) / (all + mean);
        for (int class = 0; class < CLASSES; class++) {
            events[class] += l->counts.returned[class][bin];
            expected[class] += at_risk[class][bin] * common[bin];
        }
    }
    for (int class = 0; class < CLASSES; class++) {
        family_events[family_of(class)] += events[class];
        family_expected[family_of(class)] += expected[class];
    }
    for (int class = 0; class < CLASSES; class++) {
        int family = family_of(class);
        double family_multiplier = (family_events[family] + q) / (family_expected[family] + q);
        double multiplier = (events[class] + q * family_multiplier) / (expected[class] + q);
        for (int bin = 0; bin < BINS; bin++) {
            double returned = l->counts.returned[class][bin], seen = at_risk[class][bin], watched = seen / (seen + w);
            double factor = multiplier < 1 ? watched * multiplier + 1 - watched : multiplier;
            l->counts.hazard[class][bin] = hazard_of(returned, seen, factor * common[bin], p);
            hopeful_hazard[class][bin] = hazard_of(returned, seen, factor * hopeful[bin], p);
        }
    }
}

/* --- Scores --- */

static const double WRITE_COST = 0.04;

/* Returns the highest rate of hits, less `cost`, of a block that enters this bin now. */
static double best_rate(const struct learned *l, const double hazard[BINS], int first, double cost)
{
    double alive = 1, hits = 0, space = 0, best = -1e300;

    for (int bin = first; bin < BINS - 1; bin++) {
        space += alive * (l->counts.edges[bin + 1] - l->counts.edges[bin]) * (1 - hazard[bin] / 2);
        hits += alive * hazard[bin];
        alive *= 1 - hazard[bin];
        if (hits - cost > best * space)
            best = (hits - cost) / space;
    }
    return best;
}

static void compute_scores(struct learned *l)
{
    static double hopeful_hazard[CLASSES][BINS];

    estimate_hazards(l, hopeful_hazard);
    for (int class = 0; class < CLASSES; class++) {
        l->admission_score[class] = best_rate(l, hopeful_hazard[class], 0, WRITE_COST);
        l->counts.score[class][BINS - 1] = 0;
        for (int bin = 0; bin < BINS - 1; bin++)
            l->counts.score[class][bin] = best_rate(l, l->counts.hazard[class], bin, 0);
    }
}

/* --- Order of eviction --- */

enum { SWEEPS_IN_LIFETIME = 32, MOVED_AT_ONCE = 512, SWEPT_CELLS = CLASSES * (BINS - 1), NEAR = 64, MAX_STEPS = 1024 };
static const uint64_t CELL_MASK = 2047; /* covers all cell numbers */
_Static_assert(CELLS <= 2048, "the number of a cell has eleven bits");

static uint32_t cell_of(const struct span *s)
{
    return s->class * BINS + s->age_bin;
}

/* Links a span into its cell behind another one, or first if that is 0. */
static void link_into_cell(struct learned *l, uint32_t number, uint32_t before)
{
    struct span *own = &l->spans[number];
    struct list *cell = &l->cells[cell_of(own)];

    own->previous = before;
    own->next = before ? l->spans[before].next : cell->first;
    *(before ? &l->spans[before].next : &cell->first) = number;
    *(own->next ? &l->spans[own->next].previous : &cell->last) = number;
}

static void set_filled(struct learned *l, uint32_t cell)
{
    uint64_t bit = (uint64_t)1 << (l->rank[cell] & 63), *word = &l->filled[l->rank[cell] >> 6];

    *word = l->cells[cell].first ? *word | bit : *word & ~bit;
}

/* Puts a span that has blocks into its cell. */
static void enter_cell(struct learned *l, uint32_t number)
{
    uint32_t cell = cell_of(&l->spans[number]), before = l->cells[cell].last;

    for (int steps = 0; before && l->spans[before].since > l->spans[number].since && steps < NEAR; steps++)
        before = l->spans[before].previous;
    link_into_cell(l, number, before);
    set_filled(l, cell);
}

/* Takes a span out of its cell because it loses its blocks, or moves to another cell. */
static void leave_cell(struct learned *l, uint32_t number)
{
    struct span *own = &l->spans[number];
    struct list *cell = &l->cells[cell_of(own)];

    *(own->previous ? &l->spans[own->previous].next : &cell->first) = own->next;
    *(own->next ? &l->spans[own->next].previous : &cell->last) = own->previous;
    own->previous = own->next = 0;
    set_filled(l, cell_of(own));
}

/* Counts blocks that a span in a cell got, or lost if `blocks` is negative. */
static void add_blocks(struct learned *l, const struct span *s, int64_t blocks)
{
    l->counts.cell_bytes[cell_of(s)] += blocks * (int64_t)bytes_of(s);
}

/* Moves spans whose age bin has ended to the next bin. */
static void sweep_cells(struct learned *l)
{
    if (l->swept == SWEPT_CELLS && l->known.now >= l->sweep_at) {
        l->sweep_at = l->known.now + l->known.lifetime / SWEEPS_IN_LIFETIME;
        l->swept = 0;
    }
    for (int moved = 0; l->swept < SWEPT_CELLS; l->swept++) {
        uint32_t class = l->swept / (BINS - 1), bin = BINS - 2 - l->swept % (BINS - 1), number;
        double limit = (double)l->known.now - l->counts.edges[bin + 1];
        while ((number = l->cells[class * BINS + bin].first) && l->spans[number].since <= limit) {
            if (moved++ == MOVED_AT_ONCE)
                return;
            leave_cell(l, number);
            add_blocks(l, &l->spans[number], -(int64_t)l->spans[number].blocks);
            l->spans[number].age_bin++;
            add_blocks(l, &l->spans[number], l->spans[number].blocks);
            enter_cell(l, number);
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

    /* The bits of doubles that are not negative sort as their values do. The lowest ones are replaced by the cell's place
     * in an order of all, which puts the oldest first. */
    for (int cell = 0; cell < CELLS; cell++) {
        memcpy(&keys[cell], &l->counts.score[cell / BINS][cell % BINS], sizeof *keys);
        keys[cell] = (keys[cell] & ~CELL_MASK) + (BINS - 1 - cell % BINS) * CLASSES + cell / BINS;
    }
    qsort(keys, CELLS, sizeof *keys, by_value);
    memset(l->filled, 0, sizeof l->filled);
    for (int rank = 0; rank < CELLS; rank++) {
        uint64_t place = keys[rank] & CELL_MASK;
        uint16_t cell = place % CLASSES * BINS + BINS - 1 - place / CLASSES;
        l->by_rank[rank] = cell;
        l->rank[cell] = rank;
        set_filled(l, cell);
    }
}

/* Returns the last span of a request, from this one on, that the current walk has not visited. */
static uint32_t last_of_request(const struct learned *l, uint32_t number)
{
    uint32_t child, steps = 0;

    while ((child = l->spans[number].child) && l->spans[child].walked != l->walks && steps++ < MAX_STEPS)
        number = child;
    return number;
}

/* Writes the blocks of the spans of a request, from the last one that was not written yet back to `first`. Returns how
 * many are written in total. */
static uint64_t walk(struct learned *l, uint32_t first, uint32_t *blocks, uint64_t found, uint64_t most)
{
    if (l->spans[first].walked == l->walks)
        return found;
    for (uint32_t number = last_of_request(l, first);; number = l->spans[number].parent) {
        struct span *s = &l->spans[number];
        s->walked = l->walks;
        for (uint32_t at = s->top; s->blocks && at-- > s->low;) {
            uint32_t handle = *handle_at(s, at);
            if (handle)
                blocks[found++] = handle - 1;
            if (found == most)
                return found;
        }
        if (number == first)
            return found;
    }
}

/* Moves a span of a heap, whose first one is the oldest, down to its place. */
static void sink(const struct learned *l, uint32_t *heap, uint32_t count, uint32_t at)
{
    uint32_t number = heap[at];

    for (uint32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && l->spans[heap[child + 1]].since < l->spans[heap[child]].since)
            child++;
        if (l->spans[number].since <= l->spans[heap[child]].since)
            break;
        heap[at] = heap[child];
    }
    heap[at] = number;
}

/* Writes blocks as `walk` does, in the order of an LRU: the oldest span of all cells first. */
static uint64_t walk_by_age(struct learned *l, uint32_t *blocks, uint64_t most)
{
    uint32_t next[CELLS], cells = 0; /* a heap of the next span of each cell that has one */
    uint64_t found = 0;

    for (int cell = 0; cell < CELLS; cell++)
        if (l->cells[cell].first)
            next[cells++] = l->cells[cell].first;
    for (uint32_t at = cells / 2; at--;)
        sink(l, next, cells, at);
    while (cells && found < most) {
        found = walk(l, next[0], blocks, found, most);
        next[0] = l->spans[next[0]].next ? l->spans[next[0]].next : next[--cells];
        sink(l, next, cells, 0);
    }
    return found;
}

/* Writes up to `most` blocks with scores below `below`, in eviction order; returns how many. */
uint64_t kvoffd_learned_candidates(struct learned *l, double below, uint32_t *blocks, uint64_t most)
{
    uint64_t found = 0;

    if (!++l->walks)
        l->walks = 1;
    if (l->known.as_lru)
        return walk_by_age(l, blocks, most);
    for (uint32_t word = 0; word < sizeof l->filled / sizeof *l->filled; word++)
        for (uint64_t bits = l->filled[word]; bits; bits &= bits - 1) {
            uint32_t cell = l->by_rank[word * 64 + __builtin_ctzll(bits)];
            if (l->counts.score[cell / BINS][cell % BINS] >= below)
                return found;
            for (uint32_t span = l->cells[cell].first; span && found < most; span = l->spans[span].next)
                found = walk(l, span, blocks, found, most);
            if (found == most)
                return found;
        }
    return found;
}

/* --- Learning --- */

enum { EVIDENCE_PART = 50, TIME_PART = 32 };

static void plan_learning(struct learned *l)
{
    double later = (double)l->known.now / TIME_PART;
    uint64_t more = (l->known.requests < MEMORY_REQUESTS ? l->known.requests : MEMORY_REQUESTS) / EVIDENCE_PART;

    l->learn_at = l->known.now + (later < l->known.lifetime ? (uint64_t)later : l->known.lifetime);
    l->learn_at_request = l->known.requests + (more > MIN_NEW_REQUESTS ? more : MIN_NEW_REQUESTS);
}

static void learn(struct learned *l)
{
    compute_scores(l);
    order_cells(l);
    plan_learning(l);
}

/* --- Keys without a block --- */

enum { REMEMBERED_POOLS = 16, GHOST_DIVISOR = 50, FORGOTTEN_AT_ONCE = 2048 };

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
    end_lives(l, s, keys, l->counts.forgotten[s->class]);
    l->known.known_bytes -= keys * bytes_of(s);
    s->behind += keys;
    s->high -= keys;
    compact(l, number);
    return keys;
}

/* Corrects `top` after a span's keys lost blocks or were taken. An expired span forgets the keys from there on. Frees
 * unused memory, and the span if no key is left. */
static void settle_span(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (s->top < s->low || !s->blocks)
        s->top = s->low;
    while (s->top > s->low && !*handle_at(s, s->top - 1))
        s->top--;
    if (!s->expired || !forget_tail(l, number, UINT32_MAX))
        compact(l, number);
}

/* Splits a span before a place that is not its first; returns the span of the later keys. */
static uint32_t split_span(struct learned *l, uint32_t number, uint32_t place)
{
    uint32_t rest = new_span(l, bytes_of(&l->spans[number])), had = l->spans[number].blocks;
    struct span *s = &l->spans[number], *r = &l->spans[rest];
    uint32_t count = s->high - place;

    *r = *s;
    r->low = r->previous = r->next = r->older = r->younger = 0;
    r->parent = number;
    if (r->child)
        l->spans[r->child].parent = rest;
    s->child = rest;
    set_keys(l, rest, hash_at(s, place), count);
    memcpy(handle_at(r, 0), handle_at(s, place), count * sizeof(uint32_t));
    s->high = place;
    s->behind += count;
    count_blocks(r);
    count_blocks(s);
    if (!r->expired)
        enter_age_order(l, rest, number);
    if (r->blocks)
        link_into_cell(l, rest, number);
    if (had && !s->blocks)
        leave_cell(l, number);
    settle_span(l, number);
    return rest;
}

/* Takes the first keys out of a span, and writes the handles of their blocks. The keys' places become invalid. */
static void take_keys(struct learned *l, uint32_t number, uint32_t count, uint32_t *handles)
{
    struct span *s = &l->spans[number];
    uint32_t had = s->blocks;

    memcpy(handles, handle_at(s, s->low), count * sizeof *handles);
    for (uint32_t i = 0; i < count && s->blocks; i++)
        s->blocks -= handles[i] != 0;
    add_blocks(l, s, (int64_t)s->blocks - had);
    l->known.known_bytes -= count * bytes_of(s);
    s->low += count;
    if (had && !s->blocks)
        leave_cell(l, number);
    settle_span(l, number);
}

/* Forgets keys without blocks beyond the limits. `added`: keys that were added, or lost their blocks. */
static void forget_oldest(struct learned *l, uint64_t added)
{
    uint64_t pools = REMEMBERED_POOLS * l->known.lifetime, most = FORGOTTEN_AT_ONCE + 2 * added;
    uint64_t most_bytes = l->known.lifetime + (pools > l->known.tier_lifetime ? pools : l->known.tier_lifetime);

    for (uint64_t done = 0; done < most; done++) {
        uint64_t ghosts = l->known.known_keys - l->known.blocks; /* each with hash and handle, and about two places */
        uint64_t nbytes = ghosts * (2 * sizeof(struct place) + 12) + l->known.spans * (sizeof(struct span) + keys_bytes(0));
        uint32_t number = l->oldest.first;
        if (!number || (l->known.known_bytes <= most_bytes && nbytes <= l->known.lifetime / GHOST_DIVISOR))
            break;
        if (l->spans[number].high - l->spans[number].top <= most - done) {
            leave_age_order(l, number);
            l->spans[number].expired = 1;
        }
        done += forget_tail(l, number, most - done);
    }
    l->known.nbytes = sizeof *l + l->places.nbytes + l->span_top * sizeof *l->spans + l->keys_bytes;
}

/* --- Requests and stores --- */

/* A run of keys with one score. */
struct offer {
    double score;
    uint64_t keys;
};

static const double REJECTED = -1;
enum { MAX_TOGETHER = 1024 /* keys in a span of blocks without a request */ };

/* Ends the lives of the matched keys, and takes them out of their spans. */
static void return_matched(struct learned *l, struct request *r)
{
    for (uint32_t i = 0; i < r->segment_count; i++) {
        struct segment *found = &r->segments[i];
        uint32_t number = found->span, keys = found->end - found->begin;
        struct span *s = &l->spans[number];
        s->matched = 0;
        end_lives(l, s, keys, l->counts.returned[s->class]);
        found->class = known_class(r, s->sightings);
        found->sightings = s->sightings + (s->sightings < MAX_COUNTED);
    }
    for (uint32_t i = 0; i < r->segment_count; i++)
        take_keys(l, r->segments[i].span, r->segments[i].end - r->segments[i].begin, r->handles + r->segments[i].begin);
}

/* Takes keys out of their spans; their lives do not count. `forgotten`: forgets them too. */
static void take_uncounted(struct learned *l, const uint64_t *hashes, uint32_t count, uint32_t *handles, int forgotten)
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

static void add_segment(struct request *r, uint32_t begin, uint32_t end, int class)
{
    if (begin < end)
        r->segments[r->segment_count++] = (struct segment){ begin, end, 1, 0, class };
}

/* Joins neighbouring segments of one class and equal sightings; matched keys and new ones always differ in these. */
static void join_segments(struct request *r)
{
    uint32_t made = 0;

    for (uint32_t i = 1; i < r->segment_count; i++) {
        struct segment *last = &r->segments[made], *one = &r->segments[i];
        if (last->class == one->class && last->sightings == one->sightings) {
            last->end = one->end;
        } else {
            r->segments[++made] = *one;
        }
    }
    r->segment_count = made + 1;
}

/* Makes the spans of the request; its last span is the first to be forgotten. */
static void add_spans(struct learned *l, struct request *r, uint64_t block_bytes)
{
    uint32_t last = 0;

    for (uint32_t i = 0; i < r->segment_count; i++) {
        const struct segment *one = &r->segments[i];
        uint32_t keys = one->end - one->begin;
        uint32_t number = begin_span(l, r->hashes + one->begin, keys, one->class, block_bytes, l->known.now);
        struct span *s = &l->spans[number];
        l->counts.accessed[one->class] += keys * block_bytes;
        s->sightings = one->sightings;
        s->turn = r->turn;
        s->behind = r->count - one->end;
        s->parent = last;
        if (last)
            l->spans[last].child = number;
        memcpy(handle_at(s, 0), r->handles + one->begin, keys * sizeof *r->handles);
        count_blocks(s);
        if (s->blocks) {
            enter_cell(l, number);
            add_blocks(l, s, s->blocks);
        }
        last = number;
    }
    for (uint32_t number = last; number; number = l->spans[number].parent)
        enter_age_order(l, number, 0);
}

static void record_part(struct learned *l, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                        uint64_t block_bytes, uint64_t tokens)
{
    uint64_t seen_size = 4; /* a power of two above twice the keys */

    if (count > l->known.lifetime / block_bytes)
        count = l->known.lifetime / block_bytes;
    if (!count)
        return;
    while (seen_size <= 2 * count)
        seen_size *= 2;
    /* One behind another: hashes, segments (two of new keys, others of matched ones), handles, `seen` of drop_repeats. */
    uint64_t each = sizeof(uint64_t) + sizeof(struct segment) + sizeof(uint32_t);
    uint8_t *memory = scratch(l, (count + 2) * each + seen_size * sizeof(uint32_t));
    struct request r = { .hashes = (uint64_t *)memory, .tokens = tokens };
    r.segments = (struct segment *)(r.hashes + count);
    r.handles = (uint32_t *)(r.segments + count + 2);
    uint32_t *seen = r.handles + count;
    hash_keys(l, group, keys, count, key_bytes, 1, r.hashes);
    r.count = count;
    match(l, &r);
    if (r.matched < r.count) /* matched keys are all different */
        r.count = drop_repeats(r.hashes, count, seen, seen_size);
    memset(r.handles, 0, r.count * sizeof *r.handles);
    compute_features(l, &r);
    return_matched(l, &r);
    if (r.matched < r.count) {
        uint32_t in_last_unit = (tokens * r.count - 1) % UNIT_TOKENS / tokens + 1; /* keys that begin in it */
        uint32_t last = r.count > in_last_unit ? r.count - in_last_unit : 0;
        take_uncounted(l, r.hashes + r.matched, r.count - r.matched, r.handles + r.matched, 0);
        if (last < r.matched)
            last = r.matched;
        add_segment(&r, r.matched, last, new_class(&r));
        add_segment(&r, last, r.count, LAST);
    }
    join_segments(&r);
    add_spans(l, &r, block_bytes);
    l->recorded_keys += r.count;
    l->recorded_bytes += r.count * block_bytes;
}

/* Records one group's part of a request; the last part ends the request. */
void kvoffd_learned_record(struct learned *l, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                           uint64_t block_bytes, uint64_t tokens, uint64_t is_last)
{
    record_part(l, group, keys, count, key_bytes, block_bytes, tokens);
    if (!is_last || !l->recorded_keys)
        return;
    l->known.requests++;
    l->known.now += l->recorded_bytes;
    enter_epoch(l);
    forget_oldest(l, l->recorded_keys);
    l->recorded_keys = l->recorded_bytes = 0;
    sweep_cells(l);
    if (l->known.now >= l->learn_at && l->known.requests >= l->learn_at_request)
        learn(l);
}

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
uint64_t kvoffd_learned_admit(struct learned *l, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                               uint64_t block_bytes, const uint64_t *starts, uint64_t chains, struct offer *offers)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes), made = 0;

    forget_oldest(l, count);
    l->known.lowest = lowest_score(l);
    hash_keys(l, group, keys, count, key_bytes, 1, hashes);
    for (uint64_t chain = 0; chain < chains; chain++) {
        uint64_t end = chain + 1 < chains ? starts[chain + 1] : count;
        double score = INFINITY;
        for (uint64_t i = starts[chain]; i < end;) {
            struct place first;
            uint32_t length = run_length(l, hashes + i, end - i, &first), number = first.span;
            if (!number) {
                number = begin_span(l, hashes + i, length, STORED, block_bytes, l->known.now);
                enter_age_order(l, number, 0);
            }
            double own = l->known.as_lru ? INFINITY : l->admission_score[l->spans[number].class];
            if (l->spans[number].rejected)
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

void kvoffd_learned_rejected(struct learned *l, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes);

    hash_keys(l, group, keys, count, key_bytes, 1, hashes);
    for (uint64_t i = 0; i < count;) {
        struct place first;
        uint32_t length = run_length(l, hashes + i, count - i, &first);
        for (uint32_t number = first.span; number && !l->spans[number].rejected; number = l->spans[number].child)
            l->spans[number].rejected = 1;
        i += length;
    }
}

/* Adds blocks of keys, both from the last to the first. Returns 0, or 1 if a key has a block: not all are added. */
uint64_t kvoffd_learned_insert(struct learned *l, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                               uint64_t block_bytes, const uint32_t *numbers)
{
    uint64_t *hashes = scratch(l, MAX_TOGETHER * sizeof *hashes);

    for (uint64_t together; count; count -= together, keys += together * key_bytes, numbers += together) {
        together = count < MAX_TOGETHER ? count : MAX_TOGETHER;
        hash_keys(l, group, keys, together, key_bytes, -1, hashes);
        for (uint64_t i = 0; i < together;) {
            struct place first;
            uint32_t length = run_length(l, hashes + i, together - i, &first), number = first.span;
            if (!number) {
                number = begin_span(l, hashes + i, length, RECOVERED, block_bytes, l->known.now);
                enter_age_order(l, number, 0);
                first.place = 0;
            }
            struct span *s = &l->spans[number];
            uint32_t *handles = handle_at(s, first.place);
            for (uint32_t at = 0; at < length; at++) {
                if (handles[at])
                    return 1;
                handles[at] = numbers[together - 1 - i - at] + 1; /* 0 means none */
            }
            if (first.place + length > s->top)
                s->top = first.place + length;
            s->blocks += length;
            if (s->blocks == length) {
                s->age_bin = age_bin(l, s->since);
                enter_cell(l, number);
            }
            add_blocks(l, s, length);
            i += length;
        }
        l->known.blocks += together;
    }
    return 0;
}

/* Removes blocks of keys, from the last to the first. Returns 0, or 1 if a key has none: not all are removed then. */
uint64_t kvoffd_learned_remove(struct learned *l, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes);

    hash_keys(l, group, keys, count, key_bytes, -1, hashes);
    for (uint64_t i = 0; i < count;) {
        struct place first;
        uint32_t length = run_length(l, hashes + i, count - i, &first);
        if (!first.span)
            return 1;
        struct span *s = &l->spans[first.span];
        uint32_t *handles = handle_at(s, first.place);
        for (uint32_t at = 0; at < length; at++) {
            if (!handles[at])
                return 1;
            handles[at] = 0;
        }
        s->blocks -= length;
        add_blocks(l, s, -(int64_t)length);
        if (!s->blocks)
            leave_cell(l, first.span);
        settle_span(l, first.span);
        i += length;
    }
    l->known.blocks -= count;
    forget_oldest(l, count);
    return 0;
}

/* Forgets keys, given from the last to the first, that lost their blocks. Returns how many had one. */
uint64_t kvoffd_learned_forget(struct learned *l, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    uint64_t *hashes = scratch(l, count * (sizeof *hashes + sizeof(uint32_t))), blocks = 0;
    uint32_t *handles = (uint32_t *)(hashes + count);

    hash_keys(l, group, keys, count, key_bytes, -1, hashes);
    memset(handles, 0, count * sizeof *handles);
    take_uncounted(l, hashes, count, handles, 1);
    for (uint64_t i = 0; i < count; i++)
        blocks += handles[i] != 0;
    l->known.blocks -= blocks;
    return blocks;
}

/* --- Chance of reuse --- */

static double chance(const struct learned *l, const struct span *s, uint64_t within)
{
    const double *edges = l->counts.edges;
    double alive = 1, age = (double)(l->known.now - s->since), until = age + within;

    for (int bin = bin_of(l, age); bin < BINS && edges[bin] < until; bin++) {
        double end = bin + 1 < BINS ? edges[bin + 1] : 2 * edges[bin];
        double part = (fmin(until, end) - fmin(fmax(age, edges[bin]), end)) / (end - edges[bin]);
        alive *= pow(1 - l->counts.hazard[s->class][bin], part);
    }
    return 1 - alive;
}

/* Writes the chance of each key, 1 if unknown. */
void kvoffd_learned_chances(struct learned *l, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                            uint64_t within, double *chances)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes);

    hash_keys(l, group, keys, count, key_bytes, 1, hashes);
    for (uint64_t i = 0; i < count; i++) {
        const struct place *there = find_place(l, hashes[i]);
        chances[i] = there->hash && !l->known.as_lru ? chance(l, &l->spans[there->span], within) : 1;
    }
}

/* --- Restart --- */

/* Makes the state for a pool of `lifetime` bytes. `seed` is secret, so that nobody can choose keys that collide. */
struct learned *kvoffd_learned_new(uint64_t lifetime, const uint64_t seed[2])
{
    struct learned *l = calloc(1, sizeof *l);

    if (!l)
        return NULL;
    l->known.lifetime = lifetime;
    l->learn_at = lifetime / 4;
    l->weight[0] = 1;
    for (int bin = 0; bin < BINS; bin++)
        l->counts.edges[bin] = AGES[bin] * lifetime;
    or_end(open_index(&l->places, seed) ? l : NULL);
    l->span_capacity = MIN_SPANS;
    l->spans = or_end(calloc(MIN_SPANS, sizeof *l->spans));
    l->span_top = 1; /* number 0 means none */
    compute_scores(l);
    order_cells(l);
    forget_oldest(l, 0);
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

/* Continues with the time and counters of an earlier daemon that learned.py has set; call it first. */
void kvoffd_learned_resume(struct learned *l)
{
    l->epoch = l->decayed_at = l->known.now / epoch_bytes(l);
    l->decayed_at_request = l->known.requests;
    l->weight[l->epoch % EPOCHS_KEPT] = 1;
    learn(l);
}

/* Estimates the hits of an LRU at other sizes: a list of sampled keys in the order of their last use, cut at these
 * sizes.
 *
 * Called by curve.py. Chains are divided into pieces of up to 512 tokens: one key if blocks are large. If they are
 * small, the first pieces have one key, and later ones at most a part of the keys before them: prompts end and diverge
 * within pieces, which may hide only a small part of a prompt. A piece is identified by its first key, and has the keys
 * of its last use. It is a hit once an engine has offered its last key for storing: what others compute at the same time
 * is not found at any size. The key's hash decides whether the piece is sampled, always or never; each sampled piece
 * represents `scale` pieces. The first pieces of chains have a sample of their own with a higher rate, because one with
 * which all prompts begin may be a large part of all uses. The list is divided into segments, one between each two
 * sizes, so that a use costs one step per segment and no search.
 *
 * Source of hash sampling with a bounded sample: C. Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST
 * 2015.
 */
#include "../system/key_hash.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST, NEXT, REST, KINDS };
enum { SIZES = 13, PIECES = 131072, PIECE_TOKENS = 512, BUCKETS = 2 * PIECES, NONE = 0, NEXT_PIECES = 8 };
/* A piece of more than one key has at most 2/PARTS of the keys before it. At most MAX_SMALL pieces of a chain are
 * shorter than its longest. */
enum { PARTS = 32, MAX_SMALL = PARTS + 64 * PARTS / 2 };

/* Pieces of each kind have their own range of places, from begin[kind] to begin[kind + 1]. Place 0 is unused. */
static const uint32_t begin[KINDS + 1] = {1, PIECES / 4, PIECES / 2, PIECES};
/* Limits for one request: pieces of each kind that a sweep examines, and moves to the next segment in addition to those
 * that its own pieces cause. */
enum { SWEPT = 256, MOVED = 4096 };
/* Last stored keys that are remembered, as reports of prompts may come after their stores; and pieces that wait for the
 * store of their last key. If one gets the place of another, that counts as stored. */
enum { STORED = 32768, WAITING = 4096 };

struct piece {
    uint64_t hash; /* hash of its first key */
    uint64_t last; /* hash of its last key */
    uint32_t newer, older; /* neighbours in the list; `older` of a free place is the next free one */
    uint32_t next; /* next piece in its bucket */
    uint32_t bytes;
    uint16_t keys, readable; /* `keys` is 0 if the place is free; the first `readable` were stored */
    uint8_t kind, segment;
    uint8_t halvings; /* halvings of its kind's sample when its weight was last set */
};

/* A sampled piece of the request. */
struct use {
    uint64_t hash, last;
    uint16_t keys, readable; /* the engine had, or found, the first `readable` */
    uint8_t kind;
};

/* A piece whose last key has this hash, and was not stored yet; `at` is NONE if the place is free. */
struct waiting {
    uint64_t last;
    uint32_t at;
};

/* Requested tokens of a namespace; curve.py has the same. */
struct counts {
    double total[KINDS]; /* all pieces */
    double sampled[KINDS]; /* pieces that the sampled ones represent */
    double hits[KINDS][SIZES]; /* part of `sampled`, by the smallest size at which the use is a hit */
    double found; /* found by the requests themselves */
};

/* curve.py reads the first fields. */
struct curve {
    uint64_t nbytes;
    double seen_bytes; /* estimated bytes of the blocks of all pieces in the list */
    double width[SIZES]; /* bytes between two sizes */
    double held[SIZES]; /* bytes in each segment */
    uint32_t halvings[KINDS]; /* halvings of the sample: a sampled hash has this many leading 0 bits */
    uint32_t hand[KINDS]; /* next place to sweep after the last halving */
    uint32_t free[KINDS], top[KINDS]; /* first free place below `top`; places from `top` on were never used */
    uint32_t newest;
    uint32_t oldest[SIZES]; /* oldest piece of each segment; NONE if it is empty */
    uint64_t seed[2];
    struct use *uses;
    uint64_t *seen; /* hash table of the request's pieces; 0 if empty */
    uint64_t capacity; /* number of `uses`, a power of two; `seen` has twice as many */
    uint64_t stored[STORED]; /* hashes of keys that were stored recently, by their low bits */
    struct waiting waiting[WAITING]; /* by the low bits of `last` */
    uint32_t buckets[BUCKETS];
    struct piece pieces[PIECES]; /* the first one is unused */
};

static uint64_t hash_of(const struct curve *c, uint64_t group, const uint8_t *key, uint64_t key_bytes)
{
    return key_hash(c->seed[0] ^ group, c->seed[1], key, key_bytes);
}

static uint32_t *bucket(struct curve *c, uint64_t hash)
{
    return &c->buckets[hash % BUCKETS]; /* the low bits, because the high ones decide the sampling */
}

static uint32_t find(struct curve *c, uint64_t hash)
{
    uint32_t at = *bucket(c, hash);

    while (at != NONE && c->pieces[at].hash != hash)
        at = c->pieces[at].next;
    return at;
}

static int is_sampled(const struct curve *c, int kind, uint64_t hash)
{
    return hash <= UINT64_MAX >> c->halvings[kind];
}

/* Pieces that a sampled one represents. */
static double scale(uint32_t halvings)
{
    return (double)((uint64_t)1 << halvings);
}

static double weight(const struct piece *piece)
{
    return piece->bytes * scale(piece->halvings);
}

/* Returns the piece's newer neighbour if it is in this segment. */
static uint32_t newer_in_segment(const struct curve *c, uint32_t at, uint8_t segment)
{
    uint32_t newer = c->pieces[at].newer;

    return newer != NONE && c->pieces[newer].segment == segment ? newer : NONE;
}

/* Takes a piece out of the list. */
static void unlink_piece(struct curve *c, uint32_t at)
{
    struct piece *piece = &c->pieces[at];

    c->held[piece->segment] -= weight(piece);
    if (c->oldest[piece->segment] == at)
        c->oldest[piece->segment] = newer_in_segment(c, at, piece->segment);
    if (piece->newer != NONE)
        c->pieces[piece->newer].older = piece->older;
    else
        c->newest = piece->older;
    if (piece->older != NONE)
        c->pieces[piece->older].newer = piece->newer;
}

static void forget(struct curve *c, uint32_t at)
{
    struct piece *piece = &c->pieces[at];
    uint32_t *link = bucket(c, piece->hash);

    unlink_piece(c, at);
    while (*link != at)
        link = &c->pieces[*link].next;
    *link = piece->next;
    piece->keys = 0;
    piece->older = c->free[piece->kind];
    c->free[piece->kind] = at;
}

/* Moves the excess of each segment to the next, in up to `steps` steps; the excess of the last one is forgotten. */
static void move_excess(struct curve *c, uint64_t steps)
{
    for (int segment = 0; segment < SIZES; segment++) {
        for (; c->held[segment] > c->width[segment] && c->oldest[segment] != NONE && steps; steps--) {
            uint32_t at = c->oldest[segment];
            struct piece *piece = &c->pieces[at];

            if (segment == SIZES - 1) {
                forget(c, at);
                continue;
            }
            c->oldest[segment] = newer_in_segment(c, at, segment);
            c->held[segment] -= weight(piece);
            c->held[segment + 1] += weight(piece);
            piece->segment = segment + 1;
            if (c->oldest[segment + 1] == NONE)
                c->oldest[segment + 1] = at;
        }
        if (c->oldest[segment] == NONE)
            c->held[segment] = 0; /* clears rounding errors */
    }
}

/* Examines the next pieces of a kind whose sample was halved: forgets those that are not sampled any more, and doubles
 * what the others represent. */
static void sweep(struct curve *c, int kind, int count)
{
    for (; count-- && c->hand[kind] < begin[kind + 1]; c->hand[kind]++) {
        struct piece *piece = &c->pieces[c->hand[kind]];

        if (!piece->keys)
            continue;
        if (!is_sampled(c, kind, piece->hash)) {
            forget(c, c->hand[kind]);
            continue;
        }
        c->held[piece->segment] -= weight(piece);
        piece->halvings = c->halvings[kind];
        c->held[piece->segment] += weight(piece);
    }
}

/* Returns a free place for a piece; NONE if the sample had to be halved and no longer includes the piece. */
static uint32_t new_place(struct curve *c, int kind, uint64_t hash)
{
    uint32_t at;

    while (!c->free[kind] && c->top[kind] == begin[kind + 1]) {
        if (c->hand[kind] == begin[kind + 1]) {
            c->halvings[kind]++;
            c->hand[kind] = begin[kind];
        }
        sweep(c, kind, 1);
    }
    if (!is_sampled(c, kind, hash))
        return NONE;
    at = c->free[kind];
    if (!at)
        return c->top[kind]++;
    c->free[kind] = c->pieces[at].older;
    return at;
}

/* Ends the wait of a piece: all its keys count as stored, unless its place or last key has changed since. */
static void end_wait(struct curve *c, struct waiting *wait)
{
    struct piece *piece = &c->pieces[wait->at];

    if (wait->at != NONE && piece->keys && piece->last == wait->last)
        piece->readable = piece->keys;
    wait->at = NONE;
}

/* Has a piece wait until its last key is stored, if it was not stored recently. */
static void await_store(struct curve *c, uint32_t at)
{
    struct piece *piece = &c->pieces[at];
    struct waiting *wait = &c->waiting[piece->last % WAITING];

    if (c->stored[piece->last % STORED] == piece->last) {
        piece->readable = piece->keys;
        return;
    }
    if (wait->last != piece->last || wait->at != at) /* of another piece */
        end_wait(c, wait);
    *wait = (struct waiting){.last = piece->last, .at = at};
}

static void use(struct curve *c, const struct use *used, uint64_t bytes)
{
    uint32_t at = find(c, used->hash);
    struct piece *piece;

    if (at == NONE) {
        if ((at = new_place(c, used->kind, used->hash)) == NONE)
            return;
        piece = &c->pieces[at];
        piece->hash = used->hash;
        piece->kind = used->kind;
        piece->readable = 0;
        piece->next = *bucket(c, used->hash);
        *bucket(c, used->hash) = at;
    } else {
        unlink_piece(c, at);
        piece = &c->pieces[at];
    }
    if (used->keys >= piece->keys) { /* otherwise only its beginning was used */
        if (used->keys == piece->keys && used->last != piece->last)
            piece->readable /= 2; /* another piece that shares its beginning */
        piece->keys = used->keys;
        piece->last = used->last;
    }
    if (piece->readable < used->readable)
        piece->readable = used->readable;
    if (piece->readable < piece->keys)
        await_store(c, at);
    piece->bytes = bytes * piece->keys < UINT32_MAX ? bytes * piece->keys : UINT32_MAX;
    piece->halvings = c->halvings[piece->kind];
    piece->segment = 0;
    piece->newer = NONE;
    piece->older = c->newest;
    if (c->newest != NONE)
        c->pieces[c->newest].newer = at;
    c->newest = at;
    c->held[0] += weight(piece);
    if (c->oldest[0] == NONE)
        c->oldest[0] = at;
}

/* Makes `uses` and `seen` hold this many pieces; returns whether there was enough memory. */
static int grow(struct curve *c, uint64_t pieces)
{
    uint64_t capacity = 64, each = sizeof *c->uses + 2 * sizeof *c->seen;

    if (pieces <= c->capacity)
        return 1;
    while (capacity < pieces)
        capacity *= 2;
    void *made = malloc(capacity * each);
    if (!made)
        return 0;
    free(c->uses);
    c->uses = made;
    c->seen = (uint64_t *)(c->uses + capacity);
    c->nbytes += (capacity - c->capacity) * each;
    c->capacity = capacity;
    return 1;
}

/* Returns how many of a piece's keys a pool that has the piece would find: of its last use, those that were stored. If its
 * last key is another one than then, two pieces share their beginning: half of it, on average. `findable`: keys before the
 * first that no pool would have. `key`: the piece's first. */
static double keys_there(const struct curve *c, const struct piece *known, const struct use *now, uint64_t findable,
                         uint64_t group, const uint8_t *key, uint64_t key_bytes)
{
    double there = now->keys;

    if (known->keys < now->keys) {
        uint64_t then_last = hash_of(c, group, key + (known->keys - 1) * key_bytes, key_bytes);
        there = known->last == then_last ? known->keys : known->keys / 2.0;
    } else if (known->keys == now->keys && known->last != now->last)
        there = now->keys / 2.0;
    if (there > known->readable)
        there = known->readable;
    return there < findable ? there : findable;
}

/* Counts one chain of a request: `count` keys of `key_bytes`, whose blocks have `bytes` and `tokens`. The request found
 * the first `ready_prefix` of them. The engine had the first `own` of them itself: these are used, but not counted. Keys
 * behind the first `findable` are found at no size. */
void kvoffd_curve_asked(struct curve *c, struct counts *counts, uint64_t group, const uint8_t *keys, uint64_t count,
                        uint64_t key_bytes, uint64_t bytes, uint64_t tokens, uint64_t ready_prefix, uint64_t own,
                        uint64_t findable)
{
    uint64_t per = tokens > 1 && tokens < PIECE_TOKENS ? PIECE_TOKENS / tokens : 1; /* most keys of a piece */
    uint64_t readable = ready_prefix > own ? ready_prefix : own;
    uint64_t used = 0, n = 1 /* keys of this piece */, pieces = MAX_SMALL + 2 * count / per, mask;

    counts->found += (ready_prefix > own ? ready_prefix - own : 0) * tokens;
    if (pieces > count)
        pieces = count;
    if (!count || !grow(c, pieces))
        return;
    for (mask = 63; mask + 1 < 2 * pieces; mask = 2 * mask + 1)
        ;
    memset(c->seen, 0, (mask + 1) * sizeof *c->seen);
    for (uint64_t first = 0, longest = 1; first < count; first += n) {
        const uint8_t *key = keys + first * key_bytes;
        struct use one = {.hash = hash_of(c, group, key, key_bytes)};
        uint32_t at;
        double there, not_own;

        while (2 * longest <= per && PARTS * longest <= first)
            longest *= 2;
        one.keys = n = longest < count - first ? longest : count - first;
        one.readable = readable <= first ? 0 : readable - first < n ? readable - first : n;
        one.kind = first < per ? FIRST : first < NEXT_PIECES * per ? NEXT : REST;
        uint64_t place = one.hash & mask;
        while (c->seen[place] && c->seen[place] != one.hash)
            place = (place + 1) & mask;
        if (c->seen[place]) /* a repeated piece counts once */
            continue;
        c->seen[place] = one.hash;
        not_own = first >= own ? n : first + n > own ? first + n - own : 0;
        counts->total[one.kind] += tokens * not_own;
        if (!is_sampled(c, one.kind, one.hash))
            continue;
        one.last = n > 1 ? hash_of(c, group, key + (n - 1) * key_bytes, key_bytes) : one.hash;
        counts->sampled[one.kind] += tokens * not_own * scale(c->halvings[one.kind]);
        if ((at = find(c, one.hash)) != NONE) {
            const struct piece *known = &c->pieces[at];
            there = keys_there(c, known, &one, findable > first ? findable - first : 0, group, key, key_bytes);
            there -= n - not_own;
            counts->hits[one.kind][known->segment] += tokens * (there > 0 ? there : 0) * scale(c->halvings[one.kind]);
        }
        c->uses[used++] = one;
    }
    for (int kind = 0; kind < KINDS; kind++)
        sweep(c, kind, SWEPT);
    pieces = used;
    while (used) /* the tail first, because an LRU evicts it first */
        use(c, &c->uses[--used], bytes);
    move_excess(c, MOVED + SIZES * pieces);
    c->seen_bytes = 0;
    for (int segment = 0; segment < SIZES; segment++)
        c->seen_bytes += c->held[segment];
}

/* Counts keys as stored from now on: `count` keys of `key_bytes` that an engine offers. */
void kvoffd_curve_stored(struct curve *c, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    for (uint64_t n = 0; n < count; n++) {
        uint64_t hash = hash_of(c, group, keys + n * key_bytes, key_bytes);
        struct waiting *wait = &c->waiting[hash % WAITING];

        c->stored[hash % STORED] = hash;
        if (wait->last == hash)
            end_wait(c, wait);
    }
}

/* Makes a curve for these sizes in bytes, ascending; NULL if memory is short. */
struct curve *kvoffd_curve_new(const double sizes[SIZES], const uint8_t seed[16])
{
    struct curve *c = calloc(1, sizeof *c);

    if (!c)
        return NULL;
    c->nbytes = sizeof *c;
    memcpy(c->seed, seed, sizeof c->seed);
    for (int size = 0; size < SIZES; size++)
        c->width[size] = sizes[size] - (size ? sizes[size - 1] : 0);
    for (int kind = 0; kind < KINDS; kind++) {
        c->top[kind] = begin[kind];
        c->hand[kind] = begin[kind + 1];
    }
    return c;
}

void kvoffd_curve_free(struct curve *c)
{
    free(c->uses);
    free(c);
}

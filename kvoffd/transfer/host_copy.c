/* The copy loop of host memory, which also computes the XXH3 checksums of the slots it fills, in one pass over the bytes;
 * and checksums of other slots.
 *
 * Called by engine.py without the GIL. Plain C for little-endian machines, with SSE2 intrinsics where compilers generate
 * worse code.
 */
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "XXH3 reads little-endian words"
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Distance of prefetches where pages are copied one at a time. */
enum { AHEAD = 1024 };
/* Pages that are copied in turn. */
enum { PAGES = 4, BLOCKS_PER_PAGE = 4, QUARTERS = 4 };
/* Whether to use what is fastest on AMD Zen 3, but slower on Intel CPUs: AVX2, which makes checksums a tenth faster, and one
 * page at a time for copies without checksums, which makes those a seventh faster. */
#if defined(ON_AMD) /* by a test */
#define AVX2
#elif defined(__x86_64__)
#define ON_AMD (__builtin_cpu_is("amd") && __builtin_cpu_supports("avx2"))
#define AVX2 __attribute__((target("avx2")))
#else
#define ON_AMD 0
#define AVX2
#endif
/* Interval of polling the stop flag: 50 to 100 microseconds, even if pieces are small. */
enum { LOOK_BYTES = 1 << 20, LOOK_PIECES = 512 };

/* XXH3, 64 bits, seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md). */
enum { STRIPE = 64, STRIPES_PER_BLOCK = 16, BLOCK = STRIPE * STRIPES_PER_BLOCK, SHORTEST = 241, SCRAMBLE_KEY = 128, LAST_KEY = 121, MERGE_KEY = 11 };
static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9;
static const uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5, PRIME_MX1 = 0x165667919E3779F9;
static const uint8_t KEY[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef uint64_t pair __attribute__((vector_size(16), may_alias));
typedef pair unaligned_pair __attribute__((aligned(1)));
enum { PAIRS = 4 };
typedef struct {
    pair of[PAIRS];
} stripe;
#if defined(SWAPPED) /* a test breaks it */
#elif defined(__clang__)
#define SWAPPED(v) __builtin_shufflevector(v, v, 1, 0)
#else
#define SWAPPED(v) __builtin_shuffle(v, (pair){1, 0})
#endif

/* The slots that a plan fills, in its order. */
struct filling {
    const uint64_t *slot, *slot_bytes; /* [slots] address and length */
    uint64_t *sum;                     /* [slots] the slot's checksum; stays 0 if it cannot be computed here */
    uint64_t slots;

    uint64_t at_slot, filled; /* the slot being filled, and the contiguous bytes at its start that are copied */
    uint64_t sums[8];
};

static ALWAYS_INLINE stripe load(const void *from)
{
    const unaligned_pair *pairs = from;

    return (stripe){{pairs[0], pairs[1], pairs[2], pairs[3]}};
}

/* Multiplies the lower halves of two pairs' words. */
static ALWAYS_INLINE pair products(pair one, pair other)
{
#if defined(__SSE2__)
    return (pair)_mm_mul_epu32((__m128i)one, (__m128i)other); /* GCC compiles the line below to three of these */
#else
    return (one & 0xffffffff) * (other & 0xffffffff);
#endif
}

static ALWAYS_INLINE stripe scrambled(stripe sums)
{
    const stripe key = load(KEY + SCRAMBLE_KEY);
    const pair prime = {PRIME32_1, PRIME32_1};

    for (int i = 0; i < PAIRS; i++) {
        pair mixed = sums.of[i] ^ (sums.of[i] >> 47) ^ key.of[i];
        sums.of[i] = products(mixed, prime) + (products(mixed >> 32, prime) << 32);
    }
    return sums;
}

static ALWAYS_INLINE stripe added(stripe sums, stripe data, const uint8_t *key)
{
    const stripe keys = load(key);

    for (int i = 0; i < PAIRS; i++) {
        pair keyed = data.of[i] ^ keys.of[i];
        sums.of[i] += SWAPPED(data.of[i]) + products(keyed, keyed >> 32);
    }
    return sums;
}

/* Non-temporal stores: caches would read every line before it is overwritten, which makes a copy take 1.5 times as long, and
 * evict other data for bytes that are not read soon. `to` is aligned to a stripe. */
static ALWAYS_INLINE void put(uint8_t *to, stripe data)
{
    for (int i = 0; i < PAIRS; i++)
#if defined(__SSE2__)
        _mm_stream_si128((__m128i *)to + i, (__m128i)data.of[i]);
#else
        ((pair *)to)[i] = data.of[i];
#endif
}

/* Copies a quarter of a block to `to`, if not NULL, and returns the block's sums including it. */
static ALWAYS_INLINE stripe copied_quarter(uint8_t *to, const uint8_t *from, const uint8_t *ahead, stripe sums,
                                           const uint8_t *key)
{
    for (int i = 0; i < STRIPES_PER_BLOCK / QUARTERS; i++) {
        __builtin_prefetch(ahead + i * STRIPE);
        stripe data = load(from + i * STRIPE);
        sums = added(sums, data, key + 8 * i);
        if (to)
            put(to + i * STRIPE, data);
    }
    return sums;
}

/* Copies up to 16 blocks and returns the slot's sums including them, which a caller may ignore. Copies 256 bytes of each of
 * four pages in turn: memory is read a third faster in four places than in one. `next`: address of the next read. */
static ALWAYS_INLINE stripe copied_pages(uint8_t *to, const uint8_t *from, int blocks, stripe sums, const uint8_t *next)
{
    stripe of_block[PAGES * BLOCKS_PER_PAGE] = {0};

    for (int column = 0; column < BLOCKS_PER_PAGE * QUARTERS; column++)
        for (int number = column / QUARTERS; number < blocks; number += BLOCKS_PER_PAGE) {
            int quarter = column % QUARTERS, at = number * BLOCK + quarter * (BLOCK / QUARTERS);
            const uint8_t *key = KEY + quarter * (8 * STRIPES_PER_BLOCK / QUARTERS);
            of_block[number] = copied_quarter(to ? to + at : NULL, from + at, next + at, of_block[number], key);
        }
    for (int number = 0; number < blocks; number++) {
        for (int i = 0; i < PAIRS; i++)
            sums.of[i] += of_block[number].of[i];
        sums = scrambled(sums);
    }
    return sums;
}

/* Copies `count` stripes to `to`, if not NULL, and adds them to the slot's sums, if not NULL. `first` is the number of the
 * first stripe in its slot, `next` the address of the next read. `by_pages`: copy several pages in turn. */
static ALWAYS_INLINE void stripes(uint8_t *to, const uint8_t *from, uint64_t count, uint64_t first,
                                  uint64_t *slot_sums, const uint8_t *next, int by_pages)
{
    stripe sums = {{{0}}};
    uint64_t nbytes = count * STRIPE;

    if (slot_sums)
        sums = load(slot_sums);
    for (uint64_t at = 0; at < nbytes;) {
        uint64_t in_block = first % STRIPES_PER_BLOCK, left = (nbytes - at) / STRIPE;
        if (by_pages && !in_block && left >= STRIPES_PER_BLOCK) {
            uint64_t blocks = left / STRIPES_PER_BLOCK;
            if (blocks > PAGES * BLOCKS_PER_PAGE)
                blocks = PAGES * BLOCKS_PER_PAGE;
            uint64_t end = at + blocks * BLOCK;
            sums = copied_pages(to ? to + at : NULL, from + at, blocks, sums, end < nbytes ? from + end : next);
            first += blocks * STRIPES_PER_BLOCK;
            at = end;
            continue;
        }
        uint64_t run = left < STRIPES_PER_BLOCK - in_block ? left : STRIPES_PER_BLOCK - in_block;
        const uint8_t *ahead = at + AHEAD < nbytes ? from + at + AHEAD : next + (at + AHEAD - nbytes);
        for (uint64_t i = 0; i < run; i++, at += STRIPE) {
            __builtin_prefetch(ahead + i * STRIPE);
            stripe data = load(from + at);
            if (slot_sums)
                sums = added(sums, data, KEY + 8 * (in_block + i));
            if (to)
                put(to + at, data);
        }
        first += run;
        if (slot_sums && first % STRIPES_PER_BLOCK == 0)
            sums = scrambled(sums);
    }
    if (slot_sums)
        memcpy(slot_sums, &sums, sizeof sums);
}

static AVX2 void copy_summed_on_amd(uint8_t *to, const uint8_t *from, uint64_t count, uint64_t first,
                                    uint64_t *slot_sums, const uint8_t *next)
{
    stripes(to, from, count, first, slot_sums, next, 1);
}

static void copy_summed(uint8_t *to, const uint8_t *from, uint64_t count, uint64_t first, uint64_t *slot_sums,
                        const uint8_t *next)
{
    if (ON_AMD)
        copy_summed_on_amd(to, from, count, first, slot_sums, next);
    else
        stripes(to, from, count, first, slot_sums, next, 1);
}

static AVX2 void read_summed_on_amd(const uint8_t *from, uint64_t count, uint64_t *slot_sums, const uint8_t *next)
{
    stripes(NULL, from, count, 0, slot_sums, next, 1);
}

static void read_summed(const uint8_t *from, uint64_t count, uint64_t *slot_sums, const uint8_t *next)
{
    if (ON_AMD)
        read_summed_on_amd(from, count, slot_sums, next);
    else
        stripes(NULL, from, count, 0, slot_sums, next, 1);
}

static AVX2 void copy_stripes_on_amd(uint8_t *to, const uint8_t *from, uint64_t count, const uint8_t *next)
{
    stripes(to, from, count, 0, NULL, next, 0);
}

static void copy_stripes(uint8_t *to, const uint8_t *from, uint64_t count, const uint8_t *next)
{
    if (ON_AMD)
        copy_stripes_on_amd(to, from, count, next);
    else
        stripes(to, from, count, 0, NULL, next, 1);
}

static void copy_plain(uint8_t *to, const uint8_t *from, uint64_t nbytes, const uint8_t *next)
{
    uint64_t whole = (uint64_t)to % STRIPE ? 0 : nbytes / STRIPE;

    copy_stripes(to, from, whole, next);
    memcpy(to + whole * STRIPE, from + whole * STRIPE, nbytes - whole * STRIPE);
}

/* Initializes a checksum's state. */
static void begin_slot(struct filling *c)
{
    const uint64_t start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

    memcpy(c->sums, start, sizeof start);
    c->filled = 0;
}

static uint64_t checksum(const struct filling *c)
{
    uint64_t length = c->slot_bytes[c->at_slot], hash = length * PRIME64_1;
    const uint8_t *end = (const uint8_t *)c->slot[c->at_slot] + length;
    stripe last = added(load(c->sums), load(end - STRIPE), KEY + LAST_KEY);

    for (int i = 0; i < PAIRS; i++) {
        pair keyed = last.of[i] ^ *(const unaligned_pair *)(KEY + MERGE_KEY + 16 * i);
        unsigned __int128 product = (unsigned __int128)keyed[0] * keyed[1];
        hash += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ hash >> 32;
}

/* Copies `nbytes` to the end of a slot's filled bytes, and adds them to its checksum. */
static void fill(struct filling *c, uint8_t *to, const uint8_t *from, uint64_t nbytes, const uint8_t *next)
{
    uint64_t in_sums = (c->slot_bytes[c->at_slot] - 1) / STRIPE; /* stripes; the last 64 bytes are added by checksum() */
    uint64_t number = c->filled / STRIPE, head = -c->filled % STRIPE;

    if (head) { /* the rest of the previous piece's last stripe */
        if (head > nbytes)
            head = nbytes;
        memcpy(to, from, head);
        to += head, from += head, nbytes -= head, c->filled += head;
        if (c->filled % STRIPE == 0 && number < in_sums) /* copied onto itself, to add it to the sums */
            copy_summed(to - STRIPE, to - STRIPE, 1, number, c->sums, from);
        number++;
    }
    uint64_t count = nbytes / STRIPE;
    if (number + count > in_sums)
        count = number < in_sums ? in_sums - number : 0;
    copy_summed(to, from, count, number, c->sums, next);
    memcpy(to + count * STRIPE, from + count * STRIPE, nbytes - count * STRIPE);
    c->filled += nbytes;
    if (c->filled == c->slot_bytes[c->at_slot])
        c->sum[c->at_slot] = checksum(c);
}

/* Copies up to `nbytes` to `to`, at most to the end of its slot; returns the bytes copied. */
static uint64_t copy_into_slot(struct filling *c, uint8_t *to, const uint8_t *from, uint64_t nbytes,
                               const uint8_t *next)
{
    uint64_t address = (uint64_t)to;

    /* Go to the slot that holds the address: an address before a slot gives a large unsigned distance too. */
    while (c->at_slot < c->slots && address - c->slot[c->at_slot] >= c->slot_bytes[c->at_slot]) {
        c->at_slot++;
        begin_slot(c);
    }
    if (c->at_slot == c->slots) {
        copy_plain(to, from, nbytes, next);
        return nbytes;
    }
    uint64_t length = c->slot_bytes[c->at_slot], offset = address - c->slot[c->at_slot];
    if (nbytes > length - offset) {
        nbytes = length - offset;
        next = from + nbytes;
    }
    /* If a slot is not filled from its first byte on, `offset` never equals `filled` again. */
    if (length >= SHORTEST && c->slot[c->at_slot] % STRIPE == 0 && offset == c->filled)
        fill(c, to, from, nbytes, next);
    else
        copy_plain(to, from, nbytes, next);
    return nbytes;
}

/* Copies size[i] bytes from source[i] to destination[i] until all is copied or `stop` is set; returns the bytes copied.
 * `slot`, `slot_bytes` and `sum`: see struct filling. */
uint64_t kvoffd_host_copy(const uint64_t *destination, const uint64_t *source, const uint64_t *size, uint64_t pieces,
                          const uint64_t *slot, const uint64_t *slot_bytes, uint64_t *sum, uint64_t slots,
                          const uint32_t *stop)
{
    struct filling c = {.slot = slot, .slot_bytes = slot_bytes, .sum = sum, .slots = slots};
    uint64_t copied = 0, look_bytes = 0, look_piece = 0, piece = 0, done = 0; /* bytes of this piece */

    begin_slot(&c);
    while (piece < pieces) {
        if (copied >= look_bytes || piece >= look_piece) {
            if (__atomic_load_n(stop, __ATOMIC_RELAXED))
                break;
            look_bytes = copied + LOOK_BYTES, look_piece = piece + LOOK_PIECES;
        }
        uint8_t *to = (uint8_t *)destination[piece] + done;
        const uint8_t *from = (const uint8_t *)source[piece] + done;
        uint64_t left = size[piece] - done, nbytes = left < LOOK_BYTES ? left : LOOK_BYTES;
        const uint8_t *next = from + nbytes;
        if (nbytes == left && piece + 1 < pieces)
            next = (const uint8_t *)source[piece + 1];
        if (slots)
            nbytes = copy_into_slot(&c, to, from, nbytes, next);
        else
            copy_plain(to, from, nbytes, next);
        copied += nbytes;
        done += nbytes;
        if (done == size[piece])
            piece++, done = 0;
    }
#if defined(__SSE2__)
    _mm_sfence(); /* orders the non-temporal stores before the end of the copy */
#endif
    return copied;
}

/* Computes the checksums of slots; leaves 0 for slots of less than 241 bytes. */
void kvoffd_digests(const uint64_t *slot, const uint64_t *slot_bytes, uint64_t *sum, uint64_t slots)
{
    struct filling c = {.slot = slot, .slot_bytes = slot_bytes, .sum = sum, .slots = slots};

    for (; c.at_slot < slots; c.at_slot++) {
        const uint8_t *from = (const uint8_t *)slot[c.at_slot];
        uint64_t length = slot_bytes[c.at_slot];
        if (length < SHORTEST)
            continue;
        begin_slot(&c);
        read_summed(from, (length - 1) / STRIPE, c.sums,
                    c.at_slot + 1 < slots ? (const uint8_t *)slot[c.at_slot + 1] : from + length - STRIPE);
        sum[c.at_slot] = checksum(&c);
    }
}

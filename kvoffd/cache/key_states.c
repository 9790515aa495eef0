/* A hash table from keys to one byte each, the state of the key's block, asked and changed for many keys at once.
 *
 * Called by key_states.py, which owns the memory. Open addressing with linear probing: an entry is a key and behind it its
 * state, 0 where the entry is empty. Nothing is ever left behind by a removal: what follows moves up.
 */
#include <stdint.h>
#include <string.h>

/* key_states.py has the same structure. */
struct table {
    uint8_t *entries; /* [capacity] entries of `stride` bytes */
    uint64_t capacity; /* a power of two, more than `used` */
    uint64_t used;
    uint64_t key_bytes, stride;
    uint64_t seed[2]; /* so that nobody can choose keys that fall together */
};

/* Keys whose entries are fetched from memory at the same time. */
enum { TOGETHER = 16 };

static uint64_t mixed(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;

    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash(const struct table *t, const uint8_t *key)
{
    uint64_t found = t->seed[0] ^ t->key_bytes, word[2];

    for (uint64_t at = 0; at < t->key_bytes; at += sizeof word) {
        uint64_t left = t->key_bytes - at;
        if (left >= sizeof word) { /* a size that the compiler knows: a move and not a call */
            memcpy(word, key + at, sizeof word);
        } else {
            word[0] = word[1] = 0;
            memcpy(word, key + at, left);
        }
        found = mixed(word[0] ^ t->seed[1], word[1] ^ found);
    }
    return mixed(found ^ t->seed[0], 0x9E3779B97F4A7C15);
}

static uint8_t *entry(const struct table *t, uint64_t place)
{
    return t->entries + (place & (t->capacity - 1)) * t->stride;
}

static uint8_t *state_of(const struct table *t, uint8_t *entry)
{
    return entry + t->key_bytes;
}

/* The place of the key, or the empty one where it belongs. */
static uint64_t find(const struct table *t, const uint8_t *key, uint64_t place)
{
    for (;; place++) {
        uint8_t *there = entry(t, place);
        if (!*state_of(t, there) || !memcmp(there, key, t->key_bytes))
            return place;
    }
}

static void remove_at(struct table *t, uint64_t place)
{
    uint64_t hole = place;

    for (;;) {
        uint8_t *next = entry(t, ++place);
        if (!*state_of(t, next))
            break;
        /* It may move up to the hole if its home is not behind the hole. */
        if (((place - hash(t, next)) & (t->capacity - 1)) >= ((place - hole) & (t->capacity - 1))) {
            memcpy(entry(t, hole), next, t->stride);
            hole = place;
        }
    }
    *state_of(t, entry(t, hole)) = 0;
    t->used--;
}

/* Writes the state of each of `count` keys, which lie end to end; 0 for those that are not there. */
void kvoffd_states(const struct table *t, const uint8_t *keys, uint64_t count, uint8_t *states)
{
    uint64_t home[TOGETHER];

    for (uint64_t begin = 0; begin < count; begin += TOGETHER) {
        uint64_t together = count - begin < TOGETHER ? count - begin : TOGETHER;
        for (uint64_t i = 0; i < together; i++) {
            home[i] = hash(t, keys + (begin + i) * t->key_bytes);
            __builtin_prefetch(entry(t, home[i]));
        }
        for (uint64_t i = 0; i < together; i++)
            states[begin + i] = *state_of(t, entry(t, find(t, keys + (begin + i) * t->key_bytes, home[i])));
    }
}

/* Sets the state of each of `count` keys, 0 to remove those that are there. There must be room for all. */
void kvoffd_set_states(struct table *t, const uint8_t *keys, uint64_t count, uint8_t state)
{
    for (const uint8_t *key = keys; key < keys + count * t->key_bytes; key += t->key_bytes) {
        uint64_t place = find(t, key, hash(t, key));
        uint8_t *there = entry(t, place);
        if (!state && *state_of(t, there)) {
            remove_at(t, place);
        } else if (state) {
            t->used += !*state_of(t, there);
            memcpy(there, key, t->key_bytes);
            *state_of(t, there) = state;
        }
    }
}

/* Enters all that `from` has into `to`, which is empty and has more room. */
void kvoffd_move_states(const struct table *from, struct table *to)
{
    for (uint64_t place = 0; place < from->capacity; place++) {
        uint8_t *there = entry(from, place);
        if (*state_of(from, there)) {
            memcpy(entry(to, find(to, there, hash(to, there))), there, from->stride);
            to->used++;
        }
    }
}

/* A table of the reasons for which keys left has the same structure, with entries of eight bytes: all but the last four
 * bits of a key's hash, and a reason. What falls on the same place replaces what was there. */
static const uint64_t REASON = 15;

static uint64_t *noted(const struct table *t, uint64_t hashed)
{
    return (uint64_t *)t->entries + (hashed & (t->capacity - 1));
}

/* Notes why each of `count` keys left, 1 to 15. */
void kvoffd_note_reasons(const struct table *t, const uint8_t *keys, uint64_t count, uint64_t reason)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hashed = hash(t, keys + i * t->key_bytes);
        *noted(t, hashed) = (hashed & ~REASON) | reason;
    }
}

/* Adds to `counts`, by reason, the keys whose state is 0; those of which nothing is noted to the first. */
void kvoffd_count_reasons(
    const struct table *t, const uint8_t *keys, uint64_t count, const uint8_t *states, uint64_t counts[16])
{
    uint64_t hashed[TOGETHER];

    for (uint64_t begin = 0; begin < count; begin += TOGETHER) {
        uint64_t together = count - begin < TOGETHER ? count - begin : TOGETHER;
        for (uint64_t i = 0; i < together; i++) {
            hashed[i] = hash(t, keys + (begin + i) * t->key_bytes);
            __builtin_prefetch(noted(t, hashed[i]));
        }
        for (uint64_t i = 0; i < together; i++) {
            uint64_t there = *noted(t, hashed[i]);
            if (!states[begin + i])
                counts[(there ^ hashed[i]) & ~REASON ? 0 : there & REASON]++;
        }
    }
}

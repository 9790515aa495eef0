/* What a store said of keys, for some seconds: see Answers in answers.py, which owns the memory. An answer is found by its
 * key's hash alone: nobody can choose keys that fall together, and a wrong answer is as one that is not true any more. */
#include "../system/key_hash.h"

enum { WINDOW = 16 /* places where the answer of a key may be */, TOGETHER = 32 /* keys whose memory is fetched at once */ };
enum { STATE = 3, IS_THERE = 4, UNKNOWN = 3 };

struct answer {
    uint64_t hashed; /* with its state in the lowest bits; 0 where none is */
    double at;
};

static inline struct answer *home(struct answer *answers, uint64_t places, uint64_t hashed)
{
    return answers + (hashed >> 8) % places;
}

static inline uint64_t hash(const uint64_t seed[2], uint64_t tag, const uint8_t *key, uint64_t key_bytes)
{
    return key_hash(seed[0] ^ tag, seed[1], key, key_bytes) | STATE | IS_THERE;
}

/* The place of a key's answer; else an empty one, or that of the oldest answer. */
static struct answer *find(struct answer *answers, uint64_t places, uint64_t hashed)
{
    struct answer *place = home(answers, places, hashed), *oldest = place;

    for (uint64_t i = 0; i < WINDOW; i++, place++) {
        if (!place->hashed || (place->hashed | STATE) == hashed)
            return place;
        if (place->at < oldest->at)
            oldest = place;
    }
    return oldest;
}

/* Writes for each of `count` keys, which lie end to end, the state that was noted, and when; UNKNOWN where none was. */
void kvoffd_answers_find(struct answer *answers, uint64_t places, const uint64_t seed[2], uint64_t tag, const uint8_t *keys,
                         uint64_t count, uint64_t key_bytes, uint8_t *states, double *at)
{
    uint64_t hashed[TOGETHER];

    for (uint64_t begin = 0; begin < count; begin += TOGETHER) {
        uint64_t together = count - begin < TOGETHER ? count - begin : TOGETHER;
        for (uint64_t i = 0; i < together; i++) {
            hashed[i] = hash(seed, tag, keys + (begin + i) * key_bytes, key_bytes);
            __builtin_prefetch(home(answers, places, hashed[i]));
        }
        for (uint64_t i = 0; i < together; i++) {
            const struct answer *found = find(answers, places, hashed[i]);
            int is_there = (found->hashed | STATE) == hashed[i];
            states[begin + i] = is_there ? found->hashed & STATE : UNKNOWN;
            at[begin + i] = found->at;
        }
    }
}

/* Notes the state of each key, and when. */
void kvoffd_answers_note(struct answer *answers, uint64_t places, const uint64_t seed[2], uint64_t tag, const uint8_t *keys,
                         uint64_t count, uint64_t key_bytes, const uint8_t *states, const double *at)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hashed = hash(seed, tag, keys + i * key_bytes, key_bytes);
        *find(answers, places, hashed) = (struct answer){ (hashed & ~(uint64_t)STATE) | states[i], at[i] };
    }
}

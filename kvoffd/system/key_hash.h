/* Hash of a key, with a seed so that nobody can choose keys that collide. */
#ifndef KVOFFD_KEY_HASH_H
#define KVOFFD_KEY_HASH_H

#include <stdint.h>
#include <string.h>

static inline uint64_t mixed(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;

    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* `first` and `second` are the seed; `first` also mixes in what distinguishes equal bytes, such as the group. */
static inline uint64_t key_hash(uint64_t first, uint64_t second, const void *key, uint64_t key_bytes)
{
    const uint8_t *bytes = key;
    uint64_t found = first ^ key_bytes, word[2], at = 0;

    for (; at + sizeof word <= key_bytes; at += sizeof word) { /* a constant size: a move instead of a call */
        memcpy(word, bytes + at, sizeof word);
        found = mixed(word[0] ^ second, word[1] ^ found);
    }
    if (at < key_bytes) {
        word[0] = word[1] = 0;
        memcpy(word, bytes + at, key_bytes - at);
        found = mixed(word[0] ^ second, word[1] ^ found);
    }
    return mixed(found ^ first, 0x9E3779B97F4A7C15);
}

#endif

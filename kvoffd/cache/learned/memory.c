/* Memory for what is known. */
#include "learned.h"

#include <stdio.h>
#include <stdlib.h>

/* Nothing can be answered without it. */
void *or_end(void *room)
{
    if (!room) {
        fputs("kvoffd: there is no memory for what the eviction policy knows.\n", stderr);
        abort();
    }
    return room;
}

void *clear_room(uint64_t count, uint64_t nbytes)
{
    return or_end(calloc(count, nbytes));
}

/* Memory for the call at hand. What was got before is lost. */
void *scratch(struct learned *l, uint64_t nbytes)
{
    if (nbytes > l->scratch_bytes) {
        free(l->scratch);
        l->scratch = or_end(malloc(nbytes));
        l->scratch_bytes = nbytes;
    }
    return l->scratch;
}

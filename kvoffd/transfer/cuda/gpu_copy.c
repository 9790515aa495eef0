/* The copy loop of a GPU: cuts a plan into steps, gives them to the driver, waits for them.
 *
 * Called by gpu_copy.py without the interpreter's lock, in a thread that has the GPU's context.
 */
#include <stddef.h>
#include <stdint.h>

#include "../pace.h"

enum { IN_FLIGHT = 3 }; /* steps that the GPU has at a time; see STEPS_IN_FLIGHT */
enum { BATCH = 1, COPY, RECORD, WAIT, LAUNCH }; /* calls that fail or are refused; gpu_copy.py names them */
enum { WORD_BYTES = 16, THREADS = 256 };        /* of the kernel, copy_pieces.ptx */

#if !defined(CUDA_VERSION) /* a test compiles this behind NVIDIA's cuda.h */
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUfunc_st *CUfunction;
typedef struct CUmemcpyAttributes_st CUmemcpyAttributes;
#endif
typedef CUresult copy_call(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
typedef CUresult batch_call(CUdeviceptr *to, CUdeviceptr *from, size_t *size, size_t count,
                            CUmemcpyAttributes *attributes, size_t *first, size_t attributes_count, CUstream stream);
typedef CUresult batch_call_12080(CUdeviceptr *to, CUdeviceptr *from, size_t *size, size_t count,
                                  CUmemcpyAttributes *attributes, size_t *first, size_t attributes_count,
                                  size_t *fail_index, CUstream stream);
typedef CUresult record_call(CUevent event, CUstream stream);
typedef CUresult wait_call(CUevent event);
typedef CUresult launch_call(CUfunction kernel, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                             unsigned threads_y, unsigned threads_z, unsigned shared_bytes, CUstream stream,
                             void **arguments, void **extra);

/* What the kernel reads of a piece. */
struct piece {
    CUdeviceptr to, from;
    uint64_t size;
};

/* One plan on its way through one stream. gpu_copy.py has the same structure. */
struct gpu_copying {
    copy_call *copy;
    void *batch;          /* NULL where there is none */
    record_call *record;
    wait_call *wait;
    launch_call *launch;
    CUmemcpyAttributes *attributes; /* of all copies of a batch */
    uint64_t has_fail_index; /* the batch call is that of 12.8 */
    CUstream stream;
    CUevent event[IN_FLIGHT];

    const uint64_t *destination, *source, *size; /* [pieces] */
    uint64_t pieces;
    uint64_t from_pool; /* whether the sources are in the pool, or else the destinations */

    const uint8_t *pinned; /* which chunks of the pool are, the first of them being number `first_chunk` */
    uint64_t chunk_bytes, first_chunk;
    uint64_t cut_bytes;   /* pieces are cut where their pool address is a multiple of this */
    uint64_t plain_bytes; /* from this size on pieces are copied one by one */
    CUdeviceptr *to, *from; /* [step_pieces] room for a batch */
    size_t *sizes;

    CUfunction kernel;      /* NULL where no piece is staged; cleared when its launch is refused */
    uint64_t staged_bytes;  /* smaller pieces are */
    CUdeviceptr staging;    /* step_bytes of the GPU's memory: what is in a stream runs step by step */
    struct piece *table;    /* [step_pieces] for each event, read by the kernel */

    uint64_t use_batch;         /* cleared when a batch is refused that single copies can do */
    uint64_t taken;             /* batches, and launches of the kernel */
    uint64_t refused_call, refused; /* BATCH or LAUNCH, and its status, where single copies could do instead */
    uint64_t piece, piece_done; /* the next piece, and the bytes of it that are given to the driver */
    uint64_t next_event, steps; /* steps in flight, the oldest behind event next_event - steps */
    uint64_t nbytes[IN_FLIGHT]; /* of the step before each event */
    uint64_t failed, status;    /* the call that failed */
};

static int fail(struct gpu_copying *c, int call, int status)
{
    if (status)
        c->failed = call, c->status = status;
    return status;
}

static int copy_one(struct gpu_copying *c, CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return fail(c, COPY, c->copy(to, from, size, c->stream));
}

/* Copies what is in `to`, `from` and `sizes`. */
static int copy_many(struct gpu_copying *c, uint64_t count)
{
    size_t first = 0, fail_index = 0;
    int status = 0;

    if (c->use_batch) {
        if (c->has_fail_index)
            status = ((batch_call_12080 *)c->batch)(c->to, c->from, c->sizes, count, c->attributes, &first, 1,
                                                    &fail_index, c->stream);
        else
            status = ((batch_call *)c->batch)(c->to, c->from, c->sizes, count, c->attributes, &first, 1, c->stream);
        if (!status) {
            c->taken++;
            return 0;
        }
    }
    /* Copying a piece twice does no harm, so it does not matter how far the batch came. */
    for (uint64_t i = 0; i < count; i++)
        if (copy_one(c, c->to[i], c->from[i], c->sizes[i]))
            return 1;
    if (status) /* single copies do work, so it was the batch */
        c->refused_call = BATCH, c->refused = status, c->use_batch = 0;
    return 0;
}

/* Has the kernel copy the first `count` pieces of a table. */
static int copy_by_kernel(struct gpu_copying *c, struct piece *table, uint64_t count)
{
    void *arguments[] = {&table};
    int status = c->launch(c->kernel, count, 1, 1, THREADS, 1, 1, 0, c->stream, arguments, NULL);

    if (!status) {
        c->taken++;
        return 0;
    }
    for (uint64_t i = 0; i < count; i++)
        if (copy_one(c, table[i].to, table[i].from, table[i].size))
            return 1;
    c->refused_call = LAUNCH, c->refused = status, c->kernel = 0; /* as with a batch */
    return 0;
}

/* Gives the next step to the driver, and an event behind it. */
static int launch_step(struct gpu_copying *c, struct pace *p)
{
    struct piece *table = c->table + c->next_event * p->step_pieces;
    CUdeviceptr room = c->staging;
    uint64_t count = 0, staged = 0, nbytes = 0, taken = 0;
    uint64_t run_end = 0; /* in the pool, of the last copy, if that is of staged pieces */

    for (; c->piece < c->pieces && taken < p->step_pieces; taken++) {
        uint64_t to = c->destination[c->piece] + c->piece_done, from = c->source[c->piece] + c->piece_done;
        uint64_t pool = c->from_pool ? from : to, size = c->size[c->piece] - c->piece_done;
        int pinned;
        if (size > c->cut_bytes - pool % c->cut_bytes)
            size = c->cut_bytes - pool % c->cut_bytes;
        if (taken && nbytes + size > p->step_bytes)
            break;
        pinned = __atomic_load_n(c->pinned + (pool / c->chunk_bytes - c->first_chunk), __ATOMIC_RELAXED);
        if (c->kernel && pinned && size < c->staged_bytes && (to | from | size) % WORD_BYTES == 0) {
            table[staged++] = c->from_pool ? (struct piece){to, room, size} : (struct piece){room, from, size};
            if (pool == run_end && pool % c->cut_bytes)
                c->sizes[count - 1] += size;
            else if (c->from_pool)
                c->to[count] = room, c->from[count] = from, c->sizes[count++] = size;
            else
                c->to[count] = to, c->from[count] = room, c->sizes[count++] = size;
            room += size;
            run_end = pool + size;
        } else if (c->use_batch && pinned && size < c->plain_bytes) {
            c->to[count] = to, c->from[count] = from, c->sizes[count++] = size;
            run_end = 0;
        } else if (copy_one(c, to, from, size)) {
            return 1;
        }
        nbytes += size;
        c->piece_done += size;
        if (c->piece_done == c->size[c->piece])
            c->piece++, c->piece_done = 0;
    }
    if (staged && !c->from_pool && copy_by_kernel(c, table, staged))
        return 1;
    if (count && copy_many(c, count))
        return 1;
    if (staged && c->from_pool && copy_by_kernel(c, table, staged))
        return 1;
    if (fail(c, RECORD, c->record(c->event[c->next_event], c->stream)))
        return 1;
    c->nbytes[c->next_event] = nbytes;
    c->next_event = (c->next_event + 1) % IN_FLIGHT;
    c->steps++;
    note_step(p, nbytes, taken);
    return 0;
}

static int wait_oldest(struct gpu_copying *c, struct pace *p)
{
    uint64_t oldest = (c->next_event + IN_FLIGHT - c->steps) % IN_FLIGHT;

    if (fail(c, WAIT, c->wait(c->event[oldest])))
        return 1;
    c->steps--;
    note_copied(p, c->nbytes[oldest]);
    return 0;
}

/* Copies until all is given to the driver or the pace says that the thread must return; steps may be in flight then.
 * Returns nothing: `failed` says whether a call of the driver failed. */
void kvoffd_gpu_copy(struct gpu_copying *c, struct pace *p)
{
    uint64_t until = nanoseconds() + LOOK_NS;

    while (c->piece < c->pieces && !must_return(p)) {
        if (c->steps == IN_FLIGHT && wait_oldest(c, p))
            return;
        if (launch_step(c, p) || nanoseconds() >= until)
            return;
    }
}

/* Waits for all steps in flight. */
void kvoffd_gpu_wait(struct gpu_copying *c, struct pace *p)
{
    while (c->steps && !wait_oldest(c, p))
        ;
}

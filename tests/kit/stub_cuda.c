/* A CUDA driver without a GPU, for tests: the calls that kvoffd and its tests make, over host memory. It is compiled
   against NVIDIA's cuda.h, which holds it to the names, types and numbers there, and is stricter than the driver.

   Device memory is a memfd, so that another process can map it: an IPC handle names the exporter's pid and descriptor.
   Copies run as late as they may: when somebody waits for them; with a seed also before that, a few at any call, as
   chance has it. Those of a stream keep its order, those of a batch and of several streams have none. A caller that does
   not wait, or relies on an order, finds other bytes. A copy whose memory is gone when it runs is a fault, after which every
   call fails, as cuda.h says: "the process must be terminated and relaunched". What an engine exported and has freed, or
   died with, reads as 0xDB.

   Every call is counted and logged, can be made to fail (with -1: to do nothing and succeed) and to hang: by the functions stub_*, or in another process by
   the variables STUB_FAIL and STUB_HANG ("cuMemcpyAsync:2:700"; nth 0 means every one), STUB_LOG, STUB_SEED,
   STUB_DEVICES (how many), STUB_FIRST (which of the machine's is this process's first). */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda.h"
#include "cudaTypedefs.h"

#define GRANULARITY (2u << 20)
#define MANY 4096
#define DEVICES 16
#define GONE 0xDB
#define IGNORED (-1) /* the status of a call that does nothing and says it did */

typedef CUdeviceptr address_t;
typedef struct { address_t to, from; size_t size; int pinned, untranslated; } copy_t;
typedef struct { copy_t *copies; size_t count, room, done; int device, alive; } stream_t;
typedef struct { stream_t *stream; size_t until; int device, alive; } event_t;
typedef struct { char name[48]; int nth, status, hang; } plan_t;
typedef struct { char name[48]; int calls; } count_t;
enum kind { FREE, DEVICE, IPC, VMM, RESERVED, HOST, POOLED };
typedef struct { enum kind kind; address_t base; size_t size; int fd, device, pidfd, dead, accessible, allocation; } range_t;
typedef struct { int fd, types, device, handles, maps; } allocation_t;
typedef struct { char magic[8]; int pid, fd, device; unsigned user; uint64_t size; } handle_t;

#define FOR_TESTS(type, name, ...) type name(__VA_ARGS__); type name(__VA_ARGS__)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static plan_t plans[64];
static count_t counts[96];
static range_t ranges[MANY];
static allocation_t allocations[MANY];
static stream_t *streams[MANY];
static event_t *events[MANY];
static int many_ranges, many_streams, many_events, many_allocations = 1;
static int contexts[DEVICES], made_contexts, initialised, released, hanging;
static int version = 12080, devices = 1, first, same_pid_allowed, batch_missing, import_ranges, translated, integrated;
static CUresult lost;
static unsigned seed;
static char *text;
static size_t text_length, text_room;
static __thread int current = -1;

static void note(const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    if (text_length + length + 1 > text_room) text = realloc(text, text_room = 2 * text_room + 4096);
    memcpy(text + text_length, line, length);
    text[text_length += length] = 0;
    const char *path = getenv("STUB_LOG");
    if (path) {
        int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd >= 0) { if (write(fd, line, length) < 0) {} close(fd); }
    }
}

static void add_plan(const char *name, int nth, int status, int hang) {
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
        if (!plans[i].name[0]) {
            snprintf(plans[i].name, sizeof plans[i].name, "%s", name);
            plans[i].nth = nth; plans[i].status = status; plans[i].hang = hang;
            return;
        }
}

__attribute__((constructor)) static void start(void) {
    char name[48]; int nth = 0, status = CUDA_ERROR_UNKNOWN;
    const char *value;
    if ((value = getenv("STUB_DEVICES"))) devices = atoi(value);
    if ((value = getenv("STUB_FIRST"))) first = atoi(value);
    if ((value = getenv("STUB_SEED"))) seed = atoi(value);
    if ((value = getenv("STUB_FAIL")) && sscanf(value, "%47[^:]:%d:%d", name, &nth, &status) >= 1) add_plan(name, nth, status, 0);
    nth = 0;
    if ((value = getenv("STUB_HANG")) && sscanf(value, "%47[^:]:%d", name, &nth) >= 1) add_plan(name, nth, 0, 1);
}

/* The library's end waits for a call that hangs, as libcuda's may: it has exit handlers, which take locks and join threads. */
__attribute__((destructor)) static void end(void) {
    pthread_mutex_lock(&lock);
    while (getenv("STUB_HANG") && hanging && !released) pthread_cond_wait(&wake, &lock);
    pthread_mutex_unlock(&lock);
}

static CUresult lose(CUresult status) {
    switch (status) { /* after which "the process must be terminated and relaunched" */
    case CUDA_ERROR_CONTAINED: case CUDA_ERROR_ILLEGAL_ADDRESS: case CUDA_ERROR_LAUNCH_TIMEOUT: case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION: case CUDA_ERROR_MISALIGNED_ADDRESS: case CUDA_ERROR_INVALID_ADDRESS_SPACE: case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED: case CUDA_ERROR_TENSOR_MEMORY_LEAK: case CUDA_ERROR_MPS_CLIENT_TERMINATED: case CUDA_ERROR_EXTERNAL_DEVICE:
        if (!lost) note("lost with %d", status);
        lost = status;
        break;
    default: break;
    }
    return status;
}

/* --- memory --- */
#define K(kind) (1 << kind)
#define OWN (K(DEVICE) | K(VMM) | K(POOLED))
#define ON_DEVICE (OWN | K(IPC))

static range_t *find(address_t address, int kinds) {
    for (int i = 0; i < many_ranges; i++)
        if ((kinds >> ranges[i].kind & 1) && address >= ranges[i].base && address - ranges[i].base < ranges[i].size) return ranges + i;
    return NULL;
}
static range_t *overlap(address_t base, size_t size, int kinds) {
    for (int i = 0; i < many_ranges; i++)
        if ((kinds >> ranges[i].kind & 1) && base < ranges[i].base + ranges[i].size && ranges[i].base < base + size) return ranges + i;
    return NULL;
}
static range_t *add(enum kind kind, address_t base, size_t size, int fd) {
    for (int i = 0; i < MANY; i++)
        if (ranges[i].kind == FREE) {
            ranges[i] = (range_t){.kind = kind, .base = base, .size = size, .fd = fd, .device = current, .pidfd = -1};
            if (i >= many_ranges) many_ranges = i + 1;
            return ranges + i;
        }
    abort();
}
/* Whether all of it lies in one allocation on a device, or in chunks that follow each other and that may be accessed. */
static int is_device_memory(address_t address, size_t size) {
    while (size) {
        range_t *range = find(address, ON_DEVICE);
        if (!range || (range->kind == VMM && !range->accessible)) return 0;
        size_t here = range->base + range->size - address;
        if (here >= size) return 1;
        if (range->kind != VMM) return 0;
        address += here; size -= here;
    }
    return 0;
}
/* 1 if all of it lies in one registration, 0 if none of it lies in any, -1 otherwise: no copy may do that. */
static int is_pinned(address_t address, size_t size) {
    range_t *range = overlap(address, size, K(HOST));
    if (!range) return 0;
    return address >= range->base && address + size <= range->base + range->size ? 1 : -1;
}

/* --- copies --- */
static void notice_deaths(void) {
    for (int i = 0; i < many_ranges; i++)
        if (ranges[i].kind == IPC && ranges[i].pidfd >= 0 && !ranges[i].dead) {
            struct pollfd one = {ranges[i].pidfd, POLLIN, 0};
            if (poll(&one, 1, 0) == 1) { ranges[i].dead = 1; note("exporter is dead"); }
        }
}
static int is_dead(address_t address) {
    range_t *range = find(address, K(IPC));
    return range && range->dead;
}

static void run(stream_t *stream) {
    copy_t copy = stream->copies[stream->done++];
    int to_device = is_device_memory(copy.to, copy.size), from_device = is_device_memory(copy.from, copy.size);
    address_t host = to_device ? copy.from : copy.to;
    if (lost) return;
    if (copy.untranslated || (!to_device && !from_device) || (!(to_device && from_device) && copy.pinned == 1 && is_pinned(host, copy.size) != 1)) {
        note("fault: memory of a copy is gone");
        lose(CUDA_ERROR_ILLEGAL_ADDRESS);
    } else if (is_dead(copy.from)) memset((void *)copy.to, GONE, copy.size);
    else if (!is_dead(copy.to)) memcpy((void *)copy.to, (void *)copy.from, copy.size);
}
static CUresult finish(stream_t *stream, size_t last) {
    notice_deaths();
    while (stream->done < last && !lost) run(stream);
    return lost;
}
static unsigned chance(unsigned below) {
    seed ^= seed << 13; seed ^= seed >> 17; seed ^= seed << 5;
    return seed % below;
}
static void drift(void) {
    if (!seed || !many_streams || chance(2)) return;
    stream_t *stream = streams[chance(many_streams)];
    if (stream->done < stream->count) finish(stream, stream->done + 1 + chance(stream->count - stream->done));
}

/* Counts the call; 0, or the status it must fail with. Called with the lock held; releases it while it hangs. */
static CUresult enter(const char *name) {
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (!counts[i].name[0] || !strcmp(counts[i].name, name)) {
            snprintf(counts[i].name, sizeof counts[i].name, "%s", name);
            counts[i].calls++;
            break;
        }
    drift();
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        plan_t *plan = plans + i;
        if (strcmp(plan->name, name)) continue;
        if (plan->nth > 1) { plan->nth--; continue; }
        int status = plan->status, hang = plan->hang;
        if (plan->nth == 1) plan->name[0] = 0;
        if (hang) {
            note("%s hangs", name);
            hanging++;
            while (!released) pthread_cond_wait(&wake, &lock);
            hanging--;
            continue;
        }
        note(status == IGNORED ? "%s is ignored" : "%s fails", name);
        return lose(status);
    }
    if (!strcmp(name, "cuInit") || !strcmp(name, "cuGetProcAddress_v2")) return CUDA_SUCCESS;
    if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
    int gives_up = !strcmp(name, "cuCtxSetCurrent") || !strcmp(name, "cuDevicePrimaryCtxRelease_v2"); /* the one "and ::CUDA_SUCCESS is returned", for no context; for the other cuda.h names no earlier error */
    return gives_up ? CUDA_SUCCESS : lost;
}

#define ENTER(name) pthread_mutex_lock(&lock); CUresult status = enter(name); if (status) return leave(status);
#define NEED_DEVICE(device) if (device < 0 || device >= devices) return leave(CUDA_ERROR_INVALID_DEVICE);
#define NEED_CONTEXT if (current < 0 || contexts[current] < 1) return leave(CUDA_ERROR_INVALID_CONTEXT);
#define NEED(condition) if (!(condition)) return leave(CUDA_ERROR_INVALID_VALUE);
#define NEED_HANDLE(condition) if (!(condition)) return leave(CUDA_ERROR_INVALID_HANDLE);
static CUresult leave(CUresult status) { pthread_mutex_unlock(&lock); return (int)status == IGNORED ? CUDA_SUCCESS : status; }

/* --- for the tests --- */
FOR_TESTS(void, stub_fail, const char *name, int nth, int status) { pthread_mutex_lock(&lock); add_plan(name, nth, status, 0); leave(0); }
FOR_TESTS(void, stub_hang, const char *name, int nth) { pthread_mutex_lock(&lock); released = 0; add_plan(name, nth, 0, 1); leave(0); }
FOR_TESTS(void, stub_release, void) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) if (plans[i].hang) plans[i].name[0] = 0;
    released = 1; pthread_cond_broadcast(&wake); leave(0);
}
FOR_TESTS(int, stub_hanging, void) { pthread_mutex_lock(&lock); int n = hanging; leave(0); return n; }
FOR_TESTS(int, stub_calls, const char *name) {
    int calls = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) if (!strcmp(counts[i].name, name)) calls = counts[i].calls;
    leave(0);
    return calls;
}
FOR_TESTS(size_t, stub_log, char *out, size_t room) {
    pthread_mutex_lock(&lock);
    size_t length = text_length < room ? text_length : room;
    memcpy(out, text, length);
    leave(0);
    return length;
}
FOR_TESTS(size_t, stub_log_length, void) { return text_length; }
FOR_TESTS(int, stub_contexts, int device) { return contexts[device]; }
FOR_TESTS(int, stub_made_contexts, void) { return made_contexts; }
FOR_TESTS(int, stub_ranges, int kind) { int n = 0; pthread_mutex_lock(&lock); for (int i = 0; i < many_ranges; i++) n += (int)ranges[i].kind == kind; leave(0); return n; }
/* Has host memory count as memory of one kind, instead of what was there. */
FOR_TESTS(void, stub_add_range, int kind, address_t base, size_t size) {
    pthread_mutex_lock(&lock);
    for (range_t *range; (range = overlap(base, size, ON_DEVICE | K(HOST)));) range->kind = FREE;
    add(kind, base, size, -1)->device = 0;
    leave(0);
}
FOR_TESTS(void, stub_set, const char *what, int value) {
    pthread_mutex_lock(&lock);
    if (!strcmp(what, "version")) version = value;
    else if (!strcmp(what, "devices")) devices = value;
    else if (!strcmp(what, "same_pid_allowed")) same_pid_allowed = value;
    else if (!strcmp(what, "batch_missing")) batch_missing = value;
    else if (!strcmp(what, "import_ranges")) import_ranges = value;
    else if (!strcmp(what, "translated")) translated = value;
    else if (!strcmp(what, "integrated")) integrated = value;
    else if (!strcmp(what, "seed")) seed = value;
    else abort();
    leave(0);
}

/* --- devices and contexts --- */
CUresult cuInit(unsigned flags) {
    ENTER("cuInit") NEED(!flags)
    if (!devices) return leave(CUDA_ERROR_NO_DEVICE);
    initialised = 1;
    return leave(0);
}
CUresult cuDriverGetVersion(int *out) { *out = version; return 0; }
CUresult cuGetErrorName(CUresult code, const char **out) {
#define NAME(name) {CUDA_ERROR_##name, "CUDA_ERROR_" #name}
    static const struct { CUresult code; const char *name; } names[] = {
        NAME(INVALID_VALUE), NAME(OUT_OF_MEMORY), NAME(NO_DEVICE), NAME(INVALID_DEVICE), NAME(INVALID_CONTEXT), NAME(MAP_FAILED),
        NAME(PEER_ACCESS_UNSUPPORTED), NAME(OPERATING_SYSTEM), NAME(INVALID_HANDLE), NAME(ILLEGAL_ADDRESS), NAME(NOT_PERMITTED), NAME(NOT_SUPPORTED),
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (names[i].code == code) { *out = names[i].name; return 0; }
    return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDeviceGetCount(int *out) { ENTER("cuDeviceGetCount") *out = devices; return leave(0); }
CUresult cuDeviceGet(CUdevice *out, int ordinal) { ENTER("cuDeviceGet") NEED_DEVICE(ordinal) *out = ordinal; return leave(0); }
CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) {
    ENTER("cuDeviceGetUuid_v2") NEED_DEVICE(device)
    memset(out, 0x10 + first + device, sizeof *out);
    return leave(0);
}
CUresult cuDeviceGetName(char *out, int room, CUdevice device) { ENTER("cuDeviceGetName") NEED_DEVICE(device) snprintf(out, room, "Stub %d", device); return leave(0); }
CUresult cuDeviceGetPCIBusId(char *out, int room, CUdevice device) {
    ENTER("cuDeviceGetPCIBusId") NEED_DEVICE(device)
    snprintf(out, room, "00000000:3B:%02X.0", device);
    return leave(0);
}
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute") NEED_DEVICE(device)
    NEED(attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM || attribute == CU_DEVICE_ATTRIBUTE_INTEGRATED)
    *out = attribute == CU_DEVICE_ATTRIBUTE_INTEGRATED ? integrated : !translated;
    return leave(0);
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER("cuDevicePrimaryCtxGetState") NEED_DEVICE(device)
    *flags = 0; *active = contexts[device] > 0;
    return leave(0);
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain") NEED_DEVICE(device)
    if (!contexts[device]++) { made_contexts++; note("context of %d made", device); }
    *out = (CUcontext)(intptr_t)(device + 1);
    return leave(0);
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER("cuDevicePrimaryCtxRelease_v2") NEED_DEVICE(device)
    if (contexts[device] < 1) return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (--contexts[device]) return leave(0);
    note("context of %d gone", device);
    /* With everything in it: what was allocated, registered, opened, created. */
    for (int i = 0; i < many_ranges; i++)
        if (ranges[i].device == device && (K(DEVICE) | K(IPC) | K(HOST) | K(POOLED)) >> ranges[i].kind & 1) ranges[i].kind = FREE;
    for (int i = 0; i < many_streams; i++) if (streams[i]->device == device) { streams[i]->alive = 0; streams[i]->done = streams[i]->count; }
    for (int i = 0; i < many_events; i++) if (events[i]->device == device) events[i]->alive = 0;
    return leave(0);
}
CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER("cuCtxSetCurrent")
    if (context && lost) return leave(lost);
    int device = (int)(intptr_t)context - 1;
    if (device >= 0 && (device >= DEVICES || contexts[device] < 1)) return leave(CUDA_ERROR_INVALID_CONTEXT);
    current = device;
    return leave(0);
}
CUresult cuCtxGetCurrent(CUcontext *out) { ENTER("cuCtxGetCurrent") *out = (CUcontext)(intptr_t)(current + 1); return leave(0); }
CUresult cuCtxGetDevice(CUdevice *out) { ENTER("cuCtxGetDevice") NEED_CONTEXT *out = current; return leave(0); }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { ENTER("cuCtxGetStreamPriorityRange") NEED_CONTEXT *least = 0; *greatest = -5; return leave(0); }

/* --- streams and events: of one context, and never the null stream --- */
static stream_t *stream_of(CUstream handle) {
    for (int i = 0; i < many_streams; i++)
        if ((CUstream)streams[i] == handle && streams[i]->alive && streams[i]->device == current) return streams[i];
    return NULL;
}
static event_t *event_of(CUevent handle) {
    for (int i = 0; i < many_events; i++)
        if ((CUevent)events[i] == handle && events[i]->alive && events[i]->device == current) return events[i];
    return NULL;
}
CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority) {
    ENTER("cuStreamCreateWithPriority") NEED_CONTEXT
    NEED(flags == CU_STREAM_NON_BLOCKING && many_streams < MANY)
    note("stream priority %d", priority);
    stream_t *stream = streams[many_streams++] = calloc(1, sizeof *stream);
    stream->alive = 1; stream->device = current;
    *out = (CUstream)stream;
    return leave(0);
}
CUresult cuStreamSynchronize(CUstream handle) {
    ENTER("cuStreamSynchronize") NEED_CONTEXT
    stream_t *stream = stream_of(handle);
    NEED_HANDLE(stream)
    return leave(finish(stream, stream->count));
}
CUresult cuStreamDestroy_v2(CUstream handle) { /* what is in it still runs, some time */
    ENTER("cuStreamDestroy_v2") NEED_CONTEXT
    stream_t *stream = stream_of(handle);
    NEED_HANDLE(stream)
    stream->alive = 0;
    return leave(0);
}
CUresult cuEventCreate(CUevent *out, unsigned flags) {
    ENTER("cuEventCreate") NEED_CONTEXT
    NEED(flags <= (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING) && many_events < MANY)
    event_t *event = events[many_events++] = calloc(1, sizeof *event);
    event->alive = 1; event->device = current;
    *out = (CUevent)event;
    return leave(0);
}
CUresult cuEventDestroy_v2(CUevent handle) {
    ENTER("cuEventDestroy_v2") NEED_CONTEXT
    event_t *event = event_of(handle);
    NEED_HANDLE(event)
    event->alive = 0;
    return leave(0);
}
CUresult cuEventRecord(CUevent handle, CUstream where) {
    ENTER("cuEventRecord") NEED_CONTEXT
    event_t *event = event_of(handle);
    stream_t *stream = stream_of(where);
    NEED_HANDLE(event && stream)
    event->stream = stream; event->until = stream->count;
    return leave(0);
}
CUresult cuEventSynchronize(CUevent handle) { /* at once for an event that was never recorded */
    ENTER("cuEventSynchronize") NEED_CONTEXT
    event_t *event = event_of(handle);
    NEED_HANDLE(event)
    return leave(event->stream ? finish(event->stream, event->until) : 0);
}

/* --- copies: between a device and a host, or on devices --- */
static void push(stream_t *stream, address_t to, address_t from, size_t size) {
    if (stream->count == stream->room) {
        stream->room = 2 * stream->room + 64;
        stream->copies = realloc(stream->copies, stream->room * sizeof(copy_t));
    }
    address_t host = is_device_memory(to, size) ? from : to;
    stream->copies[stream->count++] = (copy_t){to, from, size, is_pinned(host, size), 0};
}
static int is_sound(address_t to, address_t from, size_t size, int in_batch) {
    int to_device = is_device_memory(to, size), from_device = is_device_memory(from, size);
    if (to_device && from_device) return 1;
    address_t host = to_device ? from : to;
    int pinned = is_pinned(host, size);
    /* The driver takes memory that is not registered in a batch too; kvoffd must not rely on it. */
    return (to_device || from_device) && !overlap(host, size, ON_DEVICE | K(RESERVED)) && (pinned == 1 || (pinned == 0 && !in_batch));
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream where) {
    ENTER("cuMemcpyAsync") NEED_CONTEXT
    stream_t *stream = stream_of(where);
    NEED_HANDLE(stream)
    note("copy %zu", size);
    NEED(is_sound(to, from, size, 0))
    push(stream, to, from, size);
    return leave(0);
}
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *rows, CUstream where) {
    ENTER("cuMemcpy2DAsync_v2") NEED_CONTEXT
    stream_t *stream = stream_of(where);
    NEED_HANDLE(stream)
    NEED(rows->srcMemoryType == CU_MEMORYTYPE_UNIFIED && rows->dstMemoryType == CU_MEMORYTYPE_UNIFIED)
    NEED(!rows->srcXInBytes && !rows->srcY && !rows->dstXInBytes && !rows->dstY && rows->WidthInBytes && rows->Height)
    NEED(rows->srcPitch >= rows->WidthInBytes && rows->dstPitch >= rows->WidthInBytes && rows->srcPitch <= INT32_MAX && rows->dstPitch <= INT32_MAX)
    int to_device = is_device_memory(rows->dstDevice, rows->WidthInBytes);
    size_t span = (rows->Height - 1) * (to_device ? rows->dstPitch : rows->srcPitch) + rows->WidthInBytes;
    NEED(is_device_memory(to_device ? rows->dstDevice : rows->srcDevice, span)) /* in one allocation: an H100's driver refuses others */
    for (size_t i = 0; i < rows->Height; i++)
        NEED(is_sound(rows->dstDevice + i * rows->dstPitch, rows->srcDevice + i * rows->srcPitch, rows->WidthInBytes, 1))
    note("rows %zu of %zu", rows->Height, rows->WidthInBytes);
    for (size_t i = 0; i < rows->Height; i++)
        push(stream, rows->dstDevice + i * rows->dstPitch, rows->srcDevice + i * rows->srcPitch, rows->WidthInBytes);
    return leave(0);
}
static CUresult batch_12080(CUdeviceptr *to, CUdeviceptr *from, size_t *size, size_t count, CUmemcpyAttributes *attributes, size_t *firsts, size_t many, size_t *failed, CUstream where) {
    ENTER("cuMemcpyBatchAsync") NEED_CONTEXT
    *failed = SIZE_MAX;
    NEED(where && where != CU_STREAM_LEGACY && count && many && many <= count && firsts[0] == 0)
    stream_t *stream = stream_of(where);
    NEED_HANDLE(stream)
    for (size_t i = 0; i < many; i++) {
        /* The other orders are right for some memory only. */
        NEED(attributes[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && attributes[i].flags <= CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        NEED(!attributes[i].srcLocHint.type && !attributes[i].srcLocHint.id && !attributes[i].dstLocHint.type && !attributes[i].dstLocHint.id)
        NEED(!i || (firsts[i] > firsts[i - 1] && firsts[i] < count))
    }
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        *failed = i;
        NEED(is_sound(to[i], from[i], size[i], 1))
        bytes += size[i];
    }
    note("batch %zu of %zu", count, bytes);
    size_t begin = stream->count;
    for (size_t i = count; i--;) {
        push(stream, to[i], from[i], size[i]);
        copy_t *copy = stream->copies + stream->count - 1;
        copy->untranslated = translated && copy->pinned; /* only single copies translate a host's addresses */
    }
    for (size_t i = count; seed && i-- > 1;) { /* any order will do */
        copy_t *one = stream->copies + begin + i, *other = stream->copies + begin + chance(i + 1), copy = *one;
        *one = *other; *other = copy;
    }
    return leave(0);
}
static CUresult batch_13000(CUdeviceptr *to, CUdeviceptr *from, size_t *size, size_t count, CUmemcpyAttributes *attributes, size_t *firsts, size_t many, CUstream where) {
    size_t failed;
    return batch_12080(to, from, size, count, attributes, firsts, many, &failed, where);
}
CUresult cuGetProcAddress_v2(const char *symbol, void **out, int wanted, cuuint64_t flags, CUdriverProcAddressQueryResult *found) {
    ENTER("cuGetProcAddress_v2") NEED(flags == CU_GET_PROC_ADDRESS_DEFAULT)
    *out = NULL; *found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (strcmp(symbol, "cuMemcpyBatchAsync") || version < 12080 || batch_missing) return leave(0);
    if (wanted < 12080) { *found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT; return leave(0); }
    /* Asked for a form that is newer than itself, it gives the one it has. */
    PFN_cuMemcpyBatchAsync_v12080 older = batch_12080;
    PFN_cuMemcpyBatchAsync_v13000 newer = batch_13000;
    *out = wanted >= 13000 && version >= 13000 ? (void *)newer : (void *)older;
    *found = CU_GET_PROC_ADDRESS_SUCCESS;
    note("batch form %d", wanted);
    return leave(0);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    ENTER("cuMemcpyHtoD_v2") NEED_CONTEXT NEED(is_device_memory(to, size))
    memcpy((void *)to, from, size);
    return leave(0);
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    ENTER("cuMemcpyDtoH_v2") NEED_CONTEXT NEED(is_device_memory(from, size))
    memcpy(to, (void *)from, size);
    return leave(0);
}

/* --- host memory --- */
CUresult cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    ENTER("cuMemHostRegister_v2") NEED_CONTEXT
    NEED(flags == CU_MEMHOSTREGISTER_PORTABLE && (address_t)at % 4096 == 0 && size)
    if (overlap((address_t)at, size, K(HOST))) return leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    note("pin %zu", size);
    add(HOST, (address_t)at, size, -1);
    return leave(0);
}
CUresult cuMemHostUnregister(void *at) {
    ENTER("cuMemHostUnregister") NEED_CONTEXT
    range_t *range = find((address_t)at, K(HOST));
    if (!range || range->base != (address_t)at) return leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    range->kind = FREE;
    return leave(0);
}
CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    ENTER("cuMemHostAlloc") NEED_CONTEXT
    NEED(flags == CU_MEMHOSTALLOC_PORTABLE && !posix_memalign(out, 4096, size))
    add(HOST, (address_t)*out, size, -1);
    return leave(0);
}
CUresult cuMemFreeHost(void *at) {
    ENTER("cuMemFreeHost") NEED_CONTEXT
    range_t *range = find((address_t)at, K(HOST));
    NEED(range && range->base == (address_t)at)
    free(at); range->kind = FREE;
    return leave(0);
}

/* --- device memory --- */
static void *map_fd(int fd, size_t size) { void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); return at == MAP_FAILED ? NULL : at; }
static CUresult allocate(enum kind kind, CUdeviceptr *out, size_t size) {
    int fd = memfd_create("stub-gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (address_t)map_fd(fd, size);
    add(kind, *out, size, fd);
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size) { ENTER("cuMemAlloc_v2") NEED_CONTEXT return leave(allocate(DEVICE, out, size)); }
CUresult cuMemAllocAsync(CUdeviceptr *out, size_t size, CUstream where) {
    ENTER("cuMemAllocAsync") NEED_CONTEXT NEED_HANDLE(stream_of(where))
    return leave(allocate(POOLED, out, size));
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER("cuMemFree_v2") NEED_CONTEXT
    range_t *range = find(address, K(DEVICE) | K(POOLED));
    NEED(range && range->base == address)
    memset((void *)range->base, GONE, range->size); /* for those who still have it open */
    munmap((void *)range->base, range->size); close(range->fd); range->kind = FREE;
    return leave(0);
}
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { /* somebody takes 1 MiB between one call and the next */
    static size_t taken;
    ENTER("cuMemGetInfo_v2") NEED_CONTEXT
    *total = (size_t)1 << 37;
    *free_bytes = *total - (taken += 1 << 20);
    return leave(0);
}
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER("cuPointerGetAttribute") NEED_CONTEXT
    range_t *range = find(address, ON_DEVICE);
    NEED(range)
    range_t *whole = range->kind == VMM ? find(address, K(RESERVED)) : range; /* of chunks: all that was reserved */
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = range->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)out = range->kind == DEVICE; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(address_t *)out = whole->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = whole->size; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)out = range->kind == POOLED ? range : NULL; break;
    default: return leave(CUDA_ERROR_INVALID_VALUE);
    }
    return leave(0);
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER("cuMemGetAddressRange_v2") NEED_CONTEXT
    range_t *range = find(address, import_ranges ? ON_DEVICE : OWN);
    if (!range) return leave(CUDA_ERROR_NOT_FOUND);
    *base = range->base; *size = range->size;
    return leave(0);
}

/* --- IPC handles: of whole ordinary allocations, for other processes --- */
CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    ENTER("cuIpcGetMemHandle") NEED_CONTEXT
    range_t *range = find(address, K(DEVICE));
    NEED(range && range->base == address && range->device == current)
    handle_t handle = {"stubipc", getpid(), range->fd, range->device, geteuid(), range->size};
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return leave(0);
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle raw, unsigned flags) {
    ENTER("cuIpcOpenMemHandle_v2") NEED_CONTEXT
    handle_t handle;
    struct stat about, mapped;
    memcpy(&handle, &raw, sizeof handle);
    NEED(flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS && !memcmp(handle.magic, "stubipc", 8))
    if (handle.pid == getpid() && !same_pid_allowed) return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (handle.user != geteuid()) return leave(CUDA_ERROR_MAP_FAILED); /* a rule of the kernel module, which libcuda may lift, or report otherwise */
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 && errno == EMFILE) return leave(CUDA_ERROR_OPERATING_SYSTEM);
    if (fd < 0 || fstat(fd, &about) || (uint64_t)about.st_size != handle.size) { if (fd >= 0) close(fd); return leave(CUDA_ERROR_INVALID_HANDLE); }
    for (int i = 0; i < many_ranges; i++) /* cuda.h has it counted and give the same address; drivers have refused it (openucx/ucx#3192) */
        if (ranges[i].kind == IPC && !fstat(ranges[i].fd, &mapped) && mapped.st_ino == about.st_ino) {
            close(fd);
            return leave(CUDA_ERROR_ALREADY_MAPPED);
        }
    *out = (address_t)map_fd(fd, handle.size);
    if (!*out) { close(fd); return leave(CUDA_ERROR_MAP_FAILED); }
    range_t *range = add(IPC, *out, handle.size, fd);
    if (handle.pid != getpid()) range->pidfd = syscall(SYS_pidfd_open, handle.pid, 0);
    note("ipc open %zu", (size_t)handle.size);
    return leave(0);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER("cuIpcCloseMemHandle") NEED_CONTEXT
    range_t *range = find(address, K(IPC));
    NEED(range && range->base == address && range->device == current)
    munmap((void *)range->base, range->size); close(range->fd); range->kind = FREE;
    if (range->pidfd >= 0) close(range->pidfd);
    note("ipc close");
    return leave(0);
}

/* --- modules. There is one kernel, the benches' ``sweep``, which goes over a whole allocation, 16 bytes a word; it is not run --- */
CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    ENTER("cuModuleLoadData") NEED_CONTEXT
    *out = (CUmodule)strdup(image);
    return leave(strstr(image, ".version") ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE);
}
CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    char entry[64];
    ENTER("cuModuleGetFunction") NEED_CONTEXT
    snprintf(entry, sizeof entry, ".visible .entry %s(", name);
    *out = (CUfunction)strstr((char *)module, entry);
    return leave(*out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
}
CUresult cuLaunchKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream where, void **parameters, void **extra) {
    ENTER("cuLaunchKernel") NEED_CONTEXT NEED_HANDLE(stream_of(where))
    NEED(kernel && parameters && !extra && !shared && gx && gy * gz * by * bz == 1 && bx && bx <= 1024)
    range_t *range = find(*(address_t *)parameters[0], K(DEVICE));
    if (!range) { lose(CUDA_ERROR_ILLEGAL_ADDRESS); return leave(0); } /* the next call says so, as of a GPU */
    NEED(range->size == 16 * *(uint64_t *)parameters[1])
    return leave(0);
}

/* --- virtual memory: reservations, allocations by their number, chunks that map one into the other --- */
static allocation_t *allocation_of(CUmemGenericAllocationHandle number) {
    return number && number < (unsigned)many_allocations && allocations[number].handles ? allocations + number : NULL;
}
static CUresult new_allocation(CUmemGenericAllocationHandle *out, int fd, int types, int device) {
    if (fd < 0) return errno == EMFILE ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_OUT_OF_MEMORY;
    if (many_allocations == MANY) abort();
    allocations[many_allocations] = (allocation_t){fd, types, device, 1, 0};
    *out = many_allocations++;
    return CUDA_SUCCESS;
}
static void drop(allocation_t *allocation) { if (!allocation->handles && !allocation->maps) close(allocation->fd); }
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties, unsigned long long flags) {
    ENTER("cuMemCreate")
    NEED(!flags && size && size % GRANULARITY == 0 && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED)
    NEED(properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE && properties->location.id < devices)
    int fd = memfd_create("stub-vmm", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    return leave(new_allocation(out, fd, properties->requestedHandleTypes, properties->location.id));
}
CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    ENTER("cuMemAddressReserve")
    NEED(!alignment && !hint && !flags && size && size % GRANULARITY == 0)
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    *out = (address_t)at;
    add(RESERVED, *out, size, -1);
    return leave(0);
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER("cuMemAddressFree")
    range_t *range = find(address, K(RESERVED));
    NEED(range && range->base == address && range->size == size && !overlap(address, size, K(VMM)))
    munmap((void *)address, size); range->kind = FREE;
    note("reservation freed");
    return leave(0);
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle, CUmemAllocationHandleType type) {
    ENTER("cuMemImportFromShareableHandle")
    struct stat about;
    int fd = (int)(intptr_t)handle;
    NEED(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !fstat(fd, &about) && S_ISREG(about.st_mode))
    note("imported");
    return leave(new_allocation(out, fcntl(fd, F_DUPFD_CLOEXEC, 3), type, -1));
}
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle number, CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER("cuMemExportToShareableHandle")
    allocation_t *allocation = allocation_of(number);
    NEED(allocation && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && allocation->types & type)
    int fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return leave(CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    return leave(0);
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
    ENTER("cuMemRetainAllocationHandle")
    range_t *range = find((address_t)address, K(VMM));
    NEED(range)
    allocations[*out = range->allocation].handles++;
    return leave(0);
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle number) {
    ENTER("cuMemGetAllocationPropertiesFromHandle")
    allocation_t *allocation = allocation_of(number);
    NEED(allocation)
    memset(out, 0, sizeof *out);
    out->type = CU_MEM_ALLOCATION_TYPE_PINNED; out->requestedHandleTypes = allocation->types;
    out->location.type = CU_MEM_LOCATION_TYPE_DEVICE; out->location.id = allocation->device;
    return leave(0);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle number) {
    ENTER("cuMemRelease")
    allocation_t *allocation = allocation_of(number);
    NEED(allocation)
    allocation->handles--;
    drop(allocation);
    note("released");
    return leave(0);
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle number, unsigned long long flags) {
    ENTER("cuMemMap")
    struct stat about;
    allocation_t *allocation = allocation_of(number);
    range_t *reserved = find(address, K(RESERVED));
    NEED(allocation && reserved && !offset && !flags && address + size <= reserved->base + reserved->size)
    NEED(!overlap(address, size, K(VMM)) && !fstat(allocation->fd, &about) && (size_t)about.st_size == size)
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) == MAP_FAILED) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    range_t *range = add(VMM, address, size, -1);
    range->allocation = number;
    range->device = allocation->device;
    allocation->maps++;
    return leave(0);
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER("cuMemUnmap")
    range_t *range = find(address, K(VMM));
    NEED(range && range->base == address && range->size == size)
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    range->kind = FREE;
    allocations[range->allocation].maps--;
    drop(allocations + range->allocation);
    note("unmapped");
    return leave(0);
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER("cuMemSetAccess")
    NEED(count == 1 && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE && access->location.id < devices)
    NEED(access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    for (address_t at = address; at < address + size;) { /* whole chunks without gaps */
        range_t *range = find(at, K(VMM));
        NEED(range && range->base == at && at + range->size <= address + size)
        at += range->size;
    }
    for (address_t at = address; at < address + size;) {
        range_t *range = find(at, K(VMM));
        range->accessible = 1;
        at += range->size;
    }
    return leave(mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

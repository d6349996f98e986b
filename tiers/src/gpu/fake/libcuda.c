/* A fake CUDA driver, for tests only: what gpu/cuda.rs needs of it, over host memory.
 *
 * It is stricter than a real one where that shows faults: a copy is done only when somebody asks for its
 * end, so that memory which is freed too early is read freed; a copy that reaches over the border of two
 * registrations fails, as a real driver's does; and everything that is given back twice, or never, counts.
 * fake_fail() makes a later call fail. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Address;
#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, ALREADY = 712, NOT_REGISTERED = 713, NOT_READY = 600 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread void *current;
static int context;
static char failing[64];
static int fail_after, fail_times, fail_code;

struct Range { uintptr_t start; size_t bytes; };
#define RANGES 4096
static struct Range allocated[RANGES], pinned[RANGES], registered[RANGES];

struct Copy { void *to; const void *from; size_t bytes; struct Copy *next; };
struct Stream { struct Copy *first, *last; long begun, done; };
struct Event { struct Stream *stream; long upto; int asked; };
static long misuse, live, copies;

static Result failure(const char *function) {
  if (strcmp(failing, function) != 0 || fail_times == 0) return OK;
  if (fail_after > 0) { fail_after--; return OK; }
  fail_times--;
  return fail_code;
}
#define BEGIN(name) \
  pthread_mutex_lock(&lock); \
  Result result = failure(name); \
  if (result == OK && current != &context) { misuse++; result = 201; }
#define END pthread_mutex_unlock(&lock); return result;

static int overlaps(struct Range *ranges, uintptr_t start, size_t bytes) {
  for (int i = 0; i < RANGES; i++)
    if (ranges[i].bytes && start < ranges[i].start + ranges[i].bytes && ranges[i].start < start + bytes) return i;
  return -1;
}
static void add(struct Range *ranges, uintptr_t start, size_t bytes) {
  for (int i = 0; i < RANGES; i++)
    if (!ranges[i].bytes) { ranges[i] = (struct Range){start, bytes}; live++; return; }
  abort();
}
static size_t take(struct Range *ranges, uintptr_t start) {
  for (int i = 0; i < RANGES; i++)
    if (ranges[i].bytes && ranges[i].start == start) {
      size_t bytes = ranges[i].bytes;
      ranges[i].bytes = 0;
      live--;
      return bytes;
    }
  misuse++;
  return 0;
}
static int within(struct Range *ranges, uintptr_t start, size_t bytes) {
  int i = overlaps(ranges, start, bytes);
  return i >= 0 && start >= ranges[i].start && start + bytes <= ranges[i].start + ranges[i].bytes;
}
static void run(struct Stream *stream, long upto) {
  while (stream->done < upto) {
    struct Copy *copy = stream->first;
    memcpy(copy->to, copy->from, copy->bytes);
    stream->first = copy->next;
    if (!stream->first) stream->last = NULL;
    free(copy);
    stream->done++;
  }
}
static Result queue(void *to, const void *from, size_t bytes, uintptr_t host, Address device, struct Stream *stream) {
  if (!within(allocated, device, bytes)) { misuse++; return INVALID; }
  /* Partly registered, or in two registrations. */
  if (overlaps(registered, host, bytes) >= 0 && !within(registered, host, bytes)) return INVALID;
  struct Copy *copy = malloc(sizeof *copy);
  *copy = (struct Copy){to, from, bytes, NULL};
  if (stream->last) stream->last->next = copy; else stream->first = copy;
  stream->last = copy;
  stream->begun++;
  copies++;
  return OK;
}

EXPORT void fake_fail(const char *function, int after, int times, int code) {
  pthread_mutex_lock(&lock);
  snprintf(failing, sizeof failing, "%s", function);
  fail_after = after; fail_times = times; fail_code = code;
  pthread_mutex_unlock(&lock);
}
EXPORT long fake_misuse(void) { return misuse; }
EXPORT long fake_live(void) { return live; }
EXPORT long fake_copies(void) { return copies; }

EXPORT Result cuInit(unsigned flags) { (void)flags; return failure("cuInit"); }
EXPORT Result cuDriverGetVersion(int *version) { *version = 12080; return OK; }
EXPORT Result cuDeviceGetCount(int *count) { *count = 1; return OK; }
EXPORT Result cuDeviceGet(int *device, int ordinal) { if (ordinal != 0) return 101; *device = 0; return OK; }
EXPORT Result cuDeviceGetAttribute(int *value, int attribute, int device) { (void)attribute; (void)device; *value = 1; return OK; }
EXPORT Result cuDeviceGetName(char *name, int len, int device) { (void)device; snprintf(name, len, "fake GPU"); return OK; }
EXPORT Result cuDevicePrimaryCtxRetain(void **c, int device) { (void)device; *c = &context; return OK; }
EXPORT Result cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
EXPORT Result cuCtxGetCurrent(void **c) { *c = current; return OK; }
EXPORT Result cuCtxSetCurrent(void *c) { current = c; return OK; }
EXPORT Result cuCtxSynchronize(void) { return OK; }
EXPORT Result cuGetErrorName(Result code, const char **name) { (void)code; *name = "FAKE"; return OK; }
EXPORT Result cuGetErrorString(Result code, const char **text) { (void)code; *text = "an error of the fake driver"; return OK; }

static Result allocate(void **base, size_t bytes, struct Range *ranges) {
  if (bytes > ((size_t)1 << 32) || posix_memalign(base, 256, bytes)) return NO_MEMORY;
  memset(*base, 0xA5, bytes);
  add(ranges, (uintptr_t)*base, bytes);
  return OK;
}
static void release(void *base, struct Range *ranges) {
  size_t bytes = take(ranges, (uintptr_t)base);
  if (!bytes) return;
  memset(base, 0x5A, bytes); /* who reads it later gets wrong bytes */
  free(base);
}
EXPORT Result cuMemAlloc_v2(Address *address, size_t bytes) {
  BEGIN("cuMemAlloc_v2")
  void *base = NULL;
  if (result == OK) result = allocate(&base, bytes, allocated);
  *address = (Address)base;
  END
}
EXPORT Result cuMemFree_v2(Address address) {
  BEGIN("cuMemFree_v2")
  if (result == OK) release((void *)address, allocated);
  END
}
EXPORT Result cuMemHostAlloc(void **base, size_t bytes, unsigned flags) {
  (void)flags;
  BEGIN("cuMemHostAlloc")
  if (result == OK) result = allocate(base, bytes, pinned);
  END
}
EXPORT Result cuMemFreeHost(void *base) {
  BEGIN("cuMemFreeHost")
  if (result == OK) release(base, pinned);
  END
}
EXPORT Result cuMemHostRegister_v2(void *base, size_t bytes, unsigned flags) {
  (void)flags;
  BEGIN("cuMemHostRegister_v2")
  if (result == OK && overlaps(registered, (uintptr_t)base, bytes) >= 0) result = ALREADY;
  if (result == OK) add(registered, (uintptr_t)base, bytes);
  END
}
EXPORT Result cuMemHostUnregister(void *base) {
  BEGIN("cuMemHostUnregister")
  if (result == OK && !take(registered, (uintptr_t)base)) result = NOT_REGISTERED;
  END
}
EXPORT Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream) {
  BEGIN("cuMemcpyHtoDAsync_v2")
  if (result == OK) result = queue((void *)to, from, bytes, (uintptr_t)from, to, stream);
  END
}
EXPORT Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream) {
  BEGIN("cuMemcpyDtoHAsync_v2")
  if (result == OK) result = queue(to, (void *)from, bytes, (uintptr_t)to, from, stream);
  END
}
EXPORT Result cuStreamCreate(void **stream, unsigned flags) {
  (void)flags;
  *stream = calloc(1, sizeof(struct Stream));
  pthread_mutex_lock(&lock);
  live++;
  pthread_mutex_unlock(&lock);
  return OK;
}
/* A stream or an event: threads destroy these beside each other. */
static Result destroy(void *created) {
  pthread_mutex_lock(&lock);
  live--;
  pthread_mutex_unlock(&lock);
  free(created);
  return OK;
}
EXPORT Result cuStreamDestroy_v2(void *stream) { return destroy(stream); }
EXPORT Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream; (void)event; (void)flags; return OK; }
EXPORT Result cuStreamSynchronize(void *at) {
  struct Stream *stream = at;
  BEGIN("cuStreamSynchronize")
  if (result == OK) run(stream, stream->begun);
  END
}
EXPORT Result cuEventCreate(void **event, unsigned flags) {
  (void)flags;
  BEGIN("cuEventCreate")
  if (result == OK) { *event = calloc(1, sizeof(struct Event)); live++; }
  END
}
EXPORT Result cuEventRecord(void *at, void *on) {
  struct Event *event = at;
  struct Stream *stream = on;
  BEGIN("cuEventRecord")
  if (result == OK) { event->stream = stream; event->upto = stream->begun; }
  END
}
EXPORT Result cuEventSynchronize(void *at) {
  struct Event *event = at;
  BEGIN("cuEventSynchronize")
  if (result == OK) run(event->stream, event->upto);
  END
}
EXPORT Result cuEventQuery(void *at) {
  struct Event *event = at;
  pthread_mutex_lock(&lock);
  Result result = failure("cuEventQuery");
  if (result == OK && event->asked++ < 2) result = NOT_READY;
  if (result == OK) run(event->stream, event->upto);
  END
}
EXPORT Result cuEventDestroy_v2(void *at) { return destroy(at); }

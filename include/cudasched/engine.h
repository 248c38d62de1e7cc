/* The C boundary of libcudasched.so: all that it exports. The driver shim uses it (cudasched_attach), the Python
 * module, and programs that link it, in C++ through scheduler.hpp. Every function may be called from any thread, throws
 * nothing and never ends the process. Functions that can fail return 0 for success and a cudasched_status otherwise;
 * cudasched_last_error() then has the calling thread's fault and its remedy. A pointer is null only where
 * its function says so. Times are nanoseconds unless the name says otherwise. */
#ifndef CUDASCHED_ENGINE_H_
#define CUDASCHED_ENGINE_H_

#include <stdint.h>

#include "cudasched/counts.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDASCHED_EXPORT __attribute__((visibility("default")))

enum cudasched_status {
  CUDASCHED_OK = 0,
  CUDASCHED_HOOK_ERROR = 1,
  CUDASCHED_CONFIG_ERROR = 2,
  CUDASCHED_ARBITER_ERROR = 3,
  CUDASCHED_DRIVER_ERROR = 4,
  CUDASCHED_INTERNAL_ERROR = 5
};

/* Values of Class in base/class.hpp. */
enum cudasched_class { CUDASCHED_NORMAL = 0, CUDASCHED_LATENCY = 1, CUDASCHED_BEST_EFFORT = 2 };

/* The version of these declarations. Until 1.0 a library of another minor version has other structs: compare. */
#define CUDASCHED_API "0.1"
CUDASCHED_EXPORT const char* cudasched_version(void); /* of the library, "0.1.0" */
CUDASCHED_EXPORT const char* cudasched_last_error(void);

/* ---- for the shim -------------------------------------------------------------------------------------------- */

struct cudasched_override {
  const char* symbol; /* driver entry point, "cuLaunchKernel_ptsz" */
  void* function;     /* called in its place, same signature */
};

/* Called once, on the program's first driver call, with the real driver's dlopen handle and path. Returns the entry
 * points that the engine takes over, ended by a null symbol; null if the engine wants none (every call then passes
 * through). */
CUDASCHED_EXPORT const struct cudasched_override* cudasched_attach(void* real_driver, const char* real_driver_path);

/* Before the process ends by _exit(), which runs no exit handlers: does what these would have done, on a thread of the
 * engine's, and waits for that, for at most 5 s. May be called in a signal handler, in a forked child and in one of
 * vfork(); where the engine has not begun in the calling process, or has done it, it does nothing. */
CUDASCHED_EXPORT void cudasched_finish(void);

/* ---- for programs and for Python ------------------------------------------------------------------------------- */

/* Where the real driver is, searching as ldconfig would; CUDASCHED_DRIVER overrides. Returns 0 and fills `path`, or
 * CUDASCHED_HOOK_ERROR. */
CUDASCHED_EXPORT int cudasched_find_driver(char* path, uint64_t path_bytes);

/* The name of each of the CUDASCHED_WHOLE_REASONS for a graph to stay whole ("memory_node"); null beyond the last. */
CUDASCHED_EXPORT const char* cudasched_whole_reason(int32_t reason);

/* The state of this process's engine, beside its counters (cudasched_get_counts). */
struct cudasched_state {
  int32_t attached;         /* the shim called cudasched_attach */
  int32_t scheduling;       /* classes have an effect; 0 before the first CUDA call, when off, and after a fault */
  int32_t process_class;    /* enum cudasched_class */
  int32_t driver_version;   /* as cuDriverGetVersion gives it, 0 before cuInit */
  uint64_t unknown_handles; /* times that a stream, event or graph found no place among 131,072 known ones, or a stream
                               none for the mark of a best-effort region */
  uint64_t graphs_sliced;   /* executable graphs that have slices now, */
  uint64_t graph_slices;    /* so many, */
  uint64_t graph_slice_bytes;                     /* of about so much memory of the GPU */
  uint64_t graph_builds;                          /* graphs that were cut, or tried to be */
  uint64_t graph_build_ns;                        /* in the background, in all */
  uint64_t graph_slices_dropped;                  /* graphs whose slices were given up: changed, or launched no more */
  uint64_t longest_whole_graph_ns;                /* the longest of those that stay whole, as predicted */
  uint64_t graphs_whole[CUDASCHED_WHOLE_REASONS]; /* executable graphs that stay whole, by cudasched_whole_reason() */
  char off_reason[256];                           /* why scheduling is off, empty if it is not */
  char driver_path[512];
};
CUDASCHED_EXPORT void cudasched_get_state(struct cudasched_state* state);

/* What this process has counted, with histograms (counts.h). */
CUDASCHED_EXPORT int cudasched_get_counts(struct cudasched_counts* counts);

/* Predicted GPU time still to run of this process's submitted best-effort work, on all of its GPUs. */
CUDASCHED_EXPORT int64_t cudasched_in_flight_ns(void);

/* How long the requests under way of other processes can still wait, by their deadlines and expected times: the least
 * on the GPUs where this process has latency work; negative: one is late. INT64_MAX: there is none, or it is not
 * known. */
CUDASCHED_EXPORT int64_t cudasched_others_slack_ns(void);

/* The predicted time of an executable graph of the current device (a CUgraphExec), by its history or, before its first
 * launch, by its kernels. 0: not known; so is a graph that was made before the first region or class. */
CUDASCHED_EXPORT int64_t cudasched_graph_ns(void* graph);

/* The class of launches that no region and no stream decides. slo_ms 0: none. */
CUDASCHED_EXPORT int cudasched_set_process_class(int32_t client_class, int32_t priority, double slo_ms);

/* Opens a region on the calling thread; *token closes it, on the same thread. */
CUDASCHED_EXPORT int cudasched_region_enter(int32_t client_class, int32_t priority, double slo_ms, uint64_t* token);

/* The same with a name, under which its requests are counted (counts.h). UTF-8 of 1 to 63 bytes without control
 * characters; null: none. Beyond the first 10 names of a process, regions are counted together as "(others)". */
CUDASCHED_EXPORT int cudasched_region_enter_named(int32_t client_class, int32_t priority, double slo_ms,
                                                  const char* name, uint64_t* token);

/* The same for one step of a request, whose deadline (CLOCK_MONOTONIC, 0: none) all its steps share. What its later
 * steps need cannot be told, so the policy "slack" admits nothing into it. */
CUDASCHED_EXPORT int cudasched_region_enter_until(int32_t client_class, int32_t priority, int64_t deadline_ns,
                                                  uint64_t* token);

CUDASCHED_EXPORT int cudasched_region_exit(uint64_t token);

/* A region of the calling thread may be ended by another one, with cudasched_region_end_elsewhere in place of
 * cudasched_region_exit: later launches of the region's thread are not in it. */
CUDASCHED_EXPORT int cudasched_region_may_move(uint64_t token);
CUDASCHED_EXPORT int cudasched_region_end_elsewhere(uint64_t token);

/* Binds a CUstream to a class, whichever thread launches on it; unbind forgets it. At most 256 streams. */
CUDASCHED_EXPORT int cudasched_bind_stream(uint64_t stream, int32_t client_class);
CUDASCHED_EXPORT int cudasched_unbind_stream(uint64_t stream);

/* A CUstream that another one comes after, and an event for that: one of cudasched_new_event, of the current context,
 * which no other thread uses meanwhile. */
struct cudasched_ahead {
  uint64_t stream;
  uint64_t event;
};

/* Later work of `stream` comes after the present work of each of the `count` streams of `ahead`, all of the current
 * context. Records each one's event and waits for that event, as a program would, or does nothing for an idle stream.
 * The host goes on. After an error the later streams of `ahead` may not be ordered. */
CUDASCHED_EXPORT int cudasched_order(uint64_t stream, const struct cudasched_ahead* ahead, int32_t count);

/* *idle is 1 where all that a CUstream of the current context has is complete; of the legacy default stream (0 or 1):
 * and all that the context's blocking streams have. 0 also where it cannot be asked: while a stream of the process may
 * be capturing, of a per-thread default stream, and where the driver refuses. Waits for nothing. */
CUDASCHED_EXPORT int cudasched_is_idle(uint64_t stream, int32_t* idle);
CUDASCHED_EXPORT int cudasched_new_event(uint64_t* event);

/* A CUstream whose kernels run on that fraction of the SMs of the current device alone (over 0, below 1; rounded to
 * the GPU's granularity). The stream is non-blocking, has class best effort, belongs to the device's primary context,
 * which must be current, and is the same for the same part. Never destroy it. */
CUDASCHED_EXPORT int cudasched_partition_stream(double fraction, uint64_t* stream);

/* Empties the program's cache of memory on this device, as another process of a higher class needs it. Called on a
 * thread of cudasched's own, with the device's primary context current, at most once at a time for each device. */
typedef void (*cudasched_release_cache)(int32_t device, void* context);

/* From here on best-effort clients of this process give memory back when a latency client of another process asks for
 * it (docs/pytorch.md). Null: they give nothing. `release` and `context` must stay for the rest of the process. */
CUDASCHED_EXPORT int cudasched_use_cache(cudasched_release_cache release, void* context);

/* A pool of a GPU's memory that the program keeps; sizes in bytes. */
struct cudasched_pool_sizes {
  uint64_t reserved;     /* of the GPU */
  uint64_t allocated;    /* of these, in blocks that are in use */
  uint64_t largest_free; /* the largest block that the rest can become */
};
struct cudasched_pool {
  int32_t device;
  void* pool; /* the argument of both functions, which threads of cudasched's own call */
  /* Gives free memory back, where a cache is emptied, too. */
  void (*trim)(void* pool);
  /* Returns at once; 0: not now. */
  int (*read)(void* pool, struct cudasched_pool_sizes* sizes);
};

/* From here on give-back trims the pool and `cudasched status` shows it, until it is removed. remove_pool returns when
 * no thread is in a function of the pool, and does nothing where the pool is not known, as in a child after fork. */
CUDASCHED_EXPORT int cudasched_add_pool(const struct cudasched_pool* pool);
CUDASCHED_EXPORT int cudasched_remove_pool(void* pool);

/* Counts the device's kernels with CUPTI from here on; needs the hook and no other profiler. `cupti_path` may be null:
 * a libcupti that is loaded, else the loader's search. flush: waits for the device's records. */
CUDASCHED_EXPORT int cudasched_coverage_start(const char* cupti_path);
CUDASCHED_EXPORT int cudasched_coverage_flush(void);

/* Whether the time slices of a client's process are cudasched's, and why not: a best-effort one's are short, so that
 * its kernels are interrupted for other processes; a latency one's beside best effort are long. */
enum cudasched_time_slice_state {
  CUDASCHED_TIME_SLICE_UNUSED = 0,  /* it is neither */
  CUDASCHED_TIME_SLICE_ON = 1,      /* its contexts have time slices of cudasched_client::time_slice_us */
  CUDASCHED_TIME_SLICE_OFF = 2,     /* its setting time_slice_us is off */
  CUDASCHED_TIME_SLICE_MPS = 3,     /* all clients of MPS share one */
  CUDASCHED_TIME_SLICE_SHARED = 4,  /* its process has latency work, too */
  CUDASCHED_TIME_SLICE_UNSEEN = 5,  /* its contexts were not seen: another driver, or CUDA was begun before cudasched */
  CUDASCHED_TIME_SLICE_REFUSED = 6, /* by the driver */
  CUDASCHED_TIME_SLICE_LOST = 7,    /* the program has closed files of the driver */
  CUDASCHED_TIME_SLICE_TOOL = 8     /* a debugger, sanitizer or profiler is in the program */
};

/* One client of one table, as `cudasched status` shows it. */
struct cudasched_client {
  int32_t slot;
  int32_t client_class;
  int32_t priority;
  int32_t pid;
  int32_t alive;
  int32_t active;
  int32_t waiting;
  uint32_t regions;
  int32_t hook_attached;
  int64_t age_ns;
  int64_t heartbeat_age_ns;
  int64_t active_since_ns; /* CLOCK_MONOTONIC, when it last began to be active; 0: never */
  int64_t slo_ns;
  int64_t in_flight_ns;
  int64_t overdue_ns;     /* since its oldest launch in flight should have been done; 0: none is late */
  int64_t policy_ns;      /* since its own policy was asked and has not answered; 0: it answers */
  int64_t deadline_in_ns; /* negative: passed; 0: none */
  uint64_t launches;
  uint64_t device_launches;
  uint64_t gate_waits;
  uint64_t gate_wait_ns;
  uint64_t process; /* drawn when its process started: the clients of one process have the same; 0: not said yet */
  uint64_t normal_beside_best_effort; /* of its process (counts.h) */
  uint64_t memory_bytes;              /* allocated on the GPU and not freed */
  uint64_t memory_peak_bytes;         /* the most that its process had, ever */
  uint64_t memory_limit_bytes;        /* of its process; 0: none */
  uint64_t memory_away_bytes;         /* of it, in the host's memory now: not in memory_bytes */
  uint64_t memory_given_bytes;        /* given back to latency clients that asked, ever */
  uint64_t memory_refusals;           /* times that it was asked, and could not */
  uint64_t pool_reserved_bytes;       /* of its process's pools together (cudasched_pool_sizes) */
  uint64_t pool_allocated_bytes;
  uint64_t pool_largest_free_bytes; /* of the pool that has the largest */
  int32_t process_class;            /* of launches of its process that no region and no stream decides */
  uint32_t weight_milli;            /* of its share among best-effort clients, in thousandths */
  uint32_t time_slice_us;           /* of its contexts on the GPU; 0: libcuda's own, 2048 */
  uint32_t time_slice_state;        /* enum cudasched_time_slice_state */
  char policy[16];                  /* "strict", ...; "own": the program's; "": not known */
  char name[64];
  char version[32];
};

/* Reads the table at `path` into at most `capacity` clients; *count says how many there are. `device_name` (64 bytes)
 * receives the GPU's name. Dead clients' slots are given back on the way. */
CUDASCHED_EXPORT int cudasched_read_table(const char* path, struct cudasched_client* clients, int32_t capacity,
                                          int32_t* count, char* device_name);

/* The same with the clients' processes' counters. counts[i] is of the process of clients[i]; counts[i].process
 * is 0 where it is not known, or stands with an earlier client of the same process. */
CUDASCHED_EXPORT int cudasched_read_counts(const char* path, struct cudasched_client* clients,
                                           struct cudasched_counts* counts, int32_t capacity, int32_t* count,
                                           char* device_name);

/* Where the tables of this user are (CUDASCHED_RUN_DIR or its default). */
CUDASCHED_EXPORT int cudasched_run_directory(char* path, uint64_t path_bytes);

/* ---- collecting launches (csrc/telemetry/collector.hpp) ------------------------------------------------------- */

struct cudasched_collected {
  char journal[4096]; /* the file that the launches are in; empty: nothing was being collected */
  uint64_t rows;
  uint64_t lost; /* launches without a row, for want of memory or disk */
};

/* From here on the launches of this process go into a journal in `directory`, which must exist, timed by "cupti",
 * "events" or "both". `cupti_path` may be null: CUDASCHED_CUPTI, a libcupti that is loaded, else the loader's search.
 * `capacity_bytes` bounds the unwritten records, 0: 64 MiB. Before the first cuInit, that call starts the journal, and
 * cudasched_collect_stop reports a failure to start. */
CUDASCHED_EXPORT int cudasched_collect_start(const char* directory, const char* timing, const char* cupti_path,
                                             uint64_t capacity_bytes);

/* Waits for the device and for the journal. */
CUDASCHED_EXPORT int cudasched_collect_stop(struct cudasched_collected* collected);

/* What launches of the process are called from here on, in UTF-8; "" for nothing. */
CUDASCHED_EXPORT int cudasched_collect_label(const char* text);

/* ---- tracing (csrc/telemetry/trace.hpp) ------------------------------------------------------------------------ */

struct cudasched_traced {
  char base[4096]; /* of the paths of the trace's files; empty: nothing was being traced */
  uint64_t records;
  uint64_t dropped;      /* records for which there was no room in memory or on disk */
  uint64_t rotated_away; /* records in files that were deleted to keep the limit */
};

/* From here on this process's launches, gate waits and regions are recorded into files in `directory`, which must
 * exist. `limit_bytes` bounds them: the oldest are deleted; 0: 256 MiB. One trace a process at a time. */
CUDASCHED_EXPORT int cudasched_trace_start(const char* directory, uint64_t limit_bytes);

/* Ends it, and waits for the files. */
CUDASCHED_EXPORT int cudasched_trace_stop(struct cudasched_traced* traced);

/* ---- for programs that link this library ----------------------------------------------------------------------- */

/* Puts the driver shim that lies beside this library (hook/libcuda.so.1) in front of the driver, for all CUDA calls of
 * the process from here on; makes no CUDA call itself. Does nothing if that is done already, or under CUDASCHED_OFF=1.
 * CUDASCHED_HOOK_ERROR: CUDA was loaded first, there is no driver, the shim is missing, or another installation of
 * cudasched is in the process. */
CUDASCHED_EXPORT int cudasched_install(void);

/* Sets a field of python/cudasched/config.py ("policy", "lead_us", "offload", ...), which documents the values, as
 * text. The value overrides the environment. A setting that the engine can change while it runs changes at once; any
 * other must be set before the first CUDA call, or is refused. CUDASCHED_CONFIG_ERROR: the name or the value has no
 * meaning. */
CUDASCHED_EXPORT int cudasched_configure(const char* name, const char* value);

/* Latency work of this process will come within so many milliseconds, over 0 and at most 1000: best-effort work holds
 * back from now on until it has come, or that time is over. */
CUDASCHED_EXPORT int cudasched_expect(double within_ms);

/* What a program that times its best-effort work has to know of others on the current device. */
struct cudasched_measuring {
  int64_t wait_ns;          /* over 0: no pause has begun, and one may after this time */
  int64_t busy_ns;          /* others' best-effort work in flight is predicted to last for so long */
  int64_t latency_since_ns; /* when latency work was last begun (CLOCK_MONOTONIC); 0: never */
  int32_t latency_active;   /* latency work is under way */
  int32_t reserved;
};

/* Best-effort work of other processes on the current device pauses for so many milliseconds, at most 50. 0 ends the
 * pause, and announces pauses before the first one; a negative number only looks. Between two pauses others have as
 * much time as the first one took, and 50 ms where several clients measure. Nothing happens, and all is 0, where
 * scheduling is off. */
CUDASCHED_EXPORT int cudasched_measure(double pause_ms, struct cudasched_measuring* found);

/* What a policy decides by (docs/policies.md says more of each). Times in nanoseconds; INT64_MIN: not known. */
struct cudasched_snapshot {
  int32_t latency_clients; /* one is on the device, active or not; or a best-effort client that measures */
  int32_t latency_active;  /* one holds best-effort work back */
  int32_t my_turn;
  int32_t reserved;
  int64_t since_latency_ns;
  int64_t linger_ns;
  int64_t in_flight_ns;
  int64_t predicted_ns;
  int64_t bound_ns;
  int64_t lead_ns;
  int64_t slack_ns;
  int64_t margin_ns;
  int64_t hint_ns;
  int64_t free_ns;
  int64_t foreseen_over_ns;
  int64_t long_ns;
  int64_t waited_ns;
  int64_t max_hold_ns;
};

enum cudasched_answer {
  CUDASCHED_SUBMIT = 0,
  CUDASCHED_WAIT_FOR_TIME = 1,    /* look again after *wait_ns, over 0 and at most a second */
  CUDASCHED_WAIT_FOR_LATENCY = 2, /* until latency work is done */
  CUDASCHED_WAIT_FOR_TURN = 3
};

/* Called at each look of a waiting best-effort launch, under a lock, on the thread that waits: it must not block,
 * allocate, throw or call CUDA. *wait_ns is 0 and stays so but for CUDASCHED_WAIT_FOR_TIME. Any other answer, holding
 * a launch for over a second while no latency work is active, or twice sleeping or computing for over a millisecond
 * switches the policy off, which is said; every launch then goes at once. A policy that never returns cannot be
 * cancelled: the launch waits for it for ever, and `cudasched status` names the program. */
typedef int32_t (*cudasched_policy)(const struct cudasched_snapshot* snapshot, void* context, int64_t* wait_ns);

/* What became of a change (docs/control.md). */
enum cudasched_outcome {
  CUDASCHED_APPLIED = 1,
  CUDASCHED_UNKNOWN_SETTING = 2, /* to that client */
  CUDASCHED_HAS_REGIONS = 3,     /* its regions decide its class */
  CUDASCHED_POLICY_HANGS = 4,    /* its own policy does not answer, and cannot be replaced */
  CUDASCHED_WITHDRAWN = 5,       /* it did not take the change up in time; nothing was changed */
  CUDASCHED_NO_CLIENT = 6,
  CUDASCHED_ENDED = 7,
  CUDASCHED_BUSY = 8,        /* another change of it was not over in time */
  CUDASCHED_UNCLEAR = 9,     /* it took the change up, and was stopped before it answered */
  CUDASCHED_HOLDS_MORE = 10, /* of memory, than the limit would be */
  CUDASCHED_TRACED = 11,     /* it is being traced already */
  CUDASCHED_NO_TRACE = 12    /* there is no room for one, or its directory cannot be written to */
};

/* Changes a setting of the running client with that process number (cudasched_client::process) in the table at `path`,
 * which must belong to this user: "class", "priority", "weight", "policy" or "memory_limit" (in whole MiB); or "trace":
 * it is traced for so many milliseconds, at most 60000, into traces/NUMBER beside the table, 0: the trace ends. A
 * change holds on all of the client's GPUs and ends with it. Waits for its answer for `timeout_ns` (up to 60 s), and a
 * second more where it was stopped in the middle; an idle client answers within a second. CUDASCHED_OK: *outcome has
 * the change's outcome. */
CUDASCHED_EXPORT int cudasched_change(const char* path, uint64_t process, const char* setting, const char* value,
                                      int64_t timeout_ns, int32_t* outcome);

/* This policy decides from here on, on every device of the process, in the place of the configured one. `policy` and
 * `context` must stay for the rest of the process. CUDASCHED_CONFIG_ERROR: it is null. */
CUDASCHED_EXPORT int cudasched_use_policy(cudasched_policy policy, void* context);

#ifdef __cplusplus
}
#endif

#endif

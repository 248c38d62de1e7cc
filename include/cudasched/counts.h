/* What a process counts from its first CUDA call on. It stands in the shared tables (csrc/arbiter/counters.hpp) and
 * crosses the C boundary (engine.h) as the same bytes: changing it changes the table's layout version. Every number
 * but those of graphs that stay whole only grows. Times are nanoseconds. */
#ifndef CUDASCHED_COUNTS_H_
#define CUDASCHED_COUNTS_H_

#include <stdint.h>

/* Buckets of times, four an octave: bucket 0 holds times under 1,024 ns, bucket 1 + 4 * o + q times from
 * (4 + q) * 2^(8 + o) on and below the next one's beginning, the last all from 2^34 ns (17.2 s) on. */
#define CUDASCHED_TIME_BUCKETS 98
/* Buckets of prediction errors, |measured / predicted - 1|: up to 1, 2, 5, 10, 20, 30, 50, 100 and 200 percent, over.
 */
#define CUDASCHED_ERROR_BUCKETS 10
/* Of regions: "" (without a name) is the first, and those beyond the others are counted together in the last. */
#define CUDASCHED_REGIONS 12
#define CUDASCHED_REGION_NAME_BYTES 64
/* Why a graph is launched whole: cudasched_whole_reason() names them. */
#define CUDASCHED_WHOLE_REASONS 26

/* Levels of the judgement of a kernel's launch shape: critical, warning, good, not judged. */
#define CUDASCHED_LEVELS 4

struct cudasched_times {
  uint64_t buckets[CUDASCHED_TIME_BUCKETS]; /* the number of times is their sum */
  uint64_t sum_ns;
};

/* Requests of latency regions of one name, or of a process of class latency without regions. */
struct cudasched_region_counts {
  char name[CUDASCHED_REGION_NAME_BYTES]; /* UTF-8, ended by a zero */
  uint64_t slo_ns;                        /* of the last one that had a target; 0: none had */
  uint64_t met;                           /* of those with a target, how many kept it, */
  uint64_t missed;                        /* and how many did not */
  struct cudasched_times times;           /* of all: from the entry until the region was left and its work complete */
};

/* Executable graphs that the process has now and that stay whole for one reason. */
struct cudasched_whole_graphs {
  uint64_t graphs;
  uint64_t longest_ns;    /* the predicted time of the longest of them, */
  uint64_t longest_nodes; /* and how many nodes it has */
};

/* Its numbers, lists and times are the lines of counts.inc. */
struct cudasched_counts {
#define CUDASCHED_NUMBER(name, metric, text) uint64_t name;
#define CUDASCHED_LIST(name, entries, metric, text) uint64_t name[entries];
#define CUDASCHED_TIMES(name, metric, text) struct cudasched_times name;
#include "cudasched/counts.inc"
  struct cudasched_region_counts regions[CUDASCHED_REGIONS];
  struct cudasched_whole_graphs whole[CUDASCHED_WHOLE_REASONS]; /* by reason; as of a second ago at most */
};

#endif

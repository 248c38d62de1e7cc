/* What a process counts from its first CUDA call on. It stands in the shared tables (csrc/arbiter/counters.hpp) and
 * crosses the C boundary (engine.h) as the same bytes: changing it changes the table's layout version. Every number
 * but those of graphs that stay whole only grows. Times are nanoseconds. */
#ifndef CUDASCHED_COUNTS_H_
#define CUDASCHED_COUNTS_H_

#include <stdint.h>

/* Buckets of times, four an octave: bucket 0 holds what is under 1,024 ns, bucket 1 + 4 * o + q what is from
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

/* Levels of what is said of a kernel's launch shape: critical, warning, good, not judged. */
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
  uint64_t longest_ns;    /* what the longest of them is predicted to take, */
  uint64_t longest_nodes; /* and how many nodes it has */
};

struct cudasched_counts {
  uint64_t process;         /* drawn when the process starts: its clients are known by it; 0: nothing is said */
  uint64_t normal_launches; /* kernel and graph launches that the driver accepted, by class */
  uint64_t latency_launches;
  uint64_t best_effort_launches;
  uint64_t gated_launches;       /* best-effort launches that found the gate on, whether or not they waited */
  uint64_t offloaded_launches;   /* best-effort launches that the launcher thread made */
  uint64_t untracked_launches;   /* gated launches whose completion could not be followed */
  uint64_t gate_exceptions;      /* launches that were held because of what was in flight, and went */
  uint64_t backed_off;           /* best-effort launches, and waits, that let a request of their own program go first */
  uint64_t graph_launches;       /* of the best-effort ones, those of graphs */
  uint64_t sliced_launches;      /* launches of graphs that were submitted in slices, */
  uint64_t slice_launches;       /* and in how many; each counts as a launch */
  uint64_t prioritised_graphs;   /* instantiated with a priority for their kernel nodes, by their caller's class */
  uint64_t unprioritised_graphs; /* the driver refused the priority: instantiated as the program said */
  uint64_t normal_beside_best_effort; /* launches that went as normal on a stream that best effort uses */
  uint64_t contested_streams;         /* times that latency work was launched on a stream of best effort */
  uint64_t unmet_collectives;         /* collectives that another member of the job did not come to in time */
  uint64_t clean_segments;            /* of latency requests: kept without best effort, to see what they take, */
  uint64_t halved_budgets;     /* times that they took longer beside it than they may, and half of it is allowed, */
  uint64_t profile_fallbacks;  /* and that they were not as predicted: nothing is let in until they are known again */
  uint64_t device_launches;    /* run by the device as CUPTI counts them; 0: not counted */
  uint64_t without_room;       /* kernels whose parameters the predictor had no room to learn */
  uint64_t best_effort_gpu_ns; /* predicted GPU time of best-effort launches that are complete */
  uint64_t latency_active_ns;  /* time in which a latency client of the process held the gate closed */
  uint64_t launcher_cpu_ns;    /* CPU time of the launcher threads */
  uint64_t launcher_driver_ns; /* of it, about so much inside the driver's calls (one in 16 is timed) */

  uint64_t predictions;       /* timed launches that had been predicted */
  uint64_t within_bound;      /* of these, the ones that took no longer than their upper bound */
  uint64_t predicted_ns;      /* the sum of what they were predicted to take, */
  uint64_t measured_ns;       /* of what they took, */
  uint64_t prediction_off_ns; /* and of the differences, whatever their sign */
  uint64_t prediction_errors[CUDASCHED_ERROR_BUCKETS];

  uint64_t kernels[CUDASCHED_LEVELS]; /* best-effort kernels that were predicted, each launch shape once, by level; */
  uint64_t kernel_occupancy;          /* the sums of their occupancies, in millionths, */
  uint64_t kernel_sm_utilisation;     /* of their uses of the SMs (waves, and what the last one leaves empty), */
  uint64_t kernel_block_efficiency;   /* and of their blocks' threads over those of the warps */

  struct cudasched_times gate_waits;  /* of launches that waited at the gate */
  struct cudasched_times queue_waits; /* of one offloaded launch in 16: from the program's call to the driver's */
  struct cudasched_times preemptions; /* of requests that began beside best effort: until the GPU was theirs */
  struct cudasched_region_counts regions[CUDASCHED_REGIONS];
  struct cudasched_whole_graphs whole[CUDASCHED_WHOLE_REASONS]; /* by reason; as of a second ago at most */
};

#endif

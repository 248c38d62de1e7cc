/* The protocol of csrc/queue, for the model checker spin: one pusher, one latency thread, the launcher, the gate.
 *
 * What is checked, over every interleaving of their atomic steps: nobody sleeps for ever (a lost wake-up or a deadlock
 * is an invalid end state), the latency thread above all; operations are passed in order and each once; and a drain
 * returns only when its operation is passed.
 *
 * No sleep here has a time limit, so that none hides a lost wake-up. The names are those of the code: Ring::publish,
 * await_work, pass, await; Launcher::open_until; Queue::open_for and latency_came.
 *
 * The pusher pushes two launches (and waits for room: one slot less), takes the allocator's mutex and drains under it,
 * as a free does. The latency thread opens a region, which closes the gate until it ends, and wants the same mutex.
 *
 * Each of these breaks the model, and test_model.cpp checks that it does (-D...):
 *   NO_CLAIM       latency work that comes does not open the gate for waits under way
 *   NO_OPEN        a drain beside latency work leaves the gate as it is
 *   NO_GATE_WAKE   opening the gate does not wake the launcher at it
 *   NO_RECHECK     the launcher sleeps without looking at the ring again
 *   NO_WANTED      passing an operation wakes nobody
 */
byte pushed, passed;          /* positions */
bool consumer_sleeps;         /* Ring::consumer_sleeps_, also the word that it sleeps on */
byte wanted = 255;            /* Ring::wanted_; 255: nobody */
byte wakes;                   /* Ring::wakes_, counted modulo 256 */
byte until;                   /* Opening::until_ */
bool at_gate;                 /* Launcher::at_gate_ */
byte gate_word;               /* the arbiter's wake_sequence */
byte claimed;                 /* Queue::claimed_ */
bool process_has_latency;
bool latency_active;          /* the gate is closed */
bool mutex;                   /* the allocator's */
byte executed;                /* driver calls made */

inline notify() {
  if
  :: consumer_sleeps -> consumer_sleeps = false
  :: else
  fi
}

inline publish() {
  pushed++;
  /* seq_cst: the store above and this load are two steps, in this order */
  notify()
}

inline raise(word, value) {  /* a compare-and-swap loop that only ever raises */
  atomic { if :: word < value -> word = value :: else fi }
}

inline open_until(position) {
  raise(until, position);
#ifndef NO_GATE_WAKE
  if
  :: at_gate -> gate_word++
  :: else
  fi
#endif
}

inline open_for(position) {  /* a drain that may not wait beside latency work */
  if
  :: process_has_latency ->
#ifndef NO_OPEN
     open_until(position)
#else
     skip
#endif
  :: else ->
     raise(claimed, position);
     if
     :: process_has_latency -> open_until(position)
     :: else
     fi
  fi
}

inline await(position, seen) {
  do
  :: passed >= position -> break
  :: else ->
     seen = wakes;
     atomic { if :: position < wanted -> wanted = position :: else fi };
     if
     :: passed >= position -> break
     :: else -> (wakes != seen)  /* the futex sleeps while the word is `seen` */
     fi
  od
}

inline drain(position, seen) {
  if
  :: passed >= position
  :: else ->
     open_for(position);
     await(position, seen)
  fi;
  assert(passed >= position)
}

active proctype launcher() {
  byte seen;
  do
  :: pushed > passed ->
     /* admit */
     at_gate = true;
     do
     :: seen = gate_word;
        if
        :: !latency_active -> break
        :: passed + 1 <= until -> break
        :: else -> (gate_word != seen)
        fi
     od;
     at_gate = false;
     executed++;                       /* the driver call */
     assert(executed == passed + 1);   /* in order, each once */
     passed++;
#ifndef NO_WANTED
     if
     :: wanted <= passed ->
        wanted = 255;
        wakes++
     :: else
     fi
#endif
  :: pushed == passed ->
     consumer_sleeps = true;
     if
#ifndef NO_RECHECK
     :: pushed != passed -> consumer_sleeps = false
     :: else ->
#else
     :: true ->
#endif
end_idle: (!consumer_sleeps)  /* asleep with nothing to do is a good end */
     fi
  od
}

active proctype pusher() {
  byte seen;
  publish();
  drain(1, seen);   /* for room */
  publish();
  atomic { !mutex -> mutex = true };
  drain(2, seen);   /* a free, under the allocator's mutex */
  mutex = false
}

active proctype latency() {
  /* latency_came */
  latency_active = true;
  process_has_latency = true;
#ifndef NO_CLAIM
  {
    byte position = claimed;
    open_until(position)
  }
#endif
  atomic { !mutex -> mutex = true };  /* what the pusher may hold while it drains */
  mutex = false;
  /* the region ends */
  latency_active = false;
  gate_word++
}

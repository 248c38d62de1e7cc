/* How an on/off variable is spelt: 1, true, yes, on and 0, false, no, off, in any case;
 * python/cudasched/config.py has the same. For the shim, which is C, and the engine. Any thread, no lock, no
 * allocation. */
#pragma once

#include <stddef.h>
#include <strings.h>

/* 1: on; 0: off; -1: neither, or null. */
static inline int cudasched_switch(const char* value) {
  static const char* const kWords[] = {"0", "1", "false", "true", "no", "yes", "off", "on"};
  for (size_t i = 0; value != NULL && i < sizeof kWords / sizeof kWords[0]; ++i) {
    if (strcasecmp(value, kWords[i]) == 0) return (int)(i % 2);
  }
  return -1;
}

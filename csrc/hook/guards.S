/* Entry points for functions that need something done before them, whatever their signature (csrc/hook/guards.cpp). 16
 * bytes each. */
#include "jumps.inc"

    .set guard_count, 1024

    .text
    .hidden cudasched_guard_target
    .globl cudasched_guards
    .hidden cudasched_guards
    .p2align 4
    .type cudasched_guards, %object
cudasched_guards:
    .set guard_index, 0
    .rept guard_count
    numbered guard_index, guard_and_jump
    .set guard_index, guard_index + 1
    .endr
    .size cudasched_guards, . - cudasched_guards

    ask_and_jump guard_and_jump, cudasched_guard_target

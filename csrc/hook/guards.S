/* Entry points for functions that need something done before them, whatever their signature (csrc/hook/offload.cpp):
 * each saves every register that an argument can be in, asks cudasched_guard_target(index, integer arguments in registers,
 * arguments on the stack) where to go, and jumps there with the arguments as they were. 16 bytes each. */
    .set guard_count, 1024

    .text
    .hidden cudasched_guard_target
    .globl cudasched_guards
    .hidden cudasched_guards
    .p2align 4
    .type cudasched_guards, @object
cudasched_guards:
    .set guard_index, 0
    .rept guard_count
    .p2align 4
    endbr64
    movl $guard_index, %r11d
    jmp guard_and_jump
    .set guard_index, guard_index + 1
    .endr
    .size cudasched_guards, . - cudasched_guards

    /* The argument registers, al with the rest of rax, and r10, as in trampolines.py; the integer arguments first. */
    .p2align 4
    .type guard_and_jump, @function
guard_and_jump:
    .cfi_startproc
    pushq %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    movq %rsp, %rbp
    .cfi_def_cfa_register %rbp
    subq $192, %rsp
    andq $-16, %rsp
    movq %rdi, 0(%rsp)
    movq %rsi, 8(%rsp)
    movq %rdx, 16(%rsp)
    movq %rcx, 24(%rsp)
    movq %r8, 32(%rsp)
    movq %r9, 40(%rsp)
    movq %rax, 48(%rsp)
    movq %r10, 56(%rsp)
    movaps %xmm0, 64(%rsp)
    movaps %xmm1, 80(%rsp)
    movaps %xmm2, 96(%rsp)
    movaps %xmm3, 112(%rsp)
    movaps %xmm4, 128(%rsp)
    movaps %xmm5, 144(%rsp)
    movaps %xmm6, 160(%rsp)
    movaps %xmm7, 176(%rsp)
    movl %r11d, %edi
    movq %rsp, %rsi
    leaq 16(%rbp), %rdx  /* past the saved frame pointer and the return address */
    call cudasched_guard_target
    movq %rax, %r11
    movq 0(%rsp), %rdi
    movq 8(%rsp), %rsi
    movq 16(%rsp), %rdx
    movq 24(%rsp), %rcx
    movq 32(%rsp), %r8
    movq 40(%rsp), %r9
    movq 48(%rsp), %rax
    movq 56(%rsp), %r10
    movaps 64(%rsp), %xmm0
    movaps 80(%rsp), %xmm1
    movaps 96(%rsp), %xmm2
    movaps 112(%rsp), %xmm3
    movaps 128(%rsp), %xmm4
    movaps 144(%rsp), %xmm5
    movaps 160(%rsp), %xmm6
    movaps 176(%rsp), %xmm7
    leave
    .cfi_def_cfa %rsp, 8
    jmp *%r11
    .cfi_endproc
    .size guard_and_jump, . - guard_and_jump

    .section .note.GNU-stack, "", @progbits

    /* GNU_PROPERTY_X86_FEATURE_1_AND: indirect branch tracking and shadow stack. */
    .section .note.gnu.property, "a", @note
    .p2align 3
    .long 4, 16, 5
    .asciz "GNU"
    .long 0xc0000002, 4, 3, 0

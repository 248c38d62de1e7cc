/* libcuda.so: for programs that open this name. It holds nothing; it needs the shim, and whatever is looked up in it is
 * found there. */
    .section .note.GNU-stack, "", @progbits

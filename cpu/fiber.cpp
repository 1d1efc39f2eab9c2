// cpu/fiber.cpp: the switch between two stacks, for x86-64. fiber.h says what it does.
#include "fiber.h"

#if defined(__x86_64__) && !defined(CUDA_CPU_BOOST_FIBERS)
// Six registers belong to the caller, and are saved here; the compiler saves the others at the call. The address at
// which to continue is popped and jumped to, instead of using `ret`: the processor predicts the target of a `ret` from
// the calls that it has executed, and those belong to another fiber.
asm(R"(
    .text
    .p2align 5
    .globl cuda_cpu_switch
    .type cuda_cpu_switch, @function
cuda_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rdx
    jmp *%rdx
    .size cuda_cpu_switch, .-cuda_cpu_switch

    .p2align 5
    .globl cuda_cpu_start
    .type cuda_cpu_start, @function
cuda_cpu_start:
    .cfi_startproc
    .cfi_undefined rip
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    xorl %ebp, %ebp
    call *%rdx
    ud2
    .cfi_endproc
    .size cuda_cpu_start, .-cuda_cpu_start
)");
#endif

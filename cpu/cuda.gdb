# cpu/cuda.gdb: commands for debugging kernels on the CPU device. In gdb:  source cpu/cuda.gdb
#
#   cuda-thread                which kernel, grid, block and thread is running here
#   cuda-break KERNEL [THREAD [BLOCK]]
#                              stops where thread THREAD of block BLOCK enters the kernel; x or x,y or x,y,z; 0 if left out
#   cuda-next                  like next, but stays with this CUDA thread (next does too, unless another breakpoint is hit)
#
# A kernel is an ordinary function here: break, step, next, print, watch, backtrace work as ever. print threadIdx,
# print blockIdx, print a __shared__ array: they are ordinary variables. The threads of a block take turns on one OS thread,
# so that `info threads` shows OS threads; `next` over __syncthreads() lets all others run and comes back to this one.

# Do not step into the machinery: the launch, the barriers, the thread loop.
skip -gfile */cpu/*.h
skip -gfile cpu/*.h
skip -gfile */cpu/block.cpp
skip -gfile cpu/block.cpp
skip -gfile */c++/*
# One OS thread, so that blocks run one after the other, and the first breakpoint is hit by block 0.
set environment OMP_NUM_THREADS 1

python

import gdb


def kernel_frame():
    """The frame of the kernel itself: of all that run_threads has called, lambdas aside, the outermost one."""
    try:
        frame = gdb.newest_frame()
    except gdb.error:  # the program has not started
        return None
    outermost = None
    while frame is not None:
        name = frame.name() or ""
        if name.startswith("cuda_cpu::run_threads<"):
            return outermost
        if "{lambda" not in name and "operator()" not in name:
            outermost = frame
        frame = frame.older()
    return None


def index(value):
    return tuple(int(value[c]) for c in "xyz")


class CudaThread(gdb.Command):
    """cuda-thread: which kernel, grid, block and thread is running here."""

    def __init__(self):
        super().__init__("cuda-thread", gdb.COMMAND_STATUS)

    def invoke(self, argument, from_tty):
        frame = kernel_frame()
        if frame is None:
            print("No kernel is running here, or it was compiled without make debug.")
            return
        selected = gdb.selected_frame()
        frame.select()
        try:
            at = {name: index(gdb.parse_and_eval(name)) for name in ("threadIdx", "blockIdx", "blockDim", "gridDim")}
        finally:
            selected.select()
        x, y, z = at["threadIdx"]
        bx, by, _ = at["blockDim"]
        linear = x + bx * (y + by * z)
        name = frame.name().replace("(anonymous namespace)::", "").split("(")[0]
        print("kernel %s, grid %s of blocks %s" % (name, at["gridDim"], at["blockDim"]))
        print("  block %s, thread %s: warp %d, lane %d" % (at["blockIdx"], at["threadIdx"], linear // 32, linear % 32))


def condition(name, text):
    numbers = [int(n) for n in text.split(",")] if text else []
    numbers += [0] * (3 - len(numbers))
    return " && ".join("%s.%s == %d" % (name, c, n) for c, n in zip("xyz", numbers))


class CudaBreak(gdb.Command):
    """cuda-break KERNEL [THREAD [BLOCK]]: stops where that thread enters the kernel."""

    def __init__(self):
        super().__init__("cuda-break", gdb.COMMAND_BREAKPOINTS, gdb.COMPLETE_SYMBOL)
        self.made = []  # (breakpoint, words)
        gdb.events.exited.connect(self.tell_unused)

    # Blocks may have fewer threads here than on a GPU: a thread that none of them has would be waited for in vain.
    def tell_unused(self, event):
        for made, words in self.made:
            if made.is_valid() and made.enabled and made.hit_count == 0:
                print("cuda-break %s: no thread stopped. Either the kernel did not run, or no block has this thread, or no grid"
                      " this block: cuda-break %s stops in the first, and cuda-thread says how many there are."
                      % (" ".join(words).strip(), words[0]))

    def invoke(self, argument, from_tty):
        words = gdb.string_to_argv(argument)
        if not 1 <= len(words) <= 3:
            raise gdb.GdbError("cuda-break KERNEL [THREAD [BLOCK]], for example: cuda-break rmsnorm_forward_kernel 5,0 1")
        words += [""] * (3 - len(words))
        before = set(b.number for b in gdb.breakpoints())
        gdb.execute("break %s if %s && %s" % (words[0], condition("threadIdx", words[1]), condition("blockIdx", words[2])))
        self.made += [(b, words) for b in gdb.breakpoints() if b.number not in before]


class CudaNext(gdb.Command):
    """cuda-next: steps over one line, in this CUDA thread, whatever breakpoints the others hit on the way."""

    def __init__(self):
        super().__init__("cuda-next", gdb.COMMAND_RUNNING)

    def invoke(self, argument, from_tty):
        enabled = [b for b in gdb.breakpoints() if b.enabled]
        for b in enabled:
            b.enabled = False
        try:
            gdb.execute("next " + argument)
        finally:
            for b in enabled:
                b.enabled = True


CudaThread()
CudaBreak()
CudaNext()

end

# llm.cu
#
#   make                  build for the GPU if this machine has one, otherwise for the CPU; make DEVICE=cpu|cuda chooses
#   make test             build and run the tests
#   make help             all targets and variables
#   make doctor           what this machine has, and what to install for the rest
#
# One rule turns X.cu into build/<device>/X.o:
#   cuda   nvcc compiles it; files without kernels go to g++ alone, which is several times faster.
#   cpu    cpu/rewrite turns kernel<<<...>>>(...) into a function call, then g++ compiles it against cpu/cuda_runtime.h.
# All objects but a program's own go into build/<device>/libllm.a, and the linker takes what it needs.

MAKEFLAGS += --no-builtin-rules --no-print-directory
.SUFFIXES:
.DELETE_ON_ERROR:

empty :=
space := $(empty) $(empty)
comma := ,

# All cores, unless another number is asked for: make -j1, or MAKEFLAGS=-j1 in the environment, which GNU make 4.3 does not show
# in its own variable before it has read this file.
ifeq ($(MAKELEVEL)$(filter -j% --jobs%,$(MAKEFLAGS) $(shell echo "$$MAKEFLAGS")),0)
  MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 2)
endif

ifeq ($(origin CXX),default)
  CXX := g++
endif
# Compilers run behind ccache where it is there (make CCACHE= does without): what was compiled before, in this folder or in
# another clone, is copied. CCACHE_DEPEND: ccache takes the list of headers from the compiler (-MD), not from the preprocessed
# text. For nvcc nothing else is right: that text is what one of its passes sees, and a change under #if __CUDA_ARCH__ is not
# in it. The sloppiness is what ccache asks for with precompiled headers: it does not see __TIME__ in them, nor what a source
# defines before it includes them. We have neither.
CCACHE ?= $(if $(findstring ccache,$(CXX)),,$(shell command -v ccache 2>/dev/null))
export CCACHE_DEPEND     := 1
export CCACHE_SLOPPINESS := pch_defines,time_macros
ifdef CUDA_HOME
  NVCC ?= $(wildcard $(CUDA_HOME)/bin/nvcc)
else
  NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc /opt/cuda/bin/nvcc))
  CUDA_HOME := $(patsubst %/bin/nvcc,%,$(firstword $(realpath $(NVCC)) $(NVCC)))
endif
# Not for /usr, where a distribution's package has CUDA: g++ finds /usr/include itself, and its own headers must come before it.
ISYSTEM = $(if $(filter-out /usr,$1),-isystem $1/include)
CUDA_LIB = $(foreach l,$(if $(filter-out /usr,$(CUDA_HOME)),$(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib)),-L$l -Wl$(comma)-rpath$(comma)$l)

# ---- which device, and why -------------------------------------------------------------------------------------------
# What takes a program to find out is found out when it is first needed, and once.
once = $(eval $1 := $(shell $2))$($1)
CUDA_RELEASE = $(call once,CUDA_RELEASE,$(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
# Why nothing can be compiled for a GPU; empty if it can.
ifeq ($(NVCC),)
  NO_CUDA := no nvcc $(if $(CUDA_HOME),in CUDA_HOME=$(CUDA_HOME),here)
else
  NO_CUDA = $(if $(filter $(addsuffix .%,1 2 3 4 5 6 7 8 9 10 11),$(CUDA_RELEASE)),$(NVCC) is older than CUDA 12)
endif
# The architectures of the GPUs here: 80 90. The kernels need 75, which is compute capability 7.5 (Turing), or higher.
GPU_ARCHS  = $(call once,GPU_ARCHS,nvidia-smi --query-gpu=compute_cap --format=csv$(comma)noheader 2>/dev/null | grep '^[0-9.]*$$' | tr -d . | sort -u)
OLD_ARCHS := 30 32 35 37 50 52 53 60 61 62 70 72
NVCC_ARCHS = $(call once,NVCC_ARCHS,$(NVCC) --list-gpu-code 2>/dev/null | sed -n 's/^sm_//p')
USED_ARCHS = $(filter $(NVCC_ARCHS),$(filter-out $(OLD_ARCHS),$(GPU_ARCHS)))
ifeq ($(origin DEVICE),undefined)
  DEVICE := cpu
  ifneq ($(NO_CUDA),)
    REASON := $(NO_CUDA)
  else ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU '),0)
    REASON := nvcc is here, but nvidia-smi shows no working GPU
  else ifneq ($(and $(GPU_ARCHS),$(if $(filter-out $(OLD_ARCHS),$(GPU_ARCHS)),,old)),)
    REASON := the GPU here is older than compute capability 7.5 (Turing), which the kernels need
  else ifneq ($(and $(GPU_ARCHS),$(if $(USED_ARCHS),,new)),)
    REASON := the nvcc of CUDA $(CUDA_RELEASE) cannot compile for the GPU here, sm_$(firstword $(GPU_ARCHS)): install a newer CUDA
  else
    DEVICE := cuda
    REASON := nvcc is here, and a GPU: $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
  endif
else
  REASON := DEVICE=$(DEVICE) was asked for
endif
ifeq ($(filter cpu cuda,$(DEVICE)),)
  $(error DEVICE=$(DEVICE): use DEVICE=cpu or DEVICE=cuda)
endif
ifeq ($(DEVICE),cuda)
  ifneq ($(NO_CUDA),)
    $(error DEVICE=cuda needs the nvcc of CUDA 12 or newer: $(NO_CUDA). `make DEVICE=cpu` needs no CUDA)
  else ifneq ($(and $(filter command,$(origin ARCH)),$(filter $(OLD_ARCHS),$(ARCH))),)
    $(error ARCH=$(ARCH): the kernels need 75 (compute capability 7.5, Turing) or higher)
  endif
endif
ifeq ($(MAKELEVEL),0)
  ifeq ($(filter help doctor clean format format-check house-check compile_commands.json sanitize fuzz,$(MAKECMDGOALS)),)
    $(info Building for $(if $(filter cpu,$(DEVICE)),the CPU,the GPU) (DEVICE=$(DEVICE)): $(REASON).)
  endif
endif

# ---- flags -----------------------------------------------------------------------------------------------------------
# No -ffast-math: results must not depend on how the compiler groups a sum. These two only say that nobody reads errno or
# floating-point traps; contraction is off so that a kernel gives the same bits inlined, vectorised or stepped through.
FLOAT_FLAGS := -fno-math-errno -fno-trapping-math -ffp-contract=off
WARNINGS    := -Wall -Wextra -Wno-unknown-pragmas -Wno-restrict
MARCH       ?= native
DEBUG       ?= 0
BUILD       := build/$(DEVICE)
OPTIMIZE    := -O3
# Files that wait for those that compute, or for a disk, or a network (the product's only kernel in them, of planning/rates, fills
# a tensor with numbers): -Og compiles in two thirds of the time.
# (Of the tests those remain whose float64 loops would take longer than that.) With -Og g++ warns falsely of parts of <regex>.
LIGHT       := train_gpt generate io/safetensors io/json io/tokenizer_json io/byte_tokenizer io/plot io/log parallel/comm/comm \
               parallel/comm/ranks parallel/comm/trace% parallel/comm/transport% parallel/tensor/% model/config model/parameters \
               model/huggingface% training/% planning/% inference/% dev/bench_kernels dev/bench_report dev/plot_runs \
               $(filter-out test/reference test/test_flash_attention test/test_hopper_matmul,$(patsubst %.cu,%,$(wildcard test/*.cu)))
LIGHT_FLAGS := -Og -Wno-maybe-uninitialized
# Flash attention on tensor cores, which the CPU device emulates, and uses only where it is asked to: with -O2 it takes half the
# time to compile, and runs 5 % slower.
EMULATED       := layers/flash_attention/mma% layers/flash_attention/hopper%
EMULATED_FLAGS := -O2
# Layers: without this g++ takes a loop that copies a chunk for a memcpy, and for AMD's processors makes moves of 16 bytes of it. A
# load of 32 bytes right behind two such stores has to wait until both are in the cache. With it kernels take 7 to 8 % less time
# (float32 and bf16, AMD EPYC with AVX2).
LAYERS       := layers/%
LAYERS_FLAGS := -fno-tree-loop-distribute-patterns
# And where the processor has vectors of 512 bits, as a product uses, these: g++ takes 256 bits by itself. Kernels with an exponential
# take a third less time with them (Xeon, Cascade Lake), bf16 products, whose sums are rounded, 7 to 9 % less (Xeon with AMX).
ifneq ($(findstring x86_64,$(shell $(CXX) -dumpmachine 2>/dev/null)),)
  WIDE_FLAGS := -mprefer-vector-width=512
endif
LAYERS_FLAGS += $(WIDE_FLAGS)
# Attention on CUDA cores: without these copies of loops and functions it takes three quarters of the time to compile, and
# runs no slower.
CORES       := layers/flash_attention/cores%
CORES_FLAGS := -fno-ipa-cp-clone -fno-split-loops -fno-unswitch-loops
# Optimizers: g++ makes a copy of the loop over a tile's elements, one that need not ask where the tile ends, only if the loop is
# short. With a 16-bit copy of the weights it is not: AdamW takes a third of the time with this.
TILES       := optim/%
TILES_FLAGS := --param max-unswitch-insns=100
# clang++ does not know these three, and would say so of each warning that it does not know, too. (The functions without
# `override` are in inference/http_connection.h, where it is said why.)
ifneq ($(findstring clang,$(shell $(CXX) --version 2>/dev/null)),)
  WARNINGS    += -Wno-unknown-warning-option -Wno-inconsistent-missing-override
  WIDE_FLAGS :=
  LAYERS_FLAGS :=
  CORES_FLAGS :=
  TILES_FLAGS :=
endif
ifeq ($(DEBUG),1)
  BUILD       := $(BUILD)-debug
  OPTIMIZE    := -O0 -g
  LIGHT_FLAGS :=
  EMULATED_FLAGS :=
endif
# SANITIZE=address,undefined builds into a folder of its own.
ifneq ($(SANITIZE),)
  BUILD       := $(BUILD)-$(subst $(comma),-,$(SANITIZE))
  OPTIMIZE    := -Og -g -fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=all -Wno-maybe-uninitialized
  LIGHT_FLAGS :=
  EMULATED_FLAGS :=
endif

# make count: kernels as on a GPU, with a call before each load and store (cpu/count_bytes.cpp). The sanitizer's own library is
# not linked.
ifeq ($(COUNT),1)
  BUILD          := $(BUILD)-count
  OPTIMIZE       := -O1 -fsanitize=thread --param tsan-instrument-func-entry-exit=0 -DCOUNT_BYTES -DGPU_CHUNKS
  LIGHT_FLAGS    :=
  EMULATED_FLAGS :=
  LAYERS_FLAGS   :=
  CORES_FLAGS    :=
  TILES_FLAGS    :=
endif

# make gpu-choices: kernels as on a GPU, whose accesses of memory are checked for their alignment, too.
ifeq ($(GPU_CHOICES),1)
  BUILD          := $(BUILD)-gpu-choices
  OPTIMIZE       := -O1 -DGPU_CHUNKS -fsanitize=alignment -fno-sanitize-recover=all
  LIGHT_FLAGS    :=
  EMULATED_FLAGS :=
  LAYERS_FLAGS   :=
  CORES_FLAGS    :=
  TILES_FLAGS    :=
endif

# What `make gpu-bundle` has put aside for machines without a network: used where the system has none of its own.
BUNDLE         := gpu-bundle
BUNDLE_INCLUDE := -idirafter $(BUNDLE)/include
BUNDLE_LIB     := $(wildcard $(BUNDLE)/lib)

# The C++ headers of this compiler: the text that train_gpt reads when it is given no other.
CXX_INCLUDE_DIR := $(patsubst %/vector,%,$(firstword $(filter %/vector,$(shell $(CXX) -x c++ -M -include vector /dev/null 2>/dev/null))))

# JSON: Debian and Ubuntu have JsonCpp's headers in a folder of its name, and so has the bundle.
JSON_CFLAGS := $(or $(shell pkg-config --cflags jsoncpp 2>/dev/null),-idirafter /usr/include/jsoncpp)
# What reads text: JSON, and what tokenizers need, patterns and the normal forms of Unicode.
TEXT_LIBS := $(if $(BUNDLE_LIB),-L$(BUNDLE_LIB) -Xlinker -rpath -Xlinker $(abspath $(BUNDLE_LIB))) \
             $(or $(shell pkg-config --libs jsoncpp 2>/dev/null),-ljsoncpp) -lpcre2-8 -lutf8proc

CXXFLAGS := -std=c++20 $(OPTIMIZE) -march=$(MARCH) $(FLOAT_FLAGS) -fopenmp $(WARNINGS) -I. \
            -DCXX_INCLUDE_DIR='"$(CXX_INCLUDE_DIR)"' $(JSON_CFLAGS) $(BUNDLE_INCLUDE)

ifeq ($(DEVICE),cpu)
  CXXFLAGS += -Icpu
  LINK     := $(CXX) $(CXXFLAGS)
  LDLIBS   := -lboost_context $(TEXT_LIBS) -lpthread
else
  # The architectures of the GPUs here; without a GPU those of an A100 and an H100. make DEVICE=cuda ARCH="80 90a" chooses.
  ifneq ($(origin ARCH),command line)
    ARCH := $(USED_ARCHS)
  endif
  override ARCH := $(patsubst 90,90a,$(if $(ARCH),$(ARCH),80 90a))  # wgmma is in 90a, and 90a runs wherever 90 does
  TO_ARCH = -gencode=arch=compute_$(1)$(comma)code=sm_$(1)
  # With lines ptxas of CUDA 12.0 crashes.
  LINEINFO := $(if $(filter 12.0,$(CUDA_RELEASE)),,-lineinfo)
  NVCCFLAGS := -std=c++20 $(if $(filter 1,$(DEBUG)),-O0 -g -G,-O3 $(LINEINFO)) -I. -DCXX_INCLUDE_DIR='"$(CXX_INCLUDE_DIR)"' \
               -Wno-deprecated-gpu-targets -Xptxas=-v \
               -Xcompiler=$(subst $(space),$(comma),$(strip -fopenmp $(FLOAT_FLAGS) $(WARNINGS) $(JSON_CFLAGS) $(BUNDLE_INCLUDE)))
  CXXFLAGS  += $(call ISYSTEM,$(CUDA_HOME))
  ARCHFLAGS := $(foreach a,$(ARCH),$(call TO_ARCH,$(a)))
  # Linked by the C++ compiler that most files are compiled by: where nvcc needs an older one beside it, it would link with the
  # older one's library.
  LINK      := $(CXX) $(CXXFLAGS)
  LDLIBS    := $(CUDA_LIB) -lcublasLt -lcudart_static -ldl -lrt $(TEXT_LIBS) -lpthread
endif

# MPI and NCCL are optional: without them ranks are threads of one process. Only one file of each sees the header. The CPU device
# has an NCCL of its own.
MPI_CFLAGS := $(shell pkg-config --cflags-only-I ompi-c 2>/dev/null || mpicc --showme:compile 2>/dev/null)
MPI_LIBS   := $(shell pkg-config --libs ompi-c 2>/dev/null || mpicc --showme:link 2>/dev/null)
ifneq ($(MPI_LIBS),)
  MPI_CFLAGS += -DHAVE_MPI
  LDLIBS     += -Xlinker --as-needed $(MPI_LIBS)
endif
ifeq ($(DEVICE),cpu)
  NCCL_CFLAGS := -DHAVE_NCCL
else
  ifneq ($(wildcard $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h),)
    NCCL_CFLAGS := -DHAVE_NCCL
    LDLIBS      += -lnccl
  endif
endif
# cpp-httplib is optional, too: it is for generate --serve. In Debian and Ubuntu it is a library, and pkg-config knows the macros
# that it was compiled with, which its header must see.
HTTPLIB_FLAGS := $(wildcard $(BUNDLE)/lib/httplib.flags)
HTTPLIB_LIBS  := $(or $(shell pkg-config --libs cpp-httplib 2>/dev/null),$(if $(HTTPLIB_FLAGS),-lcpp-httplib))
ifneq ($(HTTPLIB_LIBS),)
  HTTPLIB_CFLAGS := $(or $(shell pkg-config --cflags cpp-httplib 2>/dev/null),$(shell cat $(HTTPLIB_FLAGS) /dev/null)) -DHAVE_HTTPLIB
  LDLIBS         += -Xlinker --as-needed $(HTTPLIB_LIBS)
endif
$(BUILD)/inference/http_server.o: private CXXFLAGS += $(HTTPLIB_CFLAGS)
# CLI11 is all header, runs once, and takes a third less time to compile like this.
$(BUILD)/io/command_line.o: private CXXFLAGS += -O0
$(BUILD)/parallel/comm/transport_mpi.o: CXXFLAGS += $(MPI_CFLAGS)
$(BUILD)/parallel/comm/transport_nccl.o: CXXFLAGS += $(NCCL_CFLAGS)

ifeq ($(V),1)
  Q   :=
  say := @:
else
  Q   := @
  say := @printf '  %-5s %s\n'
endif

# What the compiler makes of -march=native is part of what ccache compares: a home folder may serve several kinds of machines.
# (clang++ does not list it as g++ does; its macros tell.) And nvcc's -gencode looks to ccache like -g, for which it would compare
# the name of the working folder, too.
ifneq ($(CCACHE),)
  CACHED_CXX  := CCACHE_COMPILERCHECK='string:$(shell { $(CXX) -v; $(CXX) -march=$(MARCH) -Q --help=target || \
                     $(CXX) -march=$(MARCH) -dM -E -x c++ /dev/null; } 2>&1 | cksum)' $(CCACHE) $(CXX)
  CACHED_NVCC := CCACHE_NOHASHDIR=1 $(CCACHE) $(NVCC)
else
  CACHED_CXX  := $(CXX)
  CACHED_NVCC := $(NVCC)
endif

# ---- sources ---------------------------------------------------------------------------------------------------------
PROGRAMS := $(basename $(wildcard train_gpt.cu generate.cu))
# The floors, from the ground up, "|" between two of them: a file includes headers of its own folder and of lower floors only.
# io stands beside two of them: it includes core alone, and what lies above both may include it. dev/floors.py checks this.
FLOORS   := core | io layers | io layers/flash_attention optim | parallel/comm | parallel/tensor parallel/context parallel/pipeline | parallel/data | model | . | inference | training | planning
FOLDERS  := $(sort $(filter-out |,$(FLOORS)))
# The slowest to compile first: a build on two cores must not end with one that works alone.
SLOWEST  := $(wildcard layers/flash_attention/*.cu io/command_line.cu training/checkpoint.cu io/tokenizer_json.cu optim/adafactor.cu model/*.cu)
SOURCES  := $(patsubst ./%,%,$(wildcard $(FOLDERS:%=%/*.cu)))
LIBRARY  := $(filter-out $(PROGRAMS:%=%.cu),$(SLOWEST) $(filter-out $(SLOWEST),$(SOURCES)))
TESTS    := $(wildcard test/test_*.cu) test/main.cu test/reference.cu
DEV      := $(basename $(wildcard dev/*.cu))
# The library that writes what a GPU does (make profile) needs CUPTI, which most CUDA toolkits bring.
CUPTI := $(if $(filter cuda,$(DEVICE)),$(firstword $(wildcard $(CUDA_HOME)/extras/CUPTI/include/cupti.h $(CUDA_HOME)/include/cupti.h \
    $(BUNDLE)/cupti/include/cupti.h)))
PROFILE_LIBRARY := $(if $(CUPTI),$(BUILD)/dev/libprofile.so)
# Programs that only the tests run: kernels with mistakes, for the detectors of the CPU device; ranks, for mpirun.
TEST_PROGRAMS := $(if $(filter cpu,$(DEVICE)),wrong_kernels) comm_check
# Tests that launch no kernel, test/test_NAME.cu: they run under the sanitizers, and strict mode changes nothing for them.
HOST_TESTS := files json safetensors log plot tokenizer tokenizer_parts dataset schedule paged_cache scheduler cache_report \
    pipeline_schedules
HOST_INFERENCE := page_pool paged_cache scheduler cache_report timeline
HOST_PIPELINE := table validity schedules zero_bubble search dual_pipe stashing simulator
# Tests that `make test` does not repeat in strict mode: those; those that start programs in the modes they want; cpu_bf16, which
# calls the arithmetic itself; and statistics.
ONCE := $(HOST_TESTS) cpu_rewrite cpu_strict cpu_bf16 sampling_distribution

LIBRARY_OBJECTS := $(LIBRARY:%.cu=$(BUILD)/%.o)
ifeq ($(DEVICE),cpu)
  LIBRARY_OBJECTS += $(patsubst %.cpp,$(BUILD)/%.o,$(filter-out cpu/rewrite.cpp cpu/count_bytes.cpp,$(wildcard cpu/*.cpp)))
endif

.PHONY: all programs tests test account count gpu-choices gpu-window test-ranks test-readme debug dev bench-cpu bench-inference bench profile gpu-check gpu-bundle sanitize spills compiles fuzz format format-check house-check docs flags doctor help clean force $(PROGRAMS)
all: $(PROGRAMS)
programs: $(PROGRAMS:%=$(BUILD)/%)
tests: $(BUILD)/run_tests $(TEST_PROGRAMS:%=$(BUILD)/%) dev
dev: $(DEV:%=$(BUILD)/%) $(PROFILE_LIBRARY)

# ./train_gpt is the program that was built last, for whichever device; debug builds stay in their own folder.
$(PROGRAMS): %: $(BUILD)/%
ifeq ($(filter 1,$(DEBUG))$(SANITIZE),)
	@ln -sfn $< $@
endif

# With FILES, only those are compiled for the debugger, and PROGRAM takes the rest as it is: seconds instead of minutes, and
# what lies before the breakpoint runs at full speed.
PROGRAM ?= train_gpt
DEBUG_FOLDER := build/$(DEVICE)-debug
debug:
ifeq ($(FILES),)
	@$(MAKE) DEVICE=$(DEVICE) DEBUG=1 programs
else
	@$(MAKE) DEVICE=$(DEVICE) $(BUILD)/$(PROGRAM).o $(BUILD)/libllm.a
	@$(MAKE) DEVICE=$(DEVICE) DEBUG=1 $(FILES:%.cu=$(DEBUG_FOLDER)/%.o)
	@mkdir -p $(dir $(DEBUG_FOLDER)/$(PROGRAM))
	$(say) LINK $(DEBUG_FOLDER)/$(PROGRAM)
	$(Q)$(LINK) $(FILES:%.cu=$(DEBUG_FOLDER)/%.o) $(filter-out $(FILES:%.cu=$(BUILD)/%.o),$(BUILD)/$(PROGRAM).o) \
	    $(BUILD)/libllm.a $(LDLIBS) -o $(DEBUG_FOLDER)/$(PROGRAM)
endif
	@echo "gdb -x cpu/cuda.gdb --args $(DEBUG_FOLDER)/$(PROGRAM)"

# ---- objects ---------------------------------------------------------------------------------------------------------
# Objects are made again when the flags change: $(BUILD)/flags holds those of the last build, without the tests that are in LIGHT:
# a new test is no reason to compile all the rest.
FLAGS_NOW = $(subst ','\'',$(CXX) $(CXXFLAGS) $(MPI_CFLAGS) $(NCCL_CFLAGS) $(HTTPLIB_CFLAGS) $(filter-out test/%,$(LIGHT)) $(LIGHT_FLAGS) $(EMULATED) $(EMULATED_FLAGS) $(LAYERS) $(LAYERS_FLAGS) $(WIDE_FLAGS) $(CORES) $(CORES_FLAGS) $(TILES) $(TILES_FLAGS) $(PCH) $(PCH_product) $(PCH_test) $(NVCC) $(NVCCFLAGS) $(ARCHFLAGS) $(UNFUSED) $(UNFUSED_FLAGS))
$(BUILD)/flags: force
	@mkdir -p $(BUILD)
	@printf '%s\n' '$(FLAGS_NOW)' | cmp -s - $@ || printf '%s\n' '$(FLAGS_NOW)' > $@

light_flags  = $(if $(filter $(LIGHT),$*),$(LIGHT_FLAGS)) $(if $(filter $(EMULATED),$*),$(EMULATED_FLAGS)) \
               $(if $(filter $(LAYERS),$*),$(LAYERS_FLAGS)) $(if $(filter $(CORES),$*),$(CORES_FLAGS)) \
               $(if $(filter $(TILES),$*),$(TILES_FLAGS))
depend       = -MD -MP -MT $@ -MF $(basename $(@:.gch=)).d

# Precompiled headers: what every file of the product includes, and what every test does, is read once instead of in each. A
# file still has to include what it uses (dev/includes.py looks), and make PCH= does without.
PCH         ?= 1
PCH_std     := algorithm chrono deque filesystem fstream functional memory mutex numeric optional set sstream thread
PCH_product := core/core.h $(PCH_std)
PCH_test    := test/test.h $(PCH_std)
PCH_device  := device.h algorithm map memory mutex vector  # what the files of the CPU device include
NO_PCH      := test/main  # which defines what Catch2's header looks at
pch_of       = $(if $(PCH),$(if $(filter $(NO_PCH),$(1)),,$(BUILD)/pch/$(if $(filter test/test_% test/reference,$(1)),test,product).h))
include_pch  = $(patsubst %,-include %,$(call pch_of,$*))
$(foreach file,$(SOURCES:%.cu=%) $(DEV) $(TESTS:%.cu=%) $(TEST_PROGRAMS:%=test/%),\
    $(eval $(BUILD)/$(file).o $(BUILD)/read/$(file): $(addsuffix .gch,$(call pch_of,$(file)))))

$(BUILD)/pch/%.h.gch: $(BUILD)/flags
	$(say) CXX $(@:.gch=)
	@mkdir -p $(@D)
	@printf '#include <%s>\n' $(PCH_$*) > $(@:.gch=)
	$(Q)$(CACHED_CXX) $(CXXFLAGS) $(depend) -x c++-header -c $(@:.gch=) -o $@

# Adam's update runs on the host, too (--offload), and gives the same bits there: nvcc would otherwise round some products and
# sums once that g++ rounds twice. The kernels wait for memory. (A test compares them with a kernel of its own.)
UNFUSED       := $(BUILD)/optim/adam.o $(BUILD)/optim/adamw.o $(BUILD)/test/test_optimizers.o
UNFUSED_FLAGS := -fmad=false
$(UNFUSED): private NVCCFLAGS += $(UNFUSED_FLAGS)

# The page of generate --serve, as a string for C++.
$(BUILD)/inference/server.o: $(BUILD)/inference/page.inc
$(BUILD)/inference/server.o: private CXXFLAGS += -I$(BUILD)
$(BUILD)/inference/page.inc: inference/page.html
	@mkdir -p $(@D)
	@{ printf 'R"page('; cat $<; printf ')page"\n'; } > $@

ifeq ($(DEVICE),cpu)
build/rewrite: cpu/rewrite.cpp
	$(say) CXX $<
	$(Q)mkdir -p build && $(CXX) -std=c++20 -O1 $(WARNINGS) $< -o $@

.PRECIOUS: $(BUILD)/%.cpp  # kept, to be read when a message names a line of it
$(BUILD)/%.cpp: %.cu build/rewrite
	@mkdir -p $(@D)
	$(Q)build/rewrite $< > $@

$(BUILD)/%.o: $(BUILD)/%.cpp $(BUILD)/flags
	$(say) CXX $*.cu
	$(Q)$(CACHED_CXX) $(CXXFLAGS) $(light_flags) $(include_pch) -iquote $(dir $*.cu) $(depend) -c $< -o $@

# In debug builds, too: nobody steps through it, and everybody waits for it.
$(BUILD)/cpu/sgemm.o $(BUILD)/cpu/bf16_dots.o $(BUILD)/cpu/bf16_tiles.o: private CXXFLAGS += -O3 -fno-sanitize=all
$(BUILD)/cpu/cublas_lt_multiply.o: private CXXFLAGS += $(WIDE_FLAGS)

DEVICE_PCH := $(if $(PCH),$(BUILD)/pch/device.h)
$(patsubst %.cpp,$(BUILD)/%.o,$(filter-out cpu/rewrite.cpp,$(wildcard cpu/*.cpp))): $(DEVICE_PCH:=.gch)
$(BUILD)/cpu/%.o: cpu/%.cpp $(BUILD)/flags
	$(say) CXX $<
	@mkdir -p $(@D)
	$(Q)$(CACHED_CXX) $(CXXFLAGS) $(DEVICE_PCH:%=-include %) $(depend) -c $< -o $@
else
# What ptxas reports of each kernel, its registers and what it spills, goes to X.ptxas (make spills); the rest to the terminal,
# but for $(2).
report  = 2> $(1) || failed=1; grep -vE '^ptxas info *: ([0-9]+ bytes gmem|Compiling|Function prop|Used|Compile time$(2))|bytes stack frame' \
          $(1) >&2; [ -z "$$failed" ]
$(BUILD)/%.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)if grep -qE '__global__|<<<|\.cuh"' $<; then \
	    $(if $(Q),printf '  NVCC  %s\n' $<;,set -x;) \
	    $(CACHED_NVCC) $(NVCCFLAGS) $(ARCHFLAGS) -MD -MP -MT $@ -MF $(@:.o=.d) -c $< -o $@ $(call report,$(@:.o=.ptxas)); \
	else \
	    $(if $(Q),printf '  CXX   %s\n' $<;,set -x;) $(CACHED_CXX) $(CXXFLAGS) $(light_flags) $(include_pch) $(depend) -x c++ -c $< -o $@; \
	fi

# The kernels of a file alone, without host code: a third of the time. Those of the tests and of dev/ only have to compile.
# (-c says nothing to nvcc beside -cubin; without it ccache takes the command for one that links, and keeps nothing.)
with_kernels = $(shell grep -lE '__global__|<<<|\.cuh"' $(1))
unoptimized  = $(if $(filter test/% dev/%,$(1)),-Xcicc=-O0 -Xptxas=-O0)
# Unoptimized wgmma wait for each other, of which ptxas informs in thousands of lines.
serialized   = $(if $(filter test/% dev/%,$(1)),|\(C75[0-9]+\))
define kernels_alone
$(BUILD)/sm_$(1)/%.ptxas: %.cu $(BUILD)/flags
	$(say) PTXAS '$$< for sm_$(1)'
	@mkdir -p $$(@D)
	$(Q)$(CACHED_NVCC) $(NVCCFLAGS) $$(call unoptimized,$$*) $(call TO_ARCH,$(1)) -MD -MP -MT $$@ -MF $$(@:.ptxas=.d) -cubin -c $$< -o $$(@:.ptxas=.cubin) \
	    $$(call report,$$@,$$(call serialized,$$*))
endef
$(foreach a,$(sort 75 80 90a $(ARCH)),$(eval $(call kernels_alone,$(a))))

# No kernel of the product spills registers, on an A100 and on an H100. For that of the two which this build is not for, only
# kernels are compiled. (Hopper's own are for no other GPU.)
WITH_KERNELS := $(call with_kernels,$(LIBRARY))
kernels_of    = $(if $(filter 90a,$(1)),$(WITH_KERNELS),$(filter-out layers/hopper% layers/flash_attention/hopper%,$(WITH_KERNELS)))
spills: $(BUILD)/libllm.a $(foreach a,$(filter-out $(ARCH),80 90a),$(patsubst %.cu,$(BUILD)/sm_$(a)/%.ptxas,$(call kernels_of,$(a))))
	@dev/spills.py $(BUILD)

# Do the tests and dev/ compile for a GPU? Of files with kernels only those are compiled, and the others are only read. (Whether
# all can be linked, and what their host code does, is seen on the CPU.) And Hopper's instructions for an A100, where they stop
# the kernel, and an A100's for a T4, where others stand for them.
CHECKED      := $(TESTS) $(DEV:%=%.cu) $(TEST_PROGRAMS:%=test/%.cu)
CHECKED_CUDA := $(call with_kernels,$(CHECKED))
compiles: $(PROFILE_LIBRARY) $(CHECKED_CUDA:%.cu=$(BUILD)/sm_$(lastword $(ARCH))/%.ptxas) \
          $(patsubst %.cu,$(BUILD)/read/%,$(filter-out $(CHECKED_CUDA),$(CHECKED))) $(BUILD)/sm_80/test/test_ptx_hopper.ptxas \
          $(BUILD)/sm_75/test/test_ptx.ptxas
$(BUILD)/read/%: %.cu $(BUILD)/flags
	$(say) READ $<
	@mkdir -p $(@D)
	$(Q)$(CXX) $(CXXFLAGS) $(include_pch) -MD -MP -MT $@ -MF $@.d -x c++ -fsyntax-only $< && touch $@
endif

$(BUILD)/libllm.a: $(LIBRARY_OBJECTS)
	$(say) AR $@
	$(Q)rm -f $@ && ar rcs $@ $^

$(PROGRAMS:%=$(BUILD)/%) $(DEV:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/%.o $(BUILD)/libllm.a
	$(say) LINK $@
	$(Q)$(LINK) $^ $(LDLIBS) -o $@

CUPTI_FOLDER = $(patsubst %/include/cupti.h,%,$(CUPTI))
CUPTI_LIB    = $(abspath $(firstword $(wildcard $(CUPTI_FOLDER)/lib64 $(CUPTI_FOLDER)/lib)))
$(BUILD)/dev/libprofile.so: dev/profile_cupti.cpp $(BUILD)/flags
	$(say) CXX $<
	@mkdir -p $(@D)
	$(Q)$(CXX) -std=c++20 -O2 $(WARNINGS) -fPIC -shared $(call ISYSTEM,$(CUPTI_FOLDER)) $(call ISYSTEM,$(CUDA_HOME)) $< \
	    -L$(CUPTI_LIB) -Wl,-rpath,$(CUPTI_LIB) -lcupti -o $@

$(TEST_PROGRAMS:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/test/%.o $(BUILD)/libllm.a
	$(say) LINK $@
	$(Q)$(LINK) $^ $(LDLIBS) -o $@

# Catch2 version 2 is all header; version 3 is a library.
catch2_library = $(shell $(CXX) -x c++ $(BUNDLE_INCLUDE) -E -include catch2/catch_all.hpp /dev/null >/dev/null 2>&1 && echo -lCatch2)
$(BUILD)/run_tests: $(TESTS:%.cu=$(BUILD)/%.o) $(BUILD)/libllm.a
	$(say) LINK $@
	$(Q)$(LINK) $^ $(catch2_library) $(LDLIBS) -o $@
# What they test is compiled with the sanitizers, and stands first: of an inline function that others have, too, the linker takes
# the first. The tests, Catch2 and the CPU device are those of the other build.
HOST_TEST_OBJECTS := $(HOST_TESTS:%=build/cpu/test/test_%.o) build/cpu/test/main.o
$(BUILD)/run_host_tests: $(filter $(addprefix $(BUILD)/,core/% io/% optim/schedule.o $(HOST_INFERENCE:%=inference/%.o) \
        $(HOST_PIPELINE:%=parallel/pipeline/%.o)),$(filter-out %/command_line.o,$(LIBRARY_OBJECTS))) \
    $(HOST_TEST_OBJECTS) build/cpu/libllm.a
	$(say) LINK $@
	$(Q)$(LINK) $^ $(catch2_library) $(LDLIBS) -o $@

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---- tests -----------------------------------------------------------------------------------------------------------
test: tests programs dev
# The debugger session of doc/debugging.md is replayed in a program of its own (dev/readme_commands.py).
ifeq ($(DEVICE),cpu)
	@$(MAKE) DEVICE=cpu debug FILES=dev/reduce.cu PROGRAM=dev/reduce > /dev/null
endif
	@test/run.sh $(BUILD) $(ONCE)

# All combinations of ranks with everything else, as processes under mpirun; make test runs a part of them as threads.
test-ranks: tests programs
	@env -u CUDA_CPU_STRICT OMP_NUM_THREADS=1 LLM_TEST_RANKS=1 $(BUILD)/run_tests "[ranks]" -d yes

# Every command of README.md, CONTRIBUTING.md, doc/, cpu/README.md and dev/README.md, in a copy of this folder; make test runs the
# quick ones.
test-readme:
	@$(MAKE) DEVICE=cpu programs tests
	@dev/readme_commands.py '$(ONLY)'

# Address and undefined-behaviour sanitizers. Only over code without kernels: the address sanitizer cannot follow the fibers
# that kernels run on. (For kernels there is strict mode, whose guard pages and NaNs find the same mistakes.)
sanitize:
ifneq ($(SANITIZE),)
	@$(MAKE) $(BUILD)/run_host_tests
	@UBSAN_OPTIONS=print_stacktrace=1 $(BUILD)/run_host_tests
else
	@$(MAKE) DEVICE=cpu $(HOST_TEST_OBJECTS) build/cpu/libllm.a
	@$(MAKE) DEVICE=cpu SANITIZE=address,undefined sanitize
endif

# Each reader of foreign files against FUZZ_SECONDS of libFuzzer's inputs. What it finds interesting stays in build/fuzz/corpus
# and is where the next run starts; an input that breaks a reader is left in build/fuzz/, and the reader's name with it as an
# argument repeats it. Only io/ is instrumented; what it needs of core/ comes from libllm.a.
CLANGXX      ?= clang++
FUZZ_SECONDS ?= 20
FUZZERS      := $(patsubst test/%.cpp,%,$(wildcard test/fuzz_*.cpp))
FUZZ_FLAGS   := -std=c++20 -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all -Wall -Wextra -I. -Icpu $(JSON_CFLAGS) $(BUNDLE_INCLUDE)
FUZZ_READERS := $(patsubst %.cu,build/fuzz/%.o,$(wildcard io/*.cu))
fuzz:
	@mkdir -p build/fuzz
	@echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' > build/fuzz/probe.cpp
	@if ! $(CLANGXX) -fsanitize=fuzzer build/fuzz/probe.cpp -o build/fuzz/probe 2>/dev/null; then \
	    echo "fuzz: skipped, it needs $(CLANGXX) with libFuzzer (Debian, Ubuntu: apt install clang libclang-rt-dev)"; \
	else \
	    $(MAKE) DEVICE=cpu $(FUZZERS:%=build/fuzz/%) && test/fuzz.sh $(FUZZ_SECONDS) $(FUZZERS); \
	fi
build/fuzz/%.o: %.cu
	$(say) CLANG $<
	@mkdir -p $(@D)
	$(Q)$(CLANGXX) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link,address,undefined $(depend) -x c++ -c $< -o $@
build/fuzz/fuzz_%: test/fuzz_%.cpp $(FUZZ_READERS) $(BUILD)/libllm.a
	$(say) CLANG $<
	$(Q)$(CLANGXX) $(FUZZ_FLAGS) -fsanitize=fuzzer,address,undefined $^ $(LDLIBS) -lgomp -o $@
-include $(shell find build/fuzz -name '*.d' 2>/dev/null)

# ---- the account of a step, of which dev/ACCOUNT.md keeps GPT-2's on an H100 -------------------------------------------------
account:
	@$(MAKE) DEVICE=cpu build/cpu/train_gpt
	@build/cpu/train_gpt --account --model gpt2 --dtype bf16 --batch 64 --seq 1024 --sample 0 --attention hopper --device-spec h100 \
	    --out build/account
	@cp build/account/account.md dev/ACCOUNT.md && cp build/account/account.png doc/account.png

# ---- a GPU's choices: tests with its packs, tiles and blocks (layers/chunk.cuh), and with as many multiprocessors -----------
# Files with kernels, and tests that look into them, once more; the rest is that of the normal build.
CHOOSING       = $(patsubst %.cu,%.o,$(shell grep -lE '__global__|<<<|\.cuh"' $(LIBRARY)))
CHOOSING_TESTS = $(patsubst %.cu,%.o,$(shell grep -l '\.cuh"' $(TESTS)))
CHOSEN         = $(addprefix build/cpu-gpu-choices/,$(CHOOSING) $(CHOOSING_TESTS))
gpu-choices:
	@$(MAKE) -s DEVICE=cpu tests
	@$(MAKE) -s DEVICE=cpu GPU_CHOICES=1 $(CHOSEN)
	$(say) LINK build/cpu-gpu-choices/run_tests
	$(Q)$(LINK) -fsanitize=alignment $(CHOSEN) $(addprefix build/cpu/,$(filter-out $(CHOOSING_TESTS),$(TESTS:%.cu=%.o))) \
	    build/cpu/libllm.a $(catch2_library) $(LDLIBS) -o build/cpu-gpu-choices/run_tests
	@test/gpu_choices.sh build/cpu-gpu-choices $(ONCE)

# ---- counting: are the bytes that launchers state those that the kernels touch, with a GPU's choices? ------------------------
# In train_gpt, and in the tests that have the tag [counted], of which those that look into kernels are compiled again.
COUNTED       = $(addprefix build/cpu-count/,core/launches.o core/error.o cpu/hopper_copies.o $(CHOOSING))
COUNTED_TESTS = test/main.o test/reference.o $(patsubst %.cu,%.o,$(shell grep -l '\[counted\]' test/test_*.cu))
COUNTED_AGAIN = $(addprefix build/cpu-count/,$(filter $(CHOOSING_TESTS),$(COUNTED_TESTS)))
COUNTED_ONCE  = $(addprefix build/cpu/,$(filter-out $(CHOOSING_TESTS),$(COUNTED_TESTS)))
LINK_COUNTED  = $(CXX) -fopenmp build/cpu-count/counted.o build/cpu-count/cpu/count_bytes.o
build/cpu-count/test/%.o build/cpu-count/cpu/count_bytes.o: private CXXFLAGS += -fno-sanitize=all -O2
count:
	@$(MAKE) -s DEVICE=cpu build/cpu/train_gpt.o $(COUNTED_ONCE) build/cpu/libllm.a
	@$(MAKE) -s DEVICE=cpu COUNT=1 $(COUNTED) build/cpu-count/cpu/count_bytes.o $(COUNTED_AGAIN)
	$(say) LINK 'build/cpu-count/train_gpt and run_tests'
	$(Q)ld -r --wrap=memcpy --wrap=memmove --wrap=memset $(COUNTED) -o build/cpu-count/counted.o
	$(Q)$(LINK_COUNTED) build/cpu/train_gpt.o build/cpu/libllm.a $(LDLIBS) -o build/cpu-count/train_gpt
	$(Q)$(LINK_COUNTED) $(COUNTED_ONCE) $(COUNTED_AGAIN) build/cpu/libllm.a $(catch2_library) $(LDLIBS) -o build/cpu-count/run_tests
	@test/count_bytes.sh build/cpu-count/train_gpt build/cpu-count/run_tests

# ---- the GPU harness: a GPU is available only for minutes at a time, so each of these is one command --------------------
# Their variables are described at the top of each script, and may be given to make: make bench MODELS=gpt2 SEQS=1024.
gpu-check:
	@MAKE='$(MAKE)' dev/gpu_check.sh $(BUILD)
# bash has a variable SECONDS of its own.
gpu-window: SECONDS ?= 540
gpu-window:
	@env -u SECONDS MAKE='$(MAKE)' WINDOW_SECONDS=$(SECONDS) dev/gpu_window.sh $(BUILD)
gpu-bundle:
	@CXX='$(CXX)' CUDA_HOME='$(CUDA_HOME)' dev/gpu_bundle.sh $(BUNDLE)
bench: programs dev
	@NVCC='$(NVCC)' dev/bench.sh $(BUILD)
profile: programs dev
	@dev/profile.sh $(BUILD)

# ---- tools -----------------------------------------------------------------------------------------------------------
bench-cpu:
	@$(MAKE) DEVICE=cpu build/cpu/dev/bench_cpu build/cpu/dev/bench_report
	@$(if $(LLM_PYTHON)$(LLMC),dev/bench_cpu.py build/cpu,build/cpu/dev/bench_cpu)

bench-inference:
	@$(MAKE) DEVICE=cpu build/cpu/dev/bench_inference
	@$(if $(LLM_PYTHON),dev/bench_inference.py build/cpu,build/cpu/dev/bench_inference)

# For clangd (editors: go to definition, errors while typing), which reads our .cu files as C++ against the headers of the
# CPU device. All of CUDA C++ that is not C++ is the kernel launch: clangd cannot look inside that one statement, and .clangd
# tells it not to complain. (In its CUDA mode it would understand the launch, and nothing else: it wants NVIDIA's headers of
# a version that it knows, and calls our device functions host functions.)
compile_commands.json: force
	@{ echo '['; \
	   for file in $(wildcard test/*.cu) $(LIBRARY) $(PROGRAMS:%=%.cu) $(DEV:%=%.cu) $(wildcard cpu/*.cpp); do \
	       printf '%s{"directory": "%s", "file": "%s", "arguments": [' "$$separator" '$(CURDIR)' $$file; \
	       for argument in clang++ -x c++ -std=c++20 -march=native -fopenmp -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-function -I. -Icpu $(JSON_CFLAGS) -c; do \
	           printf '"%s", ' "$$argument"; \
	       done; \
	       printf '"%s"]}' $$file; \
	       separator=$$(printf ',\n.'); separator=$${separator%.}; \
	   done; \
	   printf '\n]\n'; } > $@.part && mv $@.part $@
	@echo "$@ is there: clangd reads it by itself"

# What README.md and doc/ quote of the programs: doc/flags.md, plans, reports, the debugger's sessions (each has a program).
docs:
	@$(MAKE) DEVICE=cpu programs dev build/cpu/wrong_kernels
	@$(MAKE) DEVICE=cpu debug FILES=dev/reduce.cu PROGRAM=dev/reduce
	@$(MAKE) DEVICE=cpu debug FILES=layers/cross_entropy.cu
	@dev/docs.py write
# Of them doc/flags.md, doc/floors.svg and doc/pipelines.png alone, which need no debug build: after a new flag or name.
flags:
	@$(MAKE) DEVICE=cpu programs
	@dev/docs.py flags

CLANG_FORMAT ?= clang-format
FORMATTED    := $(filter-out io/font.h io/unicode_tables.h test/test_cpu_rewrite.cu,\
    $(patsubst ./%,%,$(wildcard $(foreach folder,$(FOLDERS) cpu test dev,$(addprefix $(folder)/*.,cu cuh h cpp)))))
format:
	@$(CLANG_FORMAT) -i $(FORMATTED)
# clang-format leaves comments as they are: their length is checked here. (With `make format format-check` once it has written.)
format-check: | $(filter format,$(MAKECMDGOALS))
	@$(CLANG_FORMAT) --dry-run --Werror $(FORMATTED)
	@! LC_ALL=C.UTF-8 grep -nE '^.{121}' $(FORMATTED) | cut -c1-100 | sed 's/$$/... is longer than 120 columns/' | grep .
# What can be said of the sources without compiling them: who includes whom, and how long functions are.
house-check:
	@dev/floors.py
	@dev/includes.py
	@dev/long_functions.py

doctor:
ifneq ($(DEVICE),cpu)
	@BUILDS_FOR='DEVICE=$(DEVICE): $(REASON)' $(MAKE) DEVICE=cpu doctor
else
	@export BUILDS_FOR="$${BUILDS_FOR:-DEVICE=$(DEVICE): $(REASON)}"; \
	    CXX='$(CXX)' CXXFLAGS='$(filter-out -D%,$(CXXFLAGS))' NVCC='$(NVCC)' CUDA_HOME='$(CUDA_HOME)' \
	    CLANGXX='$(CLANGXX)' dev/doctor.sh
endif

clean:
	rm -rf build $(PROGRAMS) compile_commands.json

help:
	@echo 'make                        build ./train_gpt and ./generate; says for which device and why'
	@echo 'make test                   build and run all tests; on the CPU the kernel tests also in strict mode, three seeds'
	@echo 'make tests                  build the tests only; then: build/cpu/run_tests --list-tests, "[rmsnorm]", ...'
	@echo 'make debug                  build without optimisation into build/<device>-debug, for gdb; in seconds with'
	@echo '                            FILES="layers/rmsnorm.cu ..." (only those files) and PROGRAM=train_gpt, dev/rmsnorm, ...'
	@echo 'make dev                    build the ladders and benchmarks of dev/ into build/<device>/dev'
	@echo 'make gpu-check              all checks of correctness that need a GPU: the tests, then compute-sanitizer; one table'
	@echo 'make bench                  kernels and training against the limits of the device, PyTorch and llm.c: tables, PNGs'
	@echo 'make profile                where the time of a training step goes, by kernel: a table and a PNG'
	@echo 'make gpu-bundle             collect what a GPU machine without a network may lack (gpu-bundle/)'
	@echo 'make bench-inference        time GPT-2 124M that writes text on the CPU, one sequence and many; with LLM_PYTHON=python3'
	@echo '                            alternating with transformers, and with LLAMA_CPP=path/to/llama.cpp with its server'
	@echo 'make gpu-window             on a machine that has a GPU for ten minutes: smoke tests, training, profile, kernels, sanitizers'
	@echo 'make bench-cpu              time one training step of GPT-2 124M on the CPU; with LLM_PYTHON=python3 LLMC=path/to/llm.c'
	@echo '                            that and the default job, float32 and bf16, alternating with PyTorch and llm.c'
	@echo 'make test-ranks             all combinations of many ranks, as processes under mpirun'
	@echo 'make test-readme            run every command of the pages (*.md); ONLY="float_formats": those with this in them'
	@echo 'make account                write dev/ACCOUNT.md: where the time of a step of GPT-2 124M goes on an H100, predicted'
	@echo 'make count                  compare the bytes that launchers state with those that their kernels touch'
	@echo 'make gpu-choices            run the tests of kernels, models, ranks and training with the packs, tiles, blocks and'
	@echo '                            multiprocessors of GPUs, and find addresses that a GPU refuses'
	@echo 'make sanitize               run the tests of code without kernels under the address and undefined-behaviour sanitizers'
	@echo 'make fuzz                   fuzz the file readers for FUZZ_SECONDS=20 each (needs clang)'
	@echo 'make DEVICE=cuda spills     no kernel of the product spills registers, on sm_80 and sm_90a (needs nvcc, but no GPU)'
	@echo 'make DEVICE=cuda compiles   do the tests and dev/ compile for a GPU? They are not linked (needs nvcc, but no GPU)'
	@echo 'make doctor                 what this machine has, what will work, and what to install for the rest'
	@echo 'make compile_commands.json  for clangd'
	@echo 'make format                 clang-format every source; make format-check only looks'
	@echo 'make house-check            no file includes upwards (FLOORS in the Makefile) or lacks a standard header, no function is'
	@echo '                            longer than a screen'
	@echo 'make docs                   write what README.md and doc/ quote of the programs'
	@echo 'make flags                  write doc/flags.md and the pictures of folders and pipelines alone, which takes less time'
	@echo 'make clean                  remove all that was built'
	@echo
	@echo 'DEVICE=cpu|cuda             the device to build for; now $(DEVICE): $(REASON)'
	@echo 'DEBUG=1                     as make debug'
	@echo 'V=1                         show the commands'
	@echo 'ARCH="80 90a"               GPU architectures; the default is those of the GPUs here'
	@echo 'MARCH=native                CPU architecture (-march); without FMA, as x86-64 and -v2 are, a token computed alone and in'
	@echo '                            its prompt may differ in the last bits'
	@echo 'SANITIZE=address,undefined  sanitizers, in a build folder of their own'
	@echo 'CXX=g++ NVCC= CUDA_HOME=    the compilers'
	@echo 'CCACHE=                     without ccache; PCH= without precompiled headers'

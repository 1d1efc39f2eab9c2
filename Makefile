# llm.cu
#
#   make                  build for the GPU if this machine can, otherwise for the CPU; `make DEVICE=cpu|cuda` forces it
#   make help             all targets
#
# One rule turns X.cu into an object, per device:
#   cuda:  nvcc compiles it.
#   cpu:   cpu/rewrite turns kernel<<<...>>>(...) into a function call, then g++ compiles it against cpu/cuda_runtime.h.

MAKEFLAGS += --no-builtin-rules --no-print-directory
.SUFFIXES:
.DELETE_ON_ERROR:
.SECONDARY:

CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda) $(wildcard /opt/cuda) /usr/local/cuda)
NVCC      ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard $(CUDA_HOME)/bin/nvcc))
CXX       := g++
JOBS      := $(shell nproc 2>/dev/null || echo 1)

# ---- which device, and why -------------------------------------------------------------------------------------------
ifeq ($(origin DEVICE),undefined)
  ifeq ($(NVCC),)
    DEVICE := cpu
    REASON := no nvcc found
  else ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c GPU),0)
    DEVICE := cpu
    REASON := nvcc is here, but no working GPU (nvidia-smi lists none)
  else
    DEVICE := cuda
    REASON := found nvcc and $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
  endif
else
  REASON := DEVICE=$(DEVICE) was asked for
endif
ifeq ($(filter cpu cuda,$(DEVICE)),)
  $(error DEVICE=$(DEVICE): use DEVICE=cpu or DEVICE=cuda)
endif

# ---- flags -----------------------------------------------------------------------------------------------------------
# No -ffast-math: results must not depend on how the compiler groups a sum. These two only say that nobody reads errno or
# floating-point traps; contraction is off so that a kernel gives the same bits inlined, vectorised or stepped through.
FLOAT_FLAGS := -fno-math-errno -fno-trapping-math -ffp-contract=off
WARNINGS    := -Wall -Wextra -Wno-unknown-pragmas
DEBUG       ?= 0
ifeq ($(DEBUG),1)
  BUILD    := build/$(DEVICE)-debug
  OPTIMIZE := -O0 -g
else
  BUILD    := build/$(DEVICE)
  OPTIMIZE := -O3
endif
# SANITIZE=address,undefined builds into a folder of its own.
ifneq ($(SANITIZE),)
  comma := ,
  BUILD := $(BUILD)-$(subst $(comma),-,$(SANITIZE))
  OPTIMIZE := -O1 -g -fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=all
endif
MARCH ?= native

CXX_INCLUDE_DIR = $(patsubst %/vector,%,$(firstword $(filter %/vector,$(shell echo '\#include <vector>' | $(CXX) -x c++ -M - 2>/dev/null))))
DEFINES := -DCXX_INCLUDE_DIR='"$(CXX_INCLUDE_DIR)"'
CXXFLAGS := -std=c++20 $(OPTIMIZE) -march=$(MARCH) $(FLOAT_FLAGS) -fopenmp $(WARNINGS) -I. $(DEFINES)

ifeq ($(DEVICE),cpu)
  CXXFLAGS += -Icpu
  LDLIBS   := -fopenmp -lopenblas -lboost_context -lpthread
else
  # The GPU's own architecture if there is one, otherwise sm_80 and sm_90a. Override: make DEVICE=cuda ARCH="80 90a"
  DETECTED := $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | head -n 1))
  ARCH     ?= $(if $(DETECTED),$(if $(filter 90,$(DETECTED)),90a,$(DETECTED)),80 90a)
  NVFLAGS  := -std=c++20 $(if $(filter 1,$(DEBUG)),-O0 -g -G,-O3 -lineinfo) -I. $(foreach a,$(ARCH),-gencode=arch=compute_$(a),code=sm_$(a)) \
              -Xcompiler=-fopenmp,-Wall,-Wextra,-Wno-unknown-pragmas -Wno-deprecated-gpu-targets
  CXXFLAGS += -isystem $(CUDA_HOME)/include
  LDLIBS   := -L$(CUDA_HOME)/lib64 -Xlinker=-rpath,$(CUDA_HOME)/lib64 -lcublasLt -Xcompiler=-fopenmp -lpthread
endif

ifeq ($(V),1)
  Q :=
  say = @:
else
  Q := @
  say = @printf '  %-8s %s\n'
endif

# ---- sources ---------------------------------------------------------------------------------------------------------
LIBRARY  := $(wildcard core/*.cu layers/*.cu optim/*.cu io/*.cu) llm.cu huggingface.cu train_options.cu
PROGRAMS := train_gpt
TESTS    := $(wildcard test/test_*.cu) test/reference.cu
CPU_DEVICE := $(filter-out cpu/rewrite.cpp,$(wildcard cpu/*.cpp))

LIBRARY_OBJECTS := $(LIBRARY:%.cu=$(BUILD)/%.o)
ifeq ($(DEVICE),cpu)
  LIBRARY_OBJECTS += $(CPU_DEVICE:%.cpp=$(BUILD)/%.o)
endif
TEST_OBJECTS := $(TESTS:%.cu=$(BUILD)/%.o) $(BUILD)/test/main.o

.PHONY: all help doctor test debug clean bench-cpu compile_commands.json announce sanitize fuzz format strict
all: announce
	@$(MAKE) -j$(JOBS) DEVICE=$(DEVICE) programs
	@ln -sf $(BUILD)/train_gpt train_gpt
programs: $(PROGRAMS:%=$(BUILD)/%)

announce:
	@echo "Building for $(DEVICE): $(REASON)."

# ---- objects ---------------------------------------------------------------------------------------------------------
# Objects are made again when the flags change: $(BUILD)/flags holds those of the last build.
FLAGS_NOW := $(CXX) $(CXXFLAGS) $(NVFLAGS)
$(BUILD)/flags: force
	@mkdir -p $(BUILD)
	@printf '%s\n' '$(subst ','\'',$(FLAGS_NOW))' | cmp -s - $@ || printf '%s\n' '$(subst ','\'',$(FLAGS_NOW))' > $@
.PHONY: force
force:

ifeq ($(DEVICE),cpu)
build/rewrite: cpu/rewrite.cpp
	$(say) CXX $<
	$(Q)mkdir -p build && $(CXX) -std=c++20 -O1 $(WARNINGS) $< -o $@

$(BUILD)/%.cpp: %.cu build/rewrite
	$(Q)mkdir -p $(@D) && build/rewrite $< > $@

$(BUILD)/%.o: $(BUILD)/%.cpp $(BUILD)/flags
	$(say) CPU $*.cu
	$(Q)$(CXX) $(CXXFLAGS) -iquote $(dir $*.cu) -MMD -MP -MT $@ -MF $(@:.o=.d) -c $< -o $@

$(BUILD)/cpu/%.o: cpu/%.cpp $(BUILD)/flags
	$(say) CXX $<
	$(Q)mkdir -p $(@D) && $(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@
else
# A file without kernels needs no device compiler: nvcc -x c++ hands it to g++ alone, which is several times faster.
has_kernels = $(shell grep -lE '__global__|<<<' $(1))
$(BUILD)/%.o: %.cu $(BUILD)/flags
	$(say) NVCC $<
	$(Q)mkdir -p $(@D) && if grep -qE '__global__|<<<|kernel\.cuh' $<; then \
	    $(NVCC) $(NVFLAGS) -Xcompiler=$(subst $() ,$(comma_),$(FLOAT_FLAGS)) -MMD -MP -c $< -o $@; \
	else $(CXX) $(CXXFLAGS) -x c++ -MMD -MP -c $< -o $@; fi
endif
empty :=
comma_ := ,

$(BUILD)/libllm.a: $(LIBRARY_OBJECTS)
	$(say) AR $@
	$(Q)rm -f $@ && ar rcs $@ $^

LINK := $(if $(filter cuda,$(DEVICE)),$(NVCC) $(NVFLAGS),$(CXX) $(CXXFLAGS))
$(PROGRAMS:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/%.o $(BUILD)/libllm.a
	$(say) LINK $@
	$(Q)$(LINK) $^ $(LDLIBS) -o $@

$(BUILD)/run_tests: $(TEST_OBJECTS) $(BUILD)/libllm.a
	$(say) LINK $@
	$(Q)$(LINK) $^ $(LDLIBS) -o $@

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

clean:
	rm -rf build train_gpt compile_commands.json

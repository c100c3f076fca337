# make              builds ./train_gpt and ./test_gpt, for CUDA when nvcc and a GPU are there, else for the CPU
# make quickstart   installs what is missing, builds, makes a small corpus, trains on it for about two minutes
# make test         builds and runs the tests
# make check        layers, sizes, tests
#
# Variables: BACKEND=cpu|cuda (auto)  DEBUG=1 (no optimisation, assertions)  SANITIZE=1 (address and undefined behaviour)
#            WERROR=1  CPU_ARCH=native (x86-64-v3 for a build that travels)  CUDA_ARCHS="80 90a"

CXX ?= g++
NVCC ?= $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
HAVE_GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
ifeq ($(origin BACKEND), undefined)
  BACKEND := $(if $(and $(NVCC),$(HAVE_GPU)),cuda,cpu)
endif
ifeq ($(filter $(BACKEND),cpu cuda),)
  $(error BACKEND=$(BACKEND): must be cpu or cuda)
endif
ifeq ($(BACKEND)$(NVCC),cuda)
  $(error BACKEND=cuda needs nvcc, which is not on PATH nor in /usr/local/cuda/bin; install the CUDA toolkit, or use BACKEND=cpu)
endif

VARIANT := $(BACKEND)$(if $(DEBUG),-debug)$(if $(SANITIZE),-sanitize)
BUILD := build/$(VARIANT)
CPU_ARCH ?= native
CUDA_ARCHS ?= 80 90a

# The compiler's hardening (see SECURITY.md); _FORTIFY_SOURCE wants optimisation, so not in DEBUG builds.
HARDEN := -fstack-protector-strong -fstack-clash-protection -fcf-protection -fPIE -ftrivial-auto-var-init=zero
ifeq ($(DEBUG)$(SANITIZE),)
  HARDEN += -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3
endif
WARN := -Wall -Wextra -Wshadow -Wno-missing-field-initializers -Wno-unused-function $(if $(WERROR),-Werror)
OPT := $(if $(DEBUG),-O1 -g3,-O3 -g) -march=$(CPU_ARCH) -fno-math-errno -fno-trapping-math
SAN := $(if $(SANITIZE),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
comma := ,
SAN := $(if $(SANITIZE),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
CXXFLAGS += -std=gnu++17 -fopenmp -pthread $(OPT) $(WARN) $(HARDEN) $(SAN) $(if $(DEBUG),-DDEBUG)
LDFLAGS += -pie -Wl,-z,relro,-z,now,-z,noexecstack $(SAN)
LDLIBS += -lm

CPU_OBJS := $(patsubst kernels/cpu/%.cpp,$(BUILD)/kernels_cpu_%.o,$(wildcard kernels/cpu/*.cpp))
OBJS := $(CPU_OBJS) $(BUILD)/device_$(BACKEND).o
ifeq ($(BACKEND),cuda)
  CUDA_HOME ?= $(abspath $(dir $(NVCC))/..)
  CXXFLAGS += -DUSE_CUDA -isystem $(CUDA_HOME)/include
  # SASS for each architecture named, and PTX of the first for GPUs that come later
  GENCODE := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_$(firstword $(CUDA_ARCHS)),code=compute_$(firstword $(CUDA_ARCHS))
  NVCCFLAGS += -std=c++17 -O3 --threads 2 $(GENCODE) -DUSE_CUDA -Xcompiler "-fPIE -Wall -Wextra -Wno-unused-function -Wno-missing-field-initializers" $(if $(WERROR),-Werror all-warnings) $(if $(DEBUG),-lineinfo)
  OBJS += $(patsubst kernels/cuda/%.cu,$(BUILD)/kernels_cuda_%.o,$(wildcard kernels/cuda/*.cu))
  LDFLAGS += -L$(CUDA_HOME)/lib64 -L$(CUDA_HOME)/lib64/stubs
  LDLIBS += -lcublasLt -lcudart -lcuda
endif

all: $(BUILD)/train_gpt $(BUILD)/test_gpt
	@ln -f $(BUILD)/train_gpt train_gpt && ln -f $(BUILD)/test_gpt test_gpt
	@echo "built ./train_gpt and ./test_gpt ($(VARIANT))"

$(BUILD):
	@mkdir -p $@
	@echo "backend $(BACKEND): $(if $(NVCC),nvcc $(NVCC),no nvcc), $(if $(HAVE_GPU),$(HAVE_GPU),no GPU); compiler $(CXX)"

DEPFLAGS = -MMD -MP
$(BUILD)/%.o: %.cu Makefile | $(BUILD)
	$(CXX) $(CXXFLAGS) $(DEPFLAGS) -x c++ -c $< -o $@
$(BUILD)/device_%.o: runtime/device_%.cpp Makefile | $(BUILD)
	$(CXX) $(CXXFLAGS) $(DEPFLAGS) -c $< -o $@
$(BUILD)/kernels_cpu_%.o: kernels/cpu/%.cpp Makefile | $(BUILD)
	$(CXX) $(CXXFLAGS) $(DEPFLAGS) -c $< -o $@
$(BUILD)/kernels_cuda_%.o: kernels/cuda/%.cu Makefile | $(BUILD)
	$(NVCC) $(NVCCFLAGS) $(DEPFLAGS) -c $< -o $@

$(BUILD)/train_gpt $(BUILD)/test_gpt: $(BUILD)/%: $(BUILD)/%.o $(OBJS)
	$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

test: all
	./test_gpt

clean:
	rm -rf build train_gpt test_gpt

-include $(wildcard $(BUILD)/*.d)
.PHONY: all test clean quickstart check

# make                builds ./train_gpt and ./test_gpt: for CUDA when nvcc and a fitting GPU are there, else for the CPU
# make quickstart     installs what is missing, builds, makes a small corpus, trains on it for two to eight minutes, samples
# make test           installs what is missing, builds, runs all tests: "N passed, N failed, N skipped"
# make check          include layers, sizes, the README's truth, hardening and imports of the binary
# make sanitize       the tests under AddressSanitizer and UndefinedBehaviorSanitizer (CPU backend)
# make ranks-debug    the tests of several ranks with the checks of a DEBUG build
# make teeth          planted bugs, each of which the tests must notice
# make emulate        the memory-bound CUDA kernels, thread by thread on the CPU, under the sanitizers (needs no GPU, no CUDA)
# make fuzz           every parser under libFuzzer, FUZZ_SECONDS=30 each (needs clang)
# make nightly        kills before each call of a save, and 1,200 at random instants, each resumed: hours (needs strace)
# make sbom           writes which libraries the binary links, and their versions (CycloneDX), into the build folder
# make install-deps   installs what the targets above need (Debian, Ubuntu)
# make clean
#
# Variables: BACKEND=cpu|cuda (auto)   DEBUG=1 (little optimisation, assertions)   SANITIZE=1   WERROR=1
#            CPU_ARCH=native (x86-64-v3 for a binary that travels)   CUDA_ARCHS="80 90a"   BUILD=build/<variant>
#            SUITES="c cli" picks among those of scripts/test.sh, for test and sanitize
#            HOST_OPT=-O0 compiles all but the kernels without optimisation, in a fifth of the time
#            V=1 shows the whole commands   CXX, NVCC; CXXFLAGS, NVCCFLAGS, LDFLAGS, LDLIBS are added to ours

# ---------------------------------------------------------------------------------------------------------------------
# What is there

CXX ?= g++
NVCC ?= $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
ifeq ($(origin BACKEND), undefined)
  # "NVIDIA H200, 9.0", or nothing; the bf16 kernels need compute capability 8.0
  GPU := $(shell nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
  GPU_FITS := $(filter-out 1.% 2.% 3.% 4.% 5.% 6.% 7.%,$(filter %.0 %.1 %.2 %.3 %.4 %.5 %.6 %.7 %.8 %.9,$(lastword $(GPU))))
  BACKEND := $(if $(and $(NVCC),$(GPU_FITS)),cuda,cpu)
  GPU_FOUND := $(if $(GPU),GPU $(GPU)$(if $(GPU_FITS),, (too old: 8.0 is needed)),no GPU)
else
  GPU_FOUND := backend chosen by hand
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
FUZZ_SECONDS ?= 30

# ---------------------------------------------------------------------------------------------------------------------
# Flags

comma := ,
# The flag, if the compiler knows it: older compilers and other processors lack some of the hardening.
knows = $(shell $(CXX) -Werror $(1) -x c++ -c /dev/null -o /dev/null 2>/dev/null && echo '$(1)')
# The hardening of SECURITY.md. _FORTIFY_SOURCE wants optimisation and gets in the sanitizers' way; level 3 needs gcc 12.
HARDEN := -fstack-protector-strong -fPIE \
  $(call knows,-fstack-clash-protection) $(call knows,-fcf-protection) $(call knows,-ftrivial-auto-var-init=zero)
ifeq ($(DEBUG)$(SANITIZE),)
  HARDEN += -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$(if $(call knows,-ftrivial-auto-var-init=zero),3,2)
endif
# Large arrays belong on the heap: the stack may be 256 KiB, and the environment, which lies on it too, takes half of that.
FRAMES := $(if $(SANITIZE),,-Wframe-larger-than=16384 -Wvla)
WARN := -Wall -Wextra -Wshadow -Wno-missing-field-initializers -Wno-unused-function $(FRAMES) $(if $(WERROR),-Werror)
OPT := $(if $(DEBUG),-O1 -g3 -DDEBUG,-O3 -g) -march=$(CPU_ARCH) -fno-math-errno -fno-trapping-math
# No exceptions, no run-time type information: the host code is C in C++ clothes and needs no C++ library.
# The prefix map keeps the folder's name out of the binary, so that two builds of one commit are equal.
LANG_FLAGS := -std=gnu++17 -fopenmp -pthread -fno-exceptions -fno-rtti -fno-threadsafe-statics -ffile-prefix-map='$(CURDIR)'=.
SAN := $(if $(SANITIZE),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
COMPILE = $(CXX) $(LANG_FLAGS) $(OPT) $(WARN) $(HARDEN) $(SAN) $(CUDA_HOST_FLAGS) $(CXXFLAGS)
LINK = $(CXX) -fopenmp -pthread $(SAN) -pie -Wl,-z,relro,-z,now,-z,noexecstack -Wl,--as-needed $(CUDA_LINK_FLAGS) $(LDFLAGS)
LIBS = $(OPENMP_LIB) $(COMM_LIBS) $(AIO_LIBS) $(CUDA_LIBS) -lm $(LDLIBS)

# OpenMP's library goes in statically: only then does it see the shorter spin that device_cpu.cpp sets (a waiting thread of
# another process' core costs a small model most of its speed).
ifeq ($(SANITIZE)$(findstring clang,$(CXX)),)
  OPENMP_LIB := $(wildcard $(shell $(CXX) -print-file-name=libgomp.a 2>/dev/null))
endif

# Ranks: MPI carries those of the CPU backend, NCCL those of the CUDA backend; without it, one rank. COMM=self asks for that.
MPICC ?= $(shell command -v mpicc 2>/dev/null)
ifeq ($(origin COMM), undefined)
  ifeq ($(BACKEND),cpu)
    COMM := $(if $(MPICC),mpi,self)
  else
    COMM := $(if $(wildcard /usr/include/nccl.h $(dir $(NVCC))../include/nccl.h),nccl,self)
  endif
endif
ifeq ($(COMM),mpi)
  COMM_FLAGS := -DOMPI_SKIP_MPICXX=1 $(patsubst -I%,-isystem %,$(shell $(MPICC) --showme:compile))
  COMM_LIBS := $(shell $(MPICC) --showme:link)
else ifeq ($(COMM),nccl)
  COMM_LIBS := -lnccl
endif

# Offload to files goes through io_uring where liburing is there, linked in statically if it can be, so that the binary travels;
# without it, through threads. AIO=threads asks for that.
ifeq ($(origin AIO), undefined)
  AIO := $(if $(wildcard /usr/include/liburing.h /usr/local/include/liburing.h),uring,threads)
endif
ifeq ($(AIO),uring)
  AIO_FLAGS := -DAIO_URING
  AIO_LIBS := $(or $(filter /%,$(shell $(CXX) -print-file-name=liburing.a 2>/dev/null)),-luring)
endif

CPU_OBJS := $(patsubst kernels/cpu/%.cpp,$(BUILD)/kernels_cpu_%.o,$(sort $(wildcard kernels/cpu/*.cpp)))
OBJS := $(CPU_OBJS) $(BUILD)/device_$(BACKEND).o $(BUILD)/comm_$(COMM).o $(BUILD)/aio_$(AIO).o $(BUILD)/watch.o $(BUILD)/flight.o
ifeq ($(BACKEND),cuda)
  CUDA_HOME ?= $(abspath $(dir $(realpath $(NVCC)))/..)
  # a toolkit that the distribution put below /usr is on the compiler's paths already, and must not come first there
  CUDA_HOST_FLAGS := -DUSE_CUDA $(if $(filter-out /usr,$(CUDA_HOME)),-isystem $(CUDA_HOME)/include)
  CUDA_LINK_FLAGS := $(if $(filter-out /usr,$(CUDA_HOME)),-L$(CUDA_HOME)/lib64 -Wl$(comma)-rpath$(comma)$(CUDA_HOME)/lib64)
  CUDA_LIBS := -lcublasLt -lcudart
  # machine code for each architecture named, and PTX of the first for GPUs that come later
  GENCODE := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a)$(comma)code=sm_$(a)) \
    -gencode arch=compute_$(firstword $(CUDA_ARCHS))$(comma)code=compute_$(firstword $(CUDA_ARCHS))
  space := $(subst ,, )
  COMPILE_CUDA = $(NVCC) -std=c++17 -O3 --threads 2 $(GENCODE) -DUSE_CUDA $(if $(filter 90a,$(CUDA_ARCHS)),-DBUILD_SM_90A) $(if $(WERROR),-Werror all-warnings) -lineinfo \
    -Xcompiler $(subst $(space),$(comma),$(strip -g -fno-exceptions -Wall -Wextra -Wno-unused-function -Wno-missing-field-initializers $(HARDEN))) $(NVCCFLAGS)
  OBJS += $(patsubst kernels/cuda/%.cu,$(BUILD)/kernels_cuda_%.o,$(sort $(wildcard kernels/cuda/*.cu)))
endif

# The optimizers' twins agree bit for bit, however they are compiled: no product is fused with a sum.
UNFUSED := -ffp-contract=off
UNFUSED_CUDA := --fmad=false

# ---------------------------------------------------------------------------------------------------------------------
# Rules

all: binaries
	@ln -sf $(BUILD)/train_gpt train_gpt && ln -sf $(BUILD)/test_gpt test_gpt
	@echo "built ./train_gpt and ./test_gpt ($(VARIANT))"

binaries: $(BUILD)/train_gpt $(BUILD)/test_gpt

# Says what was found, once for a build folder.
$(BUILD):
	@command -v $(firstword $(CXX)) >/dev/null || { echo "error: no $(firstword $(CXX)) here; run this, then make again:  sudo apt-get install -y g++   (or: make install-deps)" >&2; exit 1; }
	@mkdir -p $@
	@echo "found: compiler $(CXX) $$($(CXX) -dumpfullversion 2>/dev/null), $(if $(NVCC),nvcc $(NVCC),no nvcc), $(GPU_FOUND); building for $(BACKEND), ranks by $(COMM), files by $(AIO), in $@"

# These files change only when their text does, so that other flags or other files rebuild what they concern.
$(BUILD)/compile.flags: FORCE | $(BUILD)
	@printf '%s\n' "$(subst ",,$(COMPILE) host $(HOST_OPT) optimizer $(UNFUSED))" | cmp -s - $@ || printf '%s\n' "$(subst ",,$(COMPILE) host $(HOST_OPT) optimizer $(UNFUSED))" >$@
$(BUILD)/cuda.flags: FORCE | $(BUILD)
	@printf '%s\n' "$(subst ",,$(COMPILE_CUDA) optimizer $(UNFUSED_CUDA))" | cmp -s - $@ || printf '%s\n' "$(subst ",,$(COMPILE_CUDA) optimizer $(UNFUSED_CUDA))" >$@
$(BUILD)/link.flags: FORCE | $(BUILD)
	@printf '%s\n' "$(subst ",,$(LINK) $(OBJS) $(LIBS))" | cmp -s - $@ || printf '%s\n' "$(subst ",,$(LINK) $(OBJS) $(LIBS))" >$@

DEPFLAGS = -MMD -MP
# Shows a word and the file, or with V=1 the command.
run = $(if $(V),$(2),@echo "  $(1) $@" && $(2))
# Sanitized host code is compiled with little optimisation, which halves the time that this takes; the kernels are not.
HOST_OPT := $(if $(SANITIZE),-O1)
$(BUILD)/%.o: %.cu $(BUILD)/compile.flags
	$(call run,compile,$(COMPILE) $(HOST_OPT) $(DEPFLAGS) -x c++ -c $< -o $@)
$(BUILD)/test_gpt.o: private COMPILE += -Wno-frame-larger-than
$(BUILD)/comm_$(COMM).o: private COMPILE += $(COMM_FLAGS)
$(BUILD)/%.o: runtime/%.cpp $(BUILD)/compile.flags
	$(call run,compile,$(COMPILE) $(DEPFLAGS) -c $< -o $@)
$(BUILD)/aio_$(AIO).o: runtime/aio.cpp $(BUILD)/compile.flags
	$(call run,compile,$(COMPILE) $(AIO_FLAGS) $(DEPFLAGS) -c $< -o $@)
$(BUILD)/kernels_cpu_%.o: kernels/cpu/%.cpp $(BUILD)/compile.flags
	$(call run,compile,$(COMPILE) $(DEPFLAGS) -c $< -o $@)
$(BUILD)/kernels_cpu_optimizer.o: private COMPILE += $(UNFUSED)
$(BUILD)/kernels_cuda_optimizer.o: private COMPILE_CUDA += $(UNFUSED_CUDA)
$(BUILD)/kernels_cuda_%.o: kernels/cuda/%.cu $(BUILD)/cuda.flags
	$(call run,nvcc   ,$(COMPILE_CUDA) $(DEPFLAGS) -c $< -o $@)

$(BUILD)/train_gpt $(BUILD)/test_gpt: $(BUILD)/%: $(BUILD)/%.o $(OBJS) $(BUILD)/link.flags
	$(call run,link   ,$(LINK) $(filter %.o,$^) -o $@ $(LIBS))

$(BUILD)/bench_aio: tests/bench_aio.cpp $(BUILD)/aio_$(AIO).o
	$(call run,link   ,$(COMPILE) $(DEPFLAGS) $< $(BUILD)/aio_$(AIO).o -o $@ $(AIO_LIBS))

$(BUILD)/bench_save: tests/bench_save.cpp $(OBJS) $(BUILD)/link.flags
	$(call run,link   ,$(COMPILE) $(DEPFLAGS) $(CUDA_LINK_FLAGS) $< $(OBJS) -o $@ $(LIBS))

quickstart:
	@scripts/quickstart.sh

test:
	@scripts/setup.sh g++ python3 mpicc
	@$(MAKE) --no-print-directory all
	@scripts/test.sh $(BUILD) $(SUITES)

# The tests of several ranks in a DEBUG build, which hides results until they are waited for and looks for missing waits.
ranks-debug:
	@$(MAKE) --no-print-directory DEBUG=1 BACKEND=cpu binaries
	@scripts/test.sh build/cpu-debug ranks

# Plants bugs one at a time, and demands that the tests notice. BUGS="1 9" picks some.
teeth:
	@python3 tests/teeth.py $(BUGS)

sanitize: SUITES := c cli
sanitize:
	@scripts/setup.sh g++ python3
	@$(MAKE) --no-print-directory BACKEND=cpu SANITIZE=1 SUITES="$(SUITES)" sanitize-run
# The sanitized build's OpenMP is the system's, which is told here what device_cpu.cpp tells ours: threads that wait shall not spin.
sanitize-run: binaries
	@GOMP_SPINCOUNT=1000 scripts/test.sh $(BUILD) $(SUITES)

emulate:
	@scripts/setup.sh g++ python3
	@tests/emulate_cuda.sh

check: binaries
	@scripts/setup.sh g++ python3 readelf
	@scripts/check_layers.sh
	@python3 tests/teeth.py places
	@scripts/check_hardening.sh $(BUILD)/train_gpt
	@scripts/check_readme.py $(BUILD)/train_gpt
	@scripts/sizes.sh

fuzz:
	@scripts/setup.sh g++ clang
	@scripts/fuzz.sh $(FUZZ_SECONDS)

nightly: binaries
	@scripts/setup.sh g++ mpicc strace
	@scripts/checkpoint_crash.sh $(BUILD)/train_gpt all
	@scripts/checkpoint_crash.sh $(BUILD)/train_gpt long

sbom: binaries
	@scripts/setup.sh python3 readelf
	@CXX="$(CXX)" MPICC="$(MPICC)" scripts/sbom.py $(BUILD)/train_gpt >$(BUILD)/sbom.json && echo "wrote $(BUILD)/sbom.json"

install-deps:
	@scripts/setup.sh g++ python3 clang readelf strace unshare locales liburing

clean:
	rm -rf build train_gpt test_gpt

-include $(wildcard $(BUILD)/*.d)
.PHONY: emulate ranks-debug teeth all binaries quickstart test sanitize sanitize-run check nightly sbom fuzz install-deps clean FORCE
# A recipe that failed half-way leaves no target that looks finished.
.DELETE_ON_ERROR:

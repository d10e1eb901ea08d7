"""Builds and runs the fuzz targets of the C core: by libFuzzer where clang is, by fuzz/c/standalone.c elsewhere."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from fuzz import ROOT

C_TARGETS = ("pool", "map", "block_table", "hash_input")
SOURCES = {"pool": ["pool_model.c"]}
FLAGS = [
    *("-std=gnu11", "-O1", "-g", "-DKVP_DEBUG", "-Wall", "-Wextra", "-Werror", "-Icsrc"),
    *("-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-Wl,--wrap=calloc,--wrap=realloc"),
]
MAX_LEN = 768

# A sanitizer that is loaded into this interpreter is not the one of the programs.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "ASAN_OPTIONS")}


@functools.cache
def has_libfuzzer() -> bool:
    """Whether clang is here with its fuzzer; FUZZ_STANDALONE=1 does without."""
    if os.environ.get("FUZZ_STANDALONE") == "1" or shutil.which("clang") is None:
        return False
    program = "int LLVMFuzzerTestOneInput(const char *data, unsigned long size) { return data == 0 && size == 1; }"
    command = ["clang", "-fsanitize=fuzzer,address,undefined", "-x", "c", "-", "-o", os.devnull]
    return (
        subprocess.run(command, input=program.encode(), capture_output=True, check=False, env=ENVIRONMENT).returncode
        == 0
    )


def build(name: str) -> Path:
    """The target's program in build/fuzz; always built anew, in seconds."""
    uses_libfuzzer = has_libfuzzer()
    program = ROOT / "build" / "fuzz" / (f"{name}-libfuzzer" if uses_libfuzzer else name)
    program.parent.mkdir(parents=True, exist_ok=True)
    own = [f"fuzz_{name}.c", "failing_memory.c", *SOURCES.get(name, [])]
    if uses_libfuzzer:
        compiler = ["clang", "-fsanitize=fuzzer,address,undefined"]
    else:
        compiler = [os.environ.get("CC", "cc"), "-fsanitize=address,undefined"]
        own.append("standalone.c")
    sources = [f"fuzz/c/{source}" for source in own]
    core = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.c"))
    subprocess.run([*compiler, *FLAGS, *sources, *core, "-o", str(program)], cwd=ROOT, check=True, env=ENVIRONMENT)
    return program


def run(name: str, minutes: float, seed: int, crashes: Path) -> bool:
    """True if nothing was found; what was is in the folder."""
    program = build(name)
    crashes.mkdir(parents=True, exist_ok=True)
    seeds = ROOT / "fuzz" / "corpus" / f"c_{name}"
    if has_libfuzzer():
        grown = ROOT / "build" / "fuzz" / "corpus" / name
        grown.mkdir(parents=True, exist_ok=True)
        limits = [f"-max_total_time={max(1, round(60 * minutes))}", f"-seed={seed % 2**31 + 1}", f"-max_len={MAX_LEN}"]
        options = [*limits, "-timeout=20", "-print_final_stats=1", f"-artifact_prefix={crashes.resolve()}/{name}-"]
        command = [str(program), *options, str(grown), *([str(seeds)] if seeds.is_dir() else [])]
    else:
        files = sorted(str(path) for path in seeds.glob("*"))
        command = [str(program), f"-seconds={60 * minutes:.1f}", f"-seed={seed}", f"-max_len={MAX_LEN}", *files]
    result = subprocess.run(
        command, cwd=crashes, capture_output=True, text=True, errors="replace", check=False, env=ENVIRONMENT
    )
    output = result.stdout + result.stderr
    found = re.search(r"number_of_executed_units: (\d+)|(\d+) executions", output)
    executions = next(filter(None, found.groups())) if found else "?"
    by = "libFuzzer" if has_libfuzzer() else "standalone"
    print(f"c_{name}: {executions} executions ({by}), seed {seed}", flush=True)
    if result.returncode != 0:
        print(output[-4000:])
        print(f"FINDING: c_{name}; its input is in {crashes}, replay: {program} FILE", flush=True)
    return result.returncode == 0

"""The copy of the tree that mutants are built in, and how to rebuild as little of it as a fault needs.

A fault in the C core compiles its file and links the extension modules again, one in a .pyx file compiles that module:
seconds, where a build of everything takes minutes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-fno-strict-aliasing"]
MACROS = ["-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION", '-DKVPOOL_BUILD_FLAGS="mutant"']
NAMES = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt")
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))


class BuildError(Exception):
    """A mutant that does not compile."""


class Tree:
    """A copy of the checkout in ``build/mutants/tree``.

    Args:
        with_objects: whether object files are needed, for faults in native code; without them the checkout's extension
            modules are used as they are.
    """

    def __init__(self, with_objects: bool) -> None:
        self.root = CHECKOUT / "build" / "mutants" / "tree"
        self._touched: dict[Path, Path] = {}
        self._copy()
        if with_objects or not list((self.root / "kvpool" / "native").glob(f"pool*{SUFFIX}")):
            self._build()

    def _copy(self) -> None:
        if self.root.exists():
            shutil.rmtree(self.root)
        files = [*CHECKOUT.glob("setup*.py"), *(CHECKOUT / name for name in NAMES)]
        for folder in ("kvpool", "csrc", "tests"):
            files += [file for file in (CHECKOUT / folder).rglob("*") if file.is_file()]
        # What is built is taken over with its times, so that only what is out of date is built again.
        built = CHECKOUT / "build"
        files += [file for pattern in ("temp*", "cython") for file in built.glob(f"{pattern}/**/*") if file.is_file()]
        for file in files:
            if "__pycache__" not in file.parts and file.exists():
                target = self.root / file.relative_to(CHECKOUT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)

    def _build(self) -> None:
        self._run([sys.executable, "setup.py", "build_ext", "--inplace"])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")

    # ---- faults ----

    def keep(self, path: Path) -> None:
        """Keeps a file as it is now, for ``restore``."""
        if path not in self._touched:
            kept = self.root.parent / "kept" / path.relative_to(self.root)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, kept)
            self._touched[path] = kept

    def restore(self) -> None:
        """All files as they were when they were kept."""
        for path, kept in self._touched.items():
            shutil.copy2(kept, path)
            os.utime(path)  # newer than what Python has compiled of the mutant
        self._touched.clear()

    def rebuild(self, paths: list[str]) -> None:
        """Compiles what depends on the native files. BuildError if it does not compile."""
        core = [path for path in paths if path.startswith("csrc/")]
        if any(path.endswith(".h") for path in core):
            core = [str(file.relative_to(self.root)) for file in (self.root / "csrc").glob("*.c")]
        for path in core:
            self._compile(self.root / path, self._object_of(Path(path)))
        modules = [path for path in paths if path.endswith(".pyx")]
        for path in modules:
            source = self.root / "build" / "cython" / Path(path).with_suffix(".c")
            self.keep(source)
            self._run([sys.executable, "-m", "cython", "-3", path, "-o", str(source)])
            self._compile(source, self._object_of(source.relative_to(self.root)))
        if core:
            library = next(self.root.glob("build/temp*/libkvp.a"))
            self.keep(library)
            library.unlink()
            self._run(["ar", "rcs", str(library), *map(str, self.root.glob("build/temp*/csrc/*.o"))])
            modules = [str(file.relative_to(self.root)) for file in (self.root / "kvpool").rglob("*.pyx")]
        for path in modules:
            self._link(Path(path))

    def _object_of(self, source: Path) -> Path:
        return next(self.root.glob(f"build/temp*/{source.with_suffix('.o')}"))

    def _compile(self, source: Path, target: Path) -> None:
        import numpy

        includes = ["-Icsrc", "-Ikvpool", f"-I{numpy.get_include()}", f"-I{sysconfig.get_path('include')}"]
        self.keep(target)
        compiler = shlex.split(str(sysconfig.get_config_var("CC")))
        self._run([*compiler, "-fPIC", *FLAGS, *MACROS, *includes, "-c", str(source), "-o", str(target)])

    def _link(self, module: Path) -> None:
        target = self.root / module.with_name(module.stem + SUFFIX)
        self.keep(target)
        target.unlink()  # a process may have it mapped
        linker = shlex.split(str(sysconfig.get_config_var("LDSHARED")))
        built = self._object_of(Path("build/cython") / module.with_suffix(".c"))
        library = next(self.root.glob("build/temp*/libkvp.a"))
        self._run([*linker, str(built), str(library), "-o", str(target)])

"""Whether the vLLM at hand is one that kvpool was checked against: fingerprints of all that the levels rely on.

``known.json`` holds, for each version, what is recorded of every target of the levels and of all that those rely on in
turn (``closure``), and a hash of every source file that has one of these names. A file of known bytes needs no look at
its names; in another one (patched by a distributor, say) each must still be what it was. What another plugin has put in
the place of one of them in this process is found as well (``live``).

    python -m kvpool.integrations.vllm.drift --record                       the installed vLLM
    python -m kvpool.integrations.vllm.drift --record --sources FOLDER --version 0.33.0    an unpacked wheel

record a version; do it after vLLM's own tests have passed with kvpool in its place.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.integrations.vllm import live
from kvpool.integrations.vllm import sources as source
from kvpool.integrations.vllm.closure import closure_of
from kvpool.integrations.vllm.members import Member, member_of
from kvpool.integrations.vllm.sources import module_of_file

KNOWN = Path(__file__).with_name("known.json")
MAX_NAMED = 8


class Version(NamedTuple):
    """What is recorded of one version.

    Attributes:
        files: hash by path below the folder of the package.
        members: by dotted name.
    """

    files: Mapping[str, str]
    members: Mapping[str, Member]

    def closure(self, targets: Iterable[str]) -> dict[str, Member]:
        """The targets and all that they rely on; a target that is not recorded is left out."""
        found: dict[str, Member] = {}
        waiting = deque(targets)
        while waiting:
            name = waiting.popleft()
            if name not in found and name in self.members:
                found[name] = self.members[name]
                waiting += found[name].relies_on
        return found


def public_version(version: str) -> str:
    """A version without its local part: builds for several devices are made from the same source."""
    return version.partition("+")[0]


def known_versions() -> dict[str, Version]:
    """What is recorded, by version."""
    return {version: _version_from(recorded) for version, recorded in _read_known().items()}


def _read_known() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return known


def _version_from(recorded: dict[str, Any]) -> Version:
    members = {name: Member.from_json(fields) for name, fields in recorded["members"].items()}
    return Version(recorded["files"], members)


def objections(version: str, targets: Sequence[str], sources: Path) -> list[str]:
    """What speaks against replacing in this process: ``differences``, and with none of them ``replaced_by_others``."""
    return differences(version, targets, sources) or replaced_by_others(version, targets)


def differences(version: str, targets: Sequence[str], sources: Path) -> list[str]:
    """What speaks against replacing: one phrase each, [] for a vLLM that kvpool knows.

    Args:
        version: of the vLLM whose sources these are.
        targets: dotted names, of the levels that are asked for.
        sources: folder that holds the package ``vllm``.
    """
    known = _read_known()
    version = public_version(version)
    if version in known:
        return list(_changes(_version_from(known[version]), targets, sources))
    nearest = max(known, key=_version_key)
    changes = list(_changes(_version_from(known[nearest]), targets, sources))
    against = f"vLLM {version} is not one that this kvpool was checked against ({', '.join(known)})"
    return [against, f"compared with {nearest}: {_listed(changes) if changes else 'no hook point differs'}"]


def replaced_by_others(version: str, targets: Iterable[str]) -> list[str]:
    """What in this process is not vLLM's own of all that the targets rely on, since some other code has put its own
    there. The version is a known one."""
    recorded = _version_from(_read_known()[public_version(version)])
    modules = [module_of_file(path) for path in recorded.files]
    return list(live.replaced(recorded.closure(targets), modules))


def _changes(recorded: Version, targets: Sequence[str], sources: Path) -> Iterator[str]:
    for target in targets:
        if target not in recorded.members:
            yield f"{target} is not recorded in {KNOWN.name}"
    unchanged: dict[Path, bool] = {}
    for name, was in recorded.closure(targets).items():
        place = source.place_of(name, sources)
        if place is not None:
            path = place.path
            if path not in unchanged:
                digest = recorded.files.get(path.relative_to(sources).as_posix())
                unchanged[path] = digest is not None and digest == source.hash_of_bytes(path.read_bytes())
            if unchanged[path]:
                continue
        now = member_of(name, sources)
        if was.exists and now.exists:
            if was.signature != now.signature:
                yield f"{name}: signature {was.signature} is now {now.signature}"
            elif was.source != now.source:
                yield f"{name}: its source has changed"
        elif was.exists or now.exists:
            yield f"{name} {'is gone' if was.exists else 'is new'}"
    source.tree_of.cache_clear()


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _listed(changes: Sequence[str]) -> str:
    more = f" and {len(changes) - MAX_NAMED} more" if len(changes) > MAX_NAMED else ""
    return "; ".join(changes[:MAX_NAMED]) + more


def describe(found: Sequence[str]) -> str:
    """Differences as one line."""
    return _listed(found)


# ---- recording ----


def record(version: str, targets: Iterable[str], sources: Path) -> int:
    """Write what these sources are into ``known.json``, in the place of what was recorded for the version. Returns the
    number of names."""
    known = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}
    members = {name: member_of(name, sources, names) for name, names in closure_of(targets, sources).items()}
    places = [source.place_of(name, sources) for name in members]
    files = {place.path for place in places if place is not None}
    known[public_version(version)] = {
        "files": {path.relative_to(sources).as_posix(): source.hash_of_bytes(path.read_bytes()) for path in files},
        "members": {name: member.to_json() for name, member in members.items()},
    }
    KNOWN.write_text(_text_of(known), encoding="utf-8")
    source.tree_of.cache_clear()
    return len(members)


def _text_of(known: dict[str, Any]) -> str:
    """JSON with a line for each file and name, all in order."""
    versions = []
    for version in sorted(known, key=_version_key):
        parts = []
        for part, entries in known[version].items():
            lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
            parts.append(f'  "{part}": {{\n{lines}\n  }}')
        versions.append(f' "{version}": {{\n' + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}\n"


def main() -> None:
    """The command of the module."""
    from kvpool.integrations.vllm import levels

    parser = argparse.ArgumentParser(prog="python -m kvpool.integrations.vllm.drift")
    parser.add_argument("--record", action="store_true", help="write known.json; without it differences are listed")
    parser.add_argument("--sources", type=Path, help="folder that holds a package vllm; default: the installed one")
    parser.add_argument("--version", help="version of these sources; default: the installed one")
    arguments = parser.parse_args()
    if (arguments.sources is None) != (arguments.version is None):
        parser.error("--sources and --version go together")
    sources = source.installed_sources() if arguments.sources is None else arguments.sources.resolve()
    version = levels.vllm_version() if arguments.version is None else arguments.version
    targets = levels.targets_of(levels.NAMES)
    if arguments.record:
        num_names = record(version, targets, sources)
        print(f"recorded {num_names} names of vLLM {public_version(version)} in {KNOWN}")
        return
    found = differences(version, targets, sources)
    print("\n".join(found) or f"vLLM {public_version(version)}: nothing differs")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()

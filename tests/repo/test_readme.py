"""The documents are true: their code runs as printed, their links lead somewhere, and the map shows every room."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# A block marked `notest` needs what no test has: a model of the reader's, other machines.
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
FENCED = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
IN_CODE = re.compile(r"`[^`]*`")


def code_blocks() -> Iterator[object]:
    for document in DOCUMENTS:
        for number, code in enumerate(CODE.findall(document.read_text(encoding="utf-8")), start=1):
            yield pytest.param(code, id=f"{document.relative_to(ROOT)}-{number}")


def headings(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    lines = FENCED.sub("", document.read_text(encoding="utf-8")).splitlines()
    titles = (line.lstrip("#").strip().lower() for line in lines if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def dead_links(document: Path) -> list[str]:
    text = IN_CODE.sub("", FENCED.sub("", document.read_text(encoding="utf-8")))
    dead = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue  # on the network: nothing here asks there
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in headings(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("code", list(code_blocks()))
def test_the_code_runs(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_shows_the_pool_and_a_scheduler() -> None:
    text = README.read_text(encoding="utf-8")
    assert CODE.findall(text)
    assert all(command in text for command in ("make demo", "make test", "make quick"))
    assert any(
        "Scheduler(" in code for code in CODE.findall((ROOT / "docs" / "library.md").read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert "test" in targets
    text = document.read_text(encoding="utf-8")
    # Several may stand behind one `make`, one space between them; a variable and its value are none.
    named = re.findall(r"(?:^|`)make((?: [a-z][a-z0-9-]*(?![\w=-]))+)", text, re.MULTILINE)
    words = {word for line in named for word in line.split()}
    assert sorted(words - targets) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_no_link_is_dead(document: Path) -> None:
    assert dead_links(document) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "one.md"
    document.write_text(
        "# The title\n[a](two.md) [b](#the-title) [c](#no-title) `[d](three.md)` [e](https://x.test/y)\n"
    )
    assert dead_links(document) == ["two.md", "#no-title"]


def test_the_readme_is_short_and_leads_to_every_document() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    for document in DOCUMENTS:
        name = str(document.relative_to(ROOT))
        assert name in (README.name, "CHANGELOG.md") or f"({name})" in text, f"no link to {name}"


ARCHITECTURE = ROOT / "docs" / "architecture.md"
PATH_IN_TEXT = re.compile(r"(?:csrc|kvpool|tests|bench|fuzz|examples|docs|requirements)/[\w./\-]*\w/?")


def paths_in(text: str) -> set[str]:
    """Paths in the text of a document, links and code alike; ``kvpool/cache/managers/`` as well as files."""
    return {path.rstrip("/") for path in PATH_IN_TEXT.findall(text.replace("\\", ""))}


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_that_is_named_exists(name: str) -> None:
    paths = paths_in((ROOT / name).read_text(encoding="utf-8"))
    assert len(paths) > 20
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_every_room_is_on_the_map() -> None:
    paths = paths_in(ARCHITECTURE.read_text(encoding="utf-8"))
    package = ROOT / "kvpool"
    rooms = {
        entry.relative_to(ROOT).as_posix()
        for entry in package.iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").is_file()
    }
    assert "kvpool/native" in rooms
    assert sorted(rooms - paths) == []


def test_the_map_answers_the_five_questions() -> None:
    """In three clicks: README, the map, the file. What the map says of a file is in the file."""
    answers = {
        "csrc/kvp_pool.c": "kvp_status_t kvp_pool_allocate(",
        "kvpool/native/block_hasher.pyx": "kvp_hash_input",
        "kvpool/cache/managers/sliding_window.py": "def get_num_skipped_tokens(",
        "kvpool/cache/managers/base.py": "def remove_skipped_blocks(",
        "kvpool/integrations/vllm/__init__.py": "def register(",
        "csrc/kvp_table_outputs.c": "kvp_table_status_t kvp_table_slots(",
    }
    assert "(docs/architecture.md)" in README.read_text(encoding="utf-8")
    first_table = ARCHITECTURE.read_text(encoding="utf-8").split("## What is where")[0]
    for path, text in answers.items():
        assert f"(../{path})" in first_table
        assert text in (ROOT / path).read_text(encoding="utf-8")

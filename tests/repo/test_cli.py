"""The command line: outputs, errors and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from typer.testing import CliRunner

import kvpool
from kvpool.cli import app
from kvpool.replay.implementations import LAYERS, IdArrayTarget, make_target

PURE_PYTHON = os.environ.get("KVPOOL_PURE_PYTHON") == "1"
FASTEST = "reference" if PURE_PYTHON else "native"
IMPLEMENTATIONS = ["reference"] if PURE_PYTHON else ["native", "reference"]
TRACES = Path(__file__).parents[3] / "shared" / "traces"
LINES = [
    {"timestamp": 0, "input_length": 520, "output_length": 10, "hash_ids": [1, 2]},
    {"timestamp": 9000, "input_length": 600, "output_length": 10, "hash_ids": [1, 3]},
]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    return request.param


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def replay(*arguments: object):
    result = invoke("replay", *arguments)
    assert result.exit_code == 0, result.stderr
    return result


def failure(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr of a command that ends with one clean line."""
    result = invoke(*arguments)
    assert result.exit_code != 0 and isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.count("\n") == 1, result.stderr
    return result.exit_code, result.stderr.strip()


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0 and result.stdout == f"kvpool {kvpool.__version__}\n"


def test_help_names_every_option():
    result = CliRunner().invoke(app, ["replay", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    options = (
        "blocks block-size trace-block-size prefill-rate tpot limit compare over json plot curve curve-blocks seed"
    )
    assert all(f"--{option}" in text for option in options.split())
    assert "had to wait" in text


def test_a_trace_is_replayed_and_shown(trace, implementation):
    result = replay(trace, "--compare", implementation)
    assert "trace.jsonl, 2 requests" in result.stdout.replace("\n", "")
    assert "300,000 blocks (default size) of 16 tokens" in result.stdout
    assert "SYNTHETIC" not in result.stdout
    rows = {cells[0]: cells[1:] for cells in table_rows(result.stdout)}
    assert rows["prompt tokens"] == ["1,120"] and rows["hit tokens"] == ["512"] and rows["hit rate"] == ["45.71%"]
    assert rows["allocated blocks"] == [str(34 + 39 - 32)]
    assert result.stderr == ""


def table_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(("│", "|"))]
    return [[cell.strip() for cell in re.split("[│|]", line)[1:-1]] for line in lines]


def test_json(trace, tmp_path, implementation):
    path = tmp_path / "out.json"
    replay(trace, "--compare", implementation, "--json", path, "--blocks", 1000, "--block-size", 32)
    document = json.loads(path.read_text())
    assert list(document) == ["trace", "requests", "block_size", "num_blocks", "implementations", "ratios"]
    assert document["trace"] == str(trace) and document["requests"] == 2
    assert (document["block_size"], document["num_blocks"], document["ratios"]) == (32, 1000, {})
    figures = document["implementations"][implementation]
    assert figures.pop("seconds") > 0 and figures.pop("ns_per_prompt_block") > 0
    assert figures == {
        "prompt_tokens": 1120,
        "hit_tokens": 512,
        "hit_rate": 512 / 1120,
        "allocated_blocks": 17 + 20 - 16,
        "evicted_blocks": 0,
        "peak_blocks_in_use": 20,
        "rejected": 0,
        "queued": 0,
        "mean_queue_ms": 0.0,
    }


def test_json_to_stdout_leaves_the_tables_to_stderr(trace):
    result = replay(trace, "--json", "-")
    assert json.loads(result.stdout)["requests"] == 2
    assert "hit rate" in result.stderr


@pytest.mark.skipif(PURE_PYTHON, reason="there is nothing to compare with in pure Python")
def test_compare(trace, tmp_path):
    result = replay("--compare", " native, reference,native", "--limit", 50, "--json", tmp_path / "out.json")
    assert "hits and block ids are the same in all" in result.stdout
    assert re.search(r"(native|reference) is \d+\.\dx faster than (native|reference)", result.stdout)
    document = json.loads((tmp_path / "out.json").read_text())
    assert list(document["implementations"]) == ["native", "reference"]
    seconds = {name: figures["seconds"] for name, figures in document["implementations"].items()}
    assert document["ratios"] == {"reference/native": pytest.approx(seconds["reference"] / seconds["native"])}


@pytest.mark.vllm
@pytest.mark.parametrize("over", LAYERS)
def test_compare_with_vllm(over):
    pytest.importorskip("vllm.v1.core.block_pool")
    result = replay("--compare", f"{IMPLEMENTATIONS[0]},vllm", "--limit", 50, "--blocks", 500, "--over", over)
    assert "hits and block ids are the same in all" in result.stdout


def test_a_difference_is_an_error(trace, monkeypatch, implementation):
    class ForgetfulTarget(IdArrayTarget):
        def _find(self, served):
            return super()._find(served)[:5]

    def make_either(name, num_blocks, block_size, over):
        target = make_target(implementation, num_blocks, block_size, over)
        if name != "vllm":
            return target
        pool = make_target("reference", num_blocks, block_size, "pool")._pool
        return ForgetfulTarget(name, pool, num_blocks, block_size)

    monkeypatch.setattr("kvpool.replay.implementations.make_target", make_either)
    code, line = failure("replay", trace, "--compare", f"{implementation},vllm")
    assert code == 1
    assert line == f"error: {implementation} and vllm differ at the request of line 2: hits of 32 and 5 blocks"


def test_by_default_the_native_pool_runs_beside_the_twin() -> None:
    document = json.loads(replay("--limit", 20, "--json", "-").stdout)
    wanted = ["reference"] if PURE_PYTHON else ["native", "reference"]
    assert list(document["implementations"]) == wanted
    assert list(document["ratios"]) == ([] if PURE_PYTHON else ["reference/native"])


def test_the_pool_alone(trace, implementation):
    documents = []
    for over in LAYERS:
        result = replay(trace, "--compare", implementation, "--over", over, "--json", "-", "--curve-blocks", 500)
        assert f"time in the {over} (s)" in result.stderr
        documents.append(json.loads(result.stdout))
        (figures,) = documents[-1]["implementations"].values()
        assert figures.pop("seconds") > 0 and figures.pop("ns_per_prompt_block") > 0
    assert documents[1].pop("over") == "pool"
    assert documents[0] == documents[1]


def test_the_synthetic_default_says_so_and_is_repeatable(tmp_path):
    documents = []
    for seed in (3, 3, 4):
        result = replay("--limit", 60, "--seed", seed, "--compare", FASTEST, "--json", tmp_path / "out.json")
        kind = "SYNTHETIC trace (built-in generator, no real traffic)"
        assert result.stdout.startswith(f"{kind}: synthetic (seed {seed}), 60 requests")
        assert "20,000 blocks (default size)" in result.stdout
        (figures,) = json.loads((tmp_path / "out.json").read_text())["implementations"].values()
        del figures["seconds"], figures["ns_per_prompt_block"]
        documents.append(figures)
    assert documents[0] == documents[1] != documents[2]
    assert documents[0]["hit_rate"] > 0.2


def test_the_default_size_grows_with_the_largest_request(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 16, "output_length": 6_400_000, "hash_ids": [1]}))
    assert "400,002 blocks (default size)" in replay(path).stdout


def test_curve(trace, tmp_path):
    result = replay(trace, "--curve-blocks", "500,20,30", "--json", tmp_path / "out.json")
    assert [row[0] for row in table_rows(result.stdout)[-3:]] == ["20", "30", "500"]
    points = json.loads((tmp_path / "out.json").read_text())["curve"]
    assert [(point["num_blocks"], point["rejected"]) for point in points] == [(20, 2), (30, 2), (500, 0)]
    assert points[2]["hit_rate"] == points[2]["belady_hit_rate"] == points[2]["unbounded_hit_rate"] == 512 / 1120
    assert points[0]["hit_rate"] == 0.0
    result = replay("--limit", 20, "--curve")
    assert len([row for row in table_rows(result.stdout) if len(row) == 5]) == 8


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(trace, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{suffix}"
    replay(trace, "--plot", path)
    assert path.stat().st_size > 5_000
    replay("--limit", 40, "--curve-blocks", "300,2000", "--plot", path)


def test_plot_without_matplotlib_says_what_to_install(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, line = failure("replay", trace, "--plot", tmp_path / "plot.png")
    assert (code, line) == (2, "error: plots need matplotlib: pip install kvpool[plot]")


def test_plot_of_an_unknown_kind(trace, tmp_path):
    pytest.importorskip("matplotlib")
    code, line = failure("replay", trace, "--plot", tmp_path / "plot.xyz")
    assert code == 2 and "plot.xyz: Format 'xyz' is not supported" in line


def test_a_bad_line_is_one_line_with_file_line_and_field(trace):
    trace.write_text(trace.read_text() + '{"timestamp": 1, "input_length": "x"}\n')
    code, line = failure("replay", trace)
    assert code == 2
    assert line == f"error: {trace}:3: field 'input_length': must be a whole number of tokens, not str"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "absent.jsonl: No such file"),
        (["--compare", "native,sglang"], "choose from native, reference, vllm"),
        (["--over", "scheduler"], "a replay runs over manager or pool, not 'scheduler'"),
        (["--compare", " ,"], "choose from native, reference, vllm"),
        (["--curve-blocks", "10,x"], "must be whole numbers separated by commas"),
        (["--curve-blocks", ""], "must be whole numbers separated by commas"),
        (["--curve-blocks", "1,10"], "sizes must be from 2"),
        (["--prefill-rate", "0"], "prefill rate must be finite and above 0, not 0.0"),
        (["--prefill-rate", "nan"], "prefill rate must be finite and above 0, not nan"),
        (["--tpot", "-1"], "time per output token must be finite and not negative, not -1.0"),
        (["--trace-block-size", "24"], "block size 16 does not divide the trace block size 24"),
        (["--json", "no/such/folder/out.json"], "its folder does not exist"),
        (["--json", "."], "is a folder"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, line = failure("replay", "--limit", 5, *arguments)
    assert code == 2 and line.startswith("error: ") and message in line


@pytest.mark.parametrize("option", ["--blocks", "--block-size", "--limit", "--trace-block-size"])
@pytest.mark.parametrize("value", ["0", "-3", "x", "1.5"])
def test_counts_must_be_positive(option, value):
    result = invoke("replay", option, value)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert invoke("replay", "--blocks", "1").exit_code == 2


def test_block_size_must_divide_the_trace_block_size(trace):
    code, line = failure("replay", trace, "--block-size", 48)
    assert (code, line) == (2, "error: block size 48 does not divide the trace block size 512")


def test_a_seed_has_no_meaning_with_a_trace(trace):
    assert failure("replay", trace, "--seed", 0)[0] == 2


@pytest.mark.parametrize("over", LAYERS)
def test_vllm_that_is_not_installed(trace, monkeypatch, over):
    for module in ("vllm.v1.core.kv_cache_manager", "vllm.v1.core.block_pool"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    code, line = failure("replay", trace, "--compare", f"{IMPLEMENTATIONS[0]},vllm", "--over", over)
    assert code == 2 and line.startswith("error: vllm ")


def test_an_interrupt_is_one_line(trace, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpool.replay.simulator.simulate", interrupt)
    assert failure("replay", trace) == (130, "interrupted")


def test_too_little_memory_is_one_line(trace, monkeypatch):
    def run_out(*arguments):
        raise MemoryError

    monkeypatch.setattr("kvpool.replay.simulator.simulate", run_out)
    code, line = failure("replay", trace)
    assert code == 1 and "not enough memory" in line


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_signal_ends_a_long_replay_cleanly():
    command = [sys.executable, "-u", "-m", "kvpool.cli", "replay", "--limit", "30000", "--curve"]
    # What runs the tests may have turned the signal off, which a child would inherit.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        try:
            assert process.stdout.readline().startswith("SYNTHETIC")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "interrupted\n")


def test_doctor():
    result = invoke("doctor")
    assert result.exit_code == 0
    assert kvpool.__version__ in result.stdout and kvpool.BACKEND in result.stdout
    facts = json.loads(invoke("doctor", "--json").stdout)
    assert set(facts) == {
        "version", "backend", "compiler", "flags", "debug", "sanitize", "native_bytes_per_block",
        "python", "platform", "numpy", "torch", "vllm", "gpu",
    }  # fmt: skip
    assert facts["version"] == kvpool.__version__ and facts["backend"] == kvpool.BACKEND and facts["numpy"]
    if not PURE_PYTHON:
        assert facts["compiler"] and 0 < facts["native_bytes_per_block"] <= 96


def test_doctor_imports_neither_torch_nor_vllm():
    code = "import sys, kvpool.cli.doctor as d; d.gather_facts(); print({'torch', 'vllm'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_the_command_line_starts_without_what_its_commands_need():
    code = (
        "import sys, kvpool; before = set(sys.modules); import kvpool.cli; added = set(sys.modules) - before;"
        "print(added & {'numpy', 'rich.table', 'rich.progress', 'matplotlib', 'kvpool.replay', 'kvpool.cli.doctor'})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_the_conversation_trace_takes_seconds():
    path = TRACES / "mooncake_conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("the shared traces are not here")
    arguments = [] if not PURE_PYTHON else ["--limit", 300]
    document = json.loads(replay(path, "--blocks", 300_000, "--compare", FASTEST, "--json", "-", *arguments).stdout)
    (figures,) = document["implementations"].values()
    if not PURE_PYTHON:
        assert document["requests"] == 12_031 and figures["seconds"] < 10
    assert figures["rejected"] == 0 and 0 < figures["hit_rate"] < 0.38

"""Models on several ranks: the same tokens as on one, and the same block ids on all of them."""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("zmq")

from tensor_parallel_run import BlockIds, RankProcesses, read_records, recording_runner  # noqa: E402
from tiny_models import KINDS, make_model, make_prompts  # noqa: E402
from tiny_models import generate as generate_by_transformers  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from kvpool.backend import BlockHasher, Request  # noqa: E402
from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.kv_cache_manager import KVCacheManager  # noqa: E402
from kvpool.scheduler import Scheduler, SchedulerConfig  # noqa: E402
from kvpool.worker import __main__ as worker  # noqa: E402
from kvpool.worker import model_runner  # noqa: E402
from kvpool.worker.models import tensor_parallel  # noqa: E402
from kvpool.worker.models.attention_modules import UnsupportedModelError, find_attention_modules  # noqa: E402
from kvpool.worker.models.tensor_parallel import Ranks, shard_model  # noqa: E402
from kvpool.worker.transport import link  # noqa: E402
from kvpool.worker.transport.broadcaster import Broadcaster  # noqa: E402
from kvpool.worker.transport.errors import WorkerError  # noqa: E402

pytestmark = pytest.mark.dataplane

START_SECONDS, STEP_SECONDS = 90.0, 60.0
SCARCE_BLOCKS = 26
BLOCK_SIZE = 4
MAX_SEQS, MAX_BATCHED_TOKENS, MAX_MODEL_LEN = 5, 24, 80
NUM_TOKENS = 14
KINDS_WITHOUT_PLAN = ("gpt2", "opt")
GATHERING_KINDS = ("phi3", "olmo2")
SAFE_GAP = 1e-3  # between logits; rounding is about 1e-5


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short enough for the path of a socket
        yield Path(name)


@dataclass(frozen=True)
class Outcome:
    """What came of a run: tokens of each prompt, steps with the block ids that the manager had, preemptions, hits."""

    tokens: list[list[int]]
    steps: list[tuple[int, BlockIds]]
    num_preemptions: int
    num_hit_tokens: int


def worker_arguments(address: str, model: Path, num_blocks: int | None, device: str = "cpu") -> list[str]:
    options: dict[str, Any] = {
        "address": address,
        "model": model,
        "block-size": BLOCK_SIZE,
        "max-num-seqs": MAX_SEQS,
        "max-num-batched-tokens": MAX_BATCHED_TOKENS,
        "max-model-len": MAX_MODEL_LEN,
        "device": device,
    }
    if num_blocks is not None:
        options["num-blocks"] = num_blocks
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def generate(
    broadcaster: Broadcaster, prompts: Sequence[Sequence[int]], *, name: Callable[[int], str] = str
) -> Outcome:
    """Schedules the prompts, and has the workers compute them."""
    info = broadcaster.wait_for_workers(START_SECONDS)
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (MAX_SEQS, MAX_BATCHED_TOKENS)
    manager = KVCacheManager(
        info.kv_cache_config(), info.max_model_len, max_in_flight_tokens=info.max_num_batched_tokens
    )
    scheduler = Scheduler(manager, SchedulerConfig(info.max_num_batched_tokens, info.max_num_seqs))
    hasher = BlockHasher("sha256", manager.hash_block_size)
    for number, prompt in enumerate(prompts):
        scheduler.add_request(Request(name(number), prompt, hasher, max_tokens=NUM_TOKENS))
    tokens: list[list[int]] = [[] for _ in prompts]
    steps: list[tuple[int, BlockIds]] = []
    num_hit_tokens = 0
    while scheduler.has_requests():
        output = scheduler.schedule()
        num_hit_tokens += sum(new.num_computed_tokens for new in output.scheduled_new_requests)
        ids = {request_id: manager.get_block_ids(request_id) for request_id in output.num_scheduled_tokens}
        steps.append((output.step, {request_id: list(map(list, groups)) for request_id, groups in ids.items()}))
        for result in scheduler.update_from_output(output, broadcaster.execute(output).tokens):
            tokens[int(result.request_id)] += result.new_token_ids
    return Outcome(tokens, steps, scheduler.make_stats().num_preemptions, num_hit_tokens)


@contextmanager
def running_ranks(
    model: Any,
    num_ranks: int,
    num_blocks: int | None,
    folder: Path,
    address: str,
    device: str = "cpu",
    **environment: str,
) -> Iterator[tuple[Broadcaster, RankProcesses]]:
    """Saves a model and starts its ranks, for a broadcaster; they record what they do in ``folder``."""
    model.save_pretrained(folder / "model")
    with Broadcaster(address, num_ranks, timeout_seconds=STEP_SECONDS) as broadcaster:
        arguments = worker_arguments(broadcaster.address, folder / "model", num_blocks, device)
        environment["RECORD_FOLDER"] = str(folder)
        with RankProcesses(num_ranks, arguments, **environment) as processes:
            broadcaster._check_workers = processes.check
            yield broadcaster, processes


def shared_prefix_prompts() -> list[list[int]]:
    """Eight prompts of 20 to 34 tokens, of which the first 18 are the same, and one without them."""
    prefix = make_prompts([18], seed=5)[0]
    return [*make_prompts([2, 7, 16, 9, 4, 12, 3, 5], seed=6, prefix=prefix), *make_prompts([11], seed=7)]


def wanted_tokens(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens of transformers; none of them is so close to another one that rounding could decide."""
    wanted = generate_by_transformers(model, prompts, NUM_TOKENS)
    assert min(one.smallest_gap for one in wanted) > SAFE_GAP
    return [one.tokens for one in wanted]


# ---- processes ----


def test_two_ranks_generate_what_one_model_does_with_the_same_blocks(folder: Path) -> None:
    """With scarce blocks and shared prefixes. Each rank has one of two KV heads."""
    model, prompts = make_model("llama"), shared_prefix_prompts()
    with running_ranks(model, 2, SCARCE_BLOCKS, folder, f"ipc://{folder}/s") as (broadcaster, processes):
        outcome = generate(broadcaster, prompts)
        assert broadcaster.wait_for_workers().kv_cache_groups[0].num_kv_heads == 1
        broadcaster.close()
        output = processes.wait()
    assert processes.process.returncode == 0, output
    assert outcome.tokens == wanted_tokens(model, prompts)
    assert outcome.num_preemptions > 0 and outcome.num_hit_tokens > 0
    records = read_records(folder)
    assert sorted(records) == [0, 1] and len(outcome.steps) > NUM_TOKENS
    assert records[0] == records[1] == outcome.steps


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_ranks_on_gpus_generate_what_one_model_does_with_the_same_blocks(folder: Path) -> None:
    """Over NCCL where there are two GPUs, else one rank under torchrun."""
    num_ranks = min(2, torch.cuda.device_count())
    model, prompts = make_model("llama", head_dim=16), shared_prefix_prompts()
    with running_ranks(model, num_ranks, SCARCE_BLOCKS, folder, f"ipc://{folder}/s", "cuda") as (
        broadcaster,
        processes,
    ):
        outcome = generate(broadcaster, prompts)
        broadcaster.close()
        output = processes.wait()
    assert processes.process.returncode == 0, output
    assert outcome.tokens == wanted_tokens(model, prompts)
    assert outcome.num_preemptions > 0
    assert read_records(folder) == dict.fromkeys(range(num_ranks), outcome.steps)


def test_one_rank_needs_no_torchrun_and_ends_without_its_scheduler(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = make_model("llama"), shared_prefix_prompts()
    model.save_pretrained(folder / "model")
    monkeypatch.setattr(model_runner, "ModelRunner", recording_runner(folder, 0))
    with (
        Broadcaster(f"ipc://{folder}/s", 1, timeout_seconds=STEP_SECONDS) as broadcaster,
        ThreadPoolExecutor(1) as thread,
    ):
        arguments = worker_arguments(broadcaster.address, folder / "model", SCARCE_BLOCKS)
        running = thread.submit(CliRunner().invoke, worker.app, arguments)
        outcome = generate(broadcaster, prompts)
        broadcaster._link.close()  # as by a kill: without a word
        result = running.result(STEP_SECONDS)
    assert result.exit_code == 1
    assert result.stderr == f"error: SchedulerLostError: the scheduler at ipc://{folder}/s is gone (rank 0)\n"
    assert outcome.tokens == wanted_tokens(model, prompts)
    assert outcome.num_preemptions > 0 and outcome.num_hit_tokens > 0
    assert read_records(folder) == {0: outcome.steps}


def test_the_number_of_blocks_is_what_all_sequences_need_where_it_fits(folder: Path) -> None:
    make_model("llama").save_pretrained(folder / "model")
    with (
        Broadcaster(f"ipc://{folder}/s", 1, timeout_seconds=STEP_SECONDS) as broadcaster,
        ThreadPoolExecutor(1) as thread,
    ):
        arguments = worker_arguments(broadcaster.address, folder / "model", None)
        running = thread.submit(CliRunner().invoke, worker.app, arguments)
        broadcaster.wait_for_workers()
        assert broadcaster.num_blocks == 1 + MAX_SEQS * MAX_MODEL_LEN // BLOCK_SIZE
        broadcaster.close()
        assert running.result(STEP_SECONDS).exit_code == 0


def test_ranks_over_tcp_with_sliding_windows_until_one_fails(folder: Path) -> None:
    """Ranks agree on the number of blocks where it is left open. An exception of one rank, before its part of an
    all-reduce, ends all of them."""
    model, prompts = make_model("qwen3", vocab_size=62), shared_prefix_prompts()
    options = {"FAILING_RANK": "1", "FITTING": "94,80"}
    with running_ranks(model, 2, None, folder, "tcp://127.0.0.1:*", **options) as (broadcaster, processes):
        outcome = generate(broadcaster, prompts)
        assert broadcaster.num_blocks == 80 // 2  # two ranks share the memory of one machine
        with pytest.raises(WorkerError, match=r"^step 1: rank 1 failed: RuntimeError: told to fail$") as raised:
            generate(broadcaster, prompts[:1], name=lambda number: "fail")
        assert "in execute" in raised.value.remote_traceback
        broadcaster.close()
        output = processes.wait()
    assert processes.process.returncode != 0 and "error: RuntimeError: told to fail" in output
    assert outcome.tokens == wanted_tokens(model, prompts)
    assert outcome.num_preemptions > 0
    records = read_records(folder)
    assert records[0] == records[1]
    for (step, ids), (wanted_step, wanted_ids) in zip(records[0], outcome.steps, strict=True):
        assert step == wanted_step and ids.keys() == wanted_ids.keys()
        for request_id, groups in ids.items():
            assert len(groups) == 3 and [len(group) for group in groups] == list(map(len, wanted_ids[request_id]))
            # A worker does not forget blocks in front of a window, whose ids the manager replaces by 0.
            pairs = [pair for mine, wanted in zip(groups, wanted_ids[request_id]) for pair in zip(mine, wanted)]
            assert all(mine == wanted for mine, wanted in pairs if wanted)


# ---- threads ----


class ThreadCollectives:
    """What ``tensor_parallel`` takes from torch.distributed, between threads of this process."""

    def __init__(self, num_ranks: int) -> None:
        self.rank = threading.local()
        self.barrier = threading.Barrier(num_ranks, timeout=STEP_SECONDS)
        self.tensors: list[Any] = [None] * num_ranks

    def exchange(self, tensor: Any) -> list[Any]:
        self.tensors[self.rank.number] = tensor.clone()
        self.barrier.wait()
        everybodys = list(self.tensors)
        self.barrier.wait()
        return everybodys

    def all_reduce(self, tensor: Any) -> None:
        tensor.copy_(sum(self.exchange(tensor)))

    def all_gather(self, parts: list[Any], tensor: Any) -> None:
        for part, everybodys in zip(parts, self.exchange(tensor), strict=True):
            part.copy_(everybodys)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """The function's result for each rank, each in a thread."""

        def run_rank(rank: int) -> Any:
            self.rank.number = rank
            try:
                with torch.inference_mode():
                    return function(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.tensors)) as executor:
            return list(executor.map(run_rank, range(len(self.tensors))))


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - set(KINDS_WITHOUT_PLAN)))
def test_parts_of_a_model_compute_what_the_whole_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_model(kind, vocab_size=62)
    for parameter in whole.parameters():
        if parameter.ndim == 1:  # biases and norms, which are zeros and ones in a new model
            torch.nn.init.normal_(parameter, 0.5, 0.3, generator=torch.Generator().manual_seed(len(parameter)))
    inputs = torch.arange(1, 30).unsqueeze(0)
    with torch.inference_mode():
        wanted = whole(inputs).logits
    collectives = ThreadCollectives(2)
    monkeypatch.setattr(tensor_parallel, "distributed", collectives)
    parts = copies(whole, 2)
    logits, others = collectives.run(lambda rank: parts[rank](inputs).logits)
    assert torch.equal(logits, others)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    # Where queries and keys are cut or normalised as a whole, the plans gather them on every rank.
    num_kv_heads = find_attention_modules(whole)[0].num_kv_heads // (1 if kind in GATHERING_KINDS else 2)
    assert all(find_attention_modules(part)[0].num_kv_heads == num_kv_heads for part in parts)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    assert all(sum(parameter.numel() for parameter in part.parameters()) < 0.75 * num_parameters for part in parts)


# ---- one process ----


@pytest.fixture(scope="module")
def whole_llama() -> Any:
    return make_model("llama", attention_bias=True, mlp_bias=True)


def copies(model: Any, num_ranks: int) -> list[Any]:
    parts = [copy.deepcopy(model) for _ in range(num_ranks)]
    for rank, part in enumerate(parts):
        shard_model(part, rank, num_ranks)
    return parts


def test_ranks_have_the_whole_among_them(whole_llama: Any) -> None:
    parts = [dict(part.named_parameters()) for part in copies(whole_llama, 2)]
    num_divided = 0
    for name, whole in whole_llama.named_parameters():
        is_row_part = name.endswith(("o_proj.weight", "down_proj.weight"))
        is_divided = "_proj." in name and not name.endswith(("o_proj.bias", "down_proj.bias"))
        num_divided += is_divided
        if is_divided:
            assert torch.equal(torch.cat([part[name] for part in parts], dim=1 if is_row_part else 0), whole)
        elif "_proj." in name:
            assert torch.equal(parts[0][name], whole) and name not in parts[1]  # in the sum once
        elif name != "lm_head.weight":
            assert torch.equal(parts[0][name], whole) and torch.equal(parts[1][name], whole)
    assert num_divided == whole_llama.config.num_hidden_layers * (7 + 5)


def test_a_part_does_not_keep_the_whole_in_memory(whole_llama: Any) -> None:
    for part in copies(whole_llama, 2):
        for parameter in part.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


def test_kv_heads_are_those_of_the_rank(whole_llama: Any) -> None:
    assert [module.num_kv_heads for module in find_attention_modules(whole_llama)] == [2, 2]
    for part in copies(whole_llama, 2):
        assert [module.num_kv_heads for module in find_attention_modules(part)] == [1, 1]


@pytest.mark.parametrize(("tied", "vocabulary"), [(True, 62), (False, 61)])
def test_output_layers_that_can_not_be_divided_stay_whole(tied: bool, vocabulary: int) -> None:
    model = make_model("llama", tie_word_embeddings=tied, vocab_size=vocabulary)
    shard_model(model, 1, 2)
    assert model.lm_head.weight.shape[0] == vocabulary
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_one_rank_changes_nothing(whole_llama: Any) -> None:
    before = dict(whole_llama.named_parameters())
    shard_model(whole_llama, 0, 1)
    shard_model(make_model("gpt2"), 0, 1)
    assert all(parameter is before[name] for name, parameter in whole_llama.named_parameters())


@pytest.mark.parametrize(
    ("kind", "sizes", "num_ranks", "told"),
    [
        ("llama", {}, 3, "has 4 attention heads, which 3 ranks can't divide evenly"),
        ("llama", {}, 4, "has 2 KV heads, which 4 ranks can't divide evenly"),
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}, 2, "has 9 attention heads"),
        ("llama", {"intermediate_size": 47}, 2, "mlp.gate_proj has a width of 47, which 2 ranks can't divide evenly"),
        ("mixtral", {"intermediate_size": 47}, 2, "a width of 94"),
        ("gpt2", {}, 2, "GPT2LMHeadModel has no tensor-parallel plan"),
    ],
)
def test_models_that_can_not_be_divided_are_refused(
    kind: str, sizes: dict[str, Any], num_ranks: int, told: str
) -> None:
    model = make_model(kind, **sizes)
    before = dict(model.named_parameters())
    with pytest.raises(InvalidArgumentError, match=told):
        shard_model(model, 0, num_ranks)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("name", ["model.layers.*.mlp.down_proj", "model.layers.*.self_attn"])
@pytest.mark.parametrize("style", ["packed_rowwise", "sequence_parallel", "made_up"])
def test_styles_that_are_not_known_are_refused(name: str, style: str) -> None:
    model = make_model("llama")
    model._tp_plan = {**model._tp_plan, name: style}
    with pytest.raises(UnsupportedModelError, match=f"is planned as '{style}', which is not known here"):
        shard_model(model, 0, 2)


def test_ranks_come_from_the_environment() -> None:
    assert Ranks.from_environment({}) == Ranks(0, 1, 0, 1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert Ranks.from_environment(dict(zip(names, ("5", "8", "1", "4")))) == Ranks(5, 8, 1, 4)
    for wrong in (("x", "8", "1", "4"), ("8", "8", "1", "4"), ("-1", "8", "1", "4"), ("5", "8", "4", "4")):
        with pytest.raises(InvalidArgumentError):
            Ranks.from_environment(dict(zip(names, wrong)))
    with pytest.raises(InvalidArgumentError, match=r"there is no rank 2 among 2"):
        shard_model(make_model("llama"), 2, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--model", "/nowhere"], 2, "error: '/nowhere' is neither a folder with a config.json nor a .gguf file"),
        (["--model", "MODEL", "--dtype", "int8"], 2, "error: 'int8' is no floating-point dtype of torch"),
        (["--model", "MODEL", "--max-model-len", "1000"], 2, "error: sequences of 1000 tokens"),
        (["--model", "MODEL", "--attention", "made_up"], 2, "made_up"),
        (["--model", "MODEL", "--device", "cuda"], 2, "error: cuda is not here: there are 0 CUDA devices"),
        (["--model", "MODEL", "--address", "udp://x"], 2, "error: an address is ipc://PATH or tcp://HOST:PORT"),
        (["--model", "MODEL", "--num-blocks", str(2**31 - 1)], 1, "error: CacheMemoryError: "),
        (["--model", "MODEL", "--timeout", "0.2"], 1, "error: SchedulerLostError: the scheduler at "),
    ],
)
def test_workers_that_can_not_start_say_why_in_one_line(
    arguments: list[str], code: int, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(link, "_LINGER_SECONDS", 0.05)  # there is no scheduler to be told
    make_model("llama").save_pretrained(folder / "model")
    words = ["--address", f"ipc://{folder}/s", "--num-blocks", "30", "--device", "cpu"]
    words += [str(folder / "model") if word == "MODEL" else word for word in arguments]
    result = CliRunner().invoke(worker.app, words)
    lines = result.stderr.splitlines()
    assert result.exit_code == code and len(lines) == 1 and told in lines[0], result.stderr


def test_the_scheduler_is_told_why_a_worker_can_not_start(folder: Path) -> None:
    with Broadcaster(f"ipc://{folder}/s", 2) as broadcaster:
        result = CliRunner().invoke(worker.app, ["--address", broadcaster.address, "--model", "/nowhere"])
        assert result.exit_code == 2
        with pytest.raises(WorkerError, match=r"rank 0 can't start: .*'/nowhere' is neither a folder"):
            broadcaster.wait_for_workers(STEP_SECONDS)

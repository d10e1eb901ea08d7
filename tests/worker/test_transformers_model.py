"""Which models of transformers run on the paged cache, how their layers are grouped, and how they come from files."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paged_runs import PagedRun, RunSettings  # noqa: E402
from tiny_models import FULL, SIZES, SLIDING, WINDOW, generate, make_model, make_prompts  # noqa: E402

from kvpool.cache.sizing import group_layers  # noqa: E402
from kvpool.cache.spec import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec  # noqa: E402
from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.worker.models.pretrained import load_pretrained, longest_sequence, read_model_facts  # noqa: E402
from kvpool.worker.models.transformers_model import TransformersModel, UnsupportedModelError  # noqa: E402

pytestmark = pytest.mark.dataplane

# ---- groups of layers ----


def specs(**windows: int | None) -> dict[str, Any]:
    sizes: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    return {
        name: FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(**sizes, sliding_window=window)
        for name, window in windows.items()
    }


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("ffff", ["0123"]),
        ("ssss", ["0123"]),
        ("sf", ["0", "1"]),
        ("ssssfs", ["0", "1", "2", "3", "5", "4"]),
        ("fsfsfs", ["024", "135"]),
        ("ffsssf", ["015", "234"]),
        ("ffsss", ["01", "24", "3"]),  # 1.5 times as many: divided
        ("fffssss", ["012", "3456"]),  # 1.33 times: not
        ("ssssssff", ["03", "14", "25", "67"]),
    ],
)
def test_layers_in_groups(pattern: str, wanted: list[str]) -> None:
    layers = specs(**{str(i): None if kind == "f" else 8 for i, kind in enumerate(pattern)})
    groups = group_layers(layers)
    assert ["".join(group.layer_names) for group in groups] == wanted
    assert all(layers[name] == group.kv_cache_spec for group in groups for name in group.layer_names)


def test_no_layers_no_groups() -> None:
    with pytest.raises(InvalidArgumentError, match="no layers"):
        group_layers({})


# ---- models ----


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("llama", [(None, [0, 1])]),
        ("mistral", [(WINDOW, [0, 1])]),
        ("phi3", [(WINDOW, [0, 1])]),
        ("qwen3", [(WINDOW, [0]), (WINDOW, [2]), (None, [1])]),
        ("gemma2", [(WINDOW, [0]), (None, [1])]),
    ],
)
def test_groups_of_a_model(kind: str, wanted: list[tuple[int | None, list[int]]]) -> None:
    groups = TransformersModel(make_model(kind)).kv_cache_groups(16)
    assert [group.layer_names for group in groups] == [
        [f"model.layers.{layer}.self_attn" for layer in layers] for _, layers in wanted
    ]
    for group, (window, _) in zip(groups, wanted):
        spec = group.kv_cache_spec
        assert isinstance(spec, FullAttentionSpec if window is None else SlidingWindowSpec)
        assert spec.sliding_window == window and spec.dtype == "float32" and spec.block_size == 16
        assert spec.num_kv_heads == 2 and spec.head_size == {"qwen3": 16}.get(kind, 8)


def test_a_window_that_means_nothing_to_the_model() -> None:
    model = TransformersModel(make_model("llama", sliding_window=5))
    assert isinstance(model.kv_cache_groups(4)[0].kv_cache_spec, FullAttentionSpec)
    assert model.config.sliding_window == 5
    prompt = make_prompts([20])[0]
    text = list(prompt)
    with model.own_attention() as own, torch.inference_mode():
        for _ in range(8):  # not by generate, whose cache goes by the number
            text.append(int(own(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    assert PagedRun(model, RunSettings(4)).generate([prompt], 8) == [text[20:]]


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_heads_are_those_of_the_shard(kind: str) -> None:
    """The projections have half of the outputs, and the configuration still has all heads."""
    model = make_model(kind)
    for layer in model.model.layers:
        for name in ("k_proj", "qkv_proj"):
            if hasattr(layer.self_attn, name):
                whole = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, torch.nn.Linear(32, whole.out_features // 2, bias=False))
    spec = TransformersModel(model).kv_cache_groups(16)[0].kv_cache_spec
    assert isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)) and spec.num_kv_heads == 1
    model.model.layers[0].self_attn.k_proj = torch.nn.Linear(32, 12)
    with pytest.raises(UnsupportedModelError, match="no whole number of heads of 8"):
        TransformersModel(model)


UNSUPPORTED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "GptOss",
        "ForCausalLM",
        {"head_dim": 8, "num_local_experts": 2},
        "'model.layers.0.self_attn' has attention sinks",
    ),
    (
        "Llama4Text",
        "Llama4ForCausalLM",
        {"head_dim": 8, "num_local_experts": 2},
        "layer 0 is of type 'chunked_attention'",
    ),
    ("Mamba", "ForCausalLM", {"state_size": 4}, "layer 0 is of type 'linear_attention'"),
    ("Lfm2", "ForCausalLM", {"layer_types": [FULL, "conv"]}, "layer 1 is of type 'conv'"),
    (
        "DeepseekV3",
        "ForCausalLM",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "n_routed_experts": 8},
        "'model.layers.0.self_attn' keeps compressed keys",
    ),
    ("Bloom", "ForCausalLM", {"n_head": 4, "n_layer": 2}, "the attention of BloomForCausalLM can't be replaced"),
    ("Rwkv", "ForCausalLM", {}, "RwkvForCausalLM: layer 0 has no attention module"),
    ("T5", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "num_heads": 4}, "has an encoder"),
    (
        "Gemma3Text",
        "Gemma3ForCausalLM",
        {"head_dim": 8, "use_bidirectional_attention": True},
        "'model.layers.0.self_attn' attends in both directions",
    ),
    (
        "Gemma3nText",
        "Gemma3nForCausalLM",
        {"num_kv_shared_layers": 1, "vocab_size_per_layer_input": 61, "layer_types": [FULL, FULL]},
        "the last 1 layers use the keys and values of other layers",
    ),
    (
        "Gemma4Text",
        "Gemma4ForCausalLM",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "layer_types": [SLIDING, FULL],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
        "'model.layers.1.self_attn' has 2 KV heads of 16 elements, 'model.layers.0.self_attn' 2 of 8",
    ),
    (
        "Whisper",
        "ForCausalLM",
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4},
        "two attention modules",
    ),
]


def make_config(name: str, **sizes: Any) -> Any:
    plain = {key: value for key, value in SIZES.items() if key not in ("initializer_range", "tie_word_embeddings")}
    return getattr(transformers, f"{name}Config")(**{**plain, **sizes})


@pytest.mark.parametrize(("name", "model_name", "sizes", "reason"), UNSUPPORTED, ids=[case[0] for case in UNSUPPORTED])
def test_unsupported_models(name: str, model_name: str, sizes: dict[str, Any], reason: str) -> None:
    config = make_config(name, **sizes)
    model = getattr(transformers, name + model_name if model_name == "ForCausalLM" else model_name)(config)
    with pytest.raises(UnsupportedModelError, match=reason):
        TransformersModel(model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("StableLm", "layer 0, a StableLmAttention, was called without its step"),
        ("Doge", "'model.layers.0.self_attn' has an attention mask of its own"),
        ("DiffLlama", "4 of 2 layers of DiffLlamaForCausalLM have called their attention"),
    ],
)
def test_models_that_are_found_out_in_their_first_step(name: str, reason: str) -> None:
    model = getattr(transformers, f"{name}ForCausalLM")(make_config(name))
    run = PagedRun(TransformersModel(model), RunSettings(4))
    run.add("a", [1, 2, 3], 2)
    with pytest.raises(UnsupportedModelError, match=reason):
        run.step()


def test_layers_that_ask_for_something_else() -> None:
    model = make_model("gemma3")
    run = PagedRun(TransformersModel(model), RunSettings(4))
    attention = model.model.layers[2].self_attn
    attention.sliding_window = None
    run.add("a", [1, 2, 3], 2)
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.2\.self_attn' asks for a sliding window of None .* says 11"
    ):
        run.step()
    with pytest.raises(UnsupportedModelError, match="without its step"):
        model(torch.tensor([[1, 2]]))


def test_a_window_in_a_group_of_full_attention_and_the_other_way_round() -> None:
    """Blocks outside a window may be kept, where the group says so; a group must not give away what a layer reads."""
    model = TransformersModel(make_model("mistral"))
    with model.own_attention() as own:
        prompts = make_prompts([40, 30])
        wanted = [one.tokens for one in generate(own, prompts, 8)]
    names = model.kv_cache_groups(4)[0].layer_names
    sizes: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
    kept = [KVCacheGroupSpec(names, FullAttentionSpec(**sizes, sliding_window=WINDOW))]
    given_away = [KVCacheGroupSpec(names, SlidingWindowSpec(**sizes, sliding_window=5))]
    model.kv_cache_groups = lambda block_size: kept  # type: ignore[method-assign]
    assert PagedRun(model, RunSettings(4)).generate(prompts, 8) == wanted
    model.kv_cache_groups = lambda block_size: given_away  # type: ignore[method-assign]
    run = PagedRun(model, RunSettings(4))
    run.add("a", [1, 2, 3], 2)
    with pytest.raises(InvalidArgumentError, match=r"a sliding window of 11 tokens, its KV cache group 0 one of 5"):
        run.step()


def test_own_attention_comes_and_goes() -> None:
    stock = make_model("llama")
    wanted = generate(stock, [[1, 2, 3]], 4)
    model = TransformersModel(stock.train())
    assert not stock.training
    model = TransformersModel(stock)  # a second time
    with model.own_attention() as own:
        assert generate(own, [[1, 2, 3]], 4) == wanted
    assert PagedRun(model, RunSettings(4)).generate([[1, 2, 3]], 4) == [wanted[0].tokens]


# ---- files ----


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("somebody wants to connect")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_in_a_folder(kind: str, tmp_path: Path) -> None:
    stock, prompts = make_model(kind), make_prompts([20, 3])
    wanted = [one.tokens for one in generate(stock, prompts, 8)]
    stock.generation_config.eos_token_id = [7, 8]
    stock.save_pretrained(tmp_path)
    facts = read_model_facts(tmp_path)
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (61, 160, [7, 8])
    model = TransformersModel.load(tmp_path)
    assert model.dtype == torch.float32 and model.vocab_size == 61 and model.max_model_len == 160
    assert PagedRun(model, RunSettings(4)).generate(prompts, 8) == wanted
    half = TransformersModel.load(tmp_path, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert {group.kv_cache_spec.dtype for group in half.kv_cache_groups(4)} == {"bfloat16"}  # type: ignore[attr-defined]


def test_the_end_of_sequence_of_a_configuration(tmp_path: Path) -> None:
    stock = make_model("llama")
    stock.config.eos_token_id = 9
    stock.config.save_pretrained(tmp_path)
    assert read_model_facts(tmp_path).eos_token_ids == [9]


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({"eos_token_id": 9}, {}, [9]),  # there is a file, which names none
        ({"eos_token_id": 9}, {"eos_token_id": None}, [9]),
        ({"eos_token_id": [9, 8]}, {"eos_token_id": 7}, [7, 9, 8]),
        ({"eos_token_id": 9}, {"eos_token_id": [8, 9]}, [8, 9]),
        ({}, {"eos_token_id": 7}, [7]),  # not the 2 that any Llama has by default
        ({}, None, [2]),  # as transformers has it
        ({"eos_token_id": None}, None, []),
        ({"eos_token_id": -1}, {"eos_token_id": [61, 60]}, [60]),  # of a vocabulary of 61
    ],
)
def test_all_files_of_a_model_say_what_ends_a_text(
    tmp_path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None, expected: list[int]
) -> None:
    make_model("llama").config.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    del document["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps({**document, **config}))
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert read_model_facts(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("stated", ["</s>", [1, None], 1.5, True, {"a": 1}, [[1]]])
def test_an_end_that_is_no_token_is_refused(tmp_path: Path, stated: Any) -> None:
    make_model("llama").config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    with pytest.raises(InvalidArgumentError, match="eos_token_id of a model is a token id or a list of them, not "):
        read_model_facts(tmp_path)


def test_the_end_of_a_decoder_inside_another_model(tmp_path: Path) -> None:
    text = {**make_model("gemma3").config.to_dict(), "eos_token_id": 5}
    document = {"model_type": "gemma3", "text_config": text, "vision_config": {"eos_token_id": 6}, "eos_token_id": [7]}
    (tmp_path / "config.json").write_text(json.dumps(document))
    (tmp_path / "generation_config.json").write_text(json.dumps({}))
    assert sorted(read_model_facts(tmp_path).eos_token_ids) == [5, 7]


@pytest.mark.usefixtures("no_network")
def test_what_is_no_model(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path, Path("gpt2"), tmp_path / "nothing.gguf"):
        for read in (TransformersModel.load, read_model_facts, load_pretrained):
            with pytest.raises(InvalidArgumentError, match="neither a folder"):
                read(path)
    make_model("llama").config.save_pretrained(tmp_path)
    for dtype in ("int8", "nothing"):
        with pytest.raises(InvalidArgumentError, match=f"'{dtype}' is no floating-point dtype"):
            TransformersModel.load(tmp_path, dtype=dtype)


def test_longest_sequences() -> None:
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert longest_sequence(make_config("Phi3", rope_parameters=scaled, original_max_position_embeddings=40)) == 40
    assert longest_sequence(make_config("Llama")) == 160
    assert longest_sequence(make_model("gemma3").config) == 160
    with pytest.raises(InvalidArgumentError, match="how long"):
        longest_sequence(transformers.BloomConfig())

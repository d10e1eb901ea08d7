"""Tensor parallelism: every rank has a part of the attention heads and of the MLP, and the same block ids.

transformers' models come with a plan of which projections to divide and how (``base_model_tp_plan``). A projection
that is divided by columns computes a part of its outputs: a rank's own heads, of which it keeps keys and values. One
that is divided by rows takes such a part and computes a share of the sum, and one all-reduce adds the shares up. So a
layer has two all-reduces, after its attention and after its MLP, and everything between layers is the same on all
ranks. Embeddings and norms are whole on each rank, and so is an output layer whose weights are the embedding's.

A loaded model is divided in place, whatever it was loaded from. Outside of the all-reduces its forward pass costs what
a smaller model's does: parameters stay plain tensors.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError
from kvpool.worker.models.attention_modules import UnsupportedModelError

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for each other, different times to load a model included."""

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

# Names in transformers' plans.
COLUMNS, COLUMNS_GATHERED = "colwise", ("colwise_gather_output", "colwise_rep")
ROWS, ROWS_OF_WHOLE_INPUT = "rowwise", ("rowwise_split_input", "rowwise_rep")
PACKED_COLUMNS, EXPERTS = "packed_colwise", "moe_tp_experts"
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")
OUTPUT_LAYER = "lm_head"

_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Ranks:
    """This process among those that compute a model together.

    Attributes:
        rank, world_size: over all machines.
        local_rank, local_world_size: on this machine.

    Raises:
        InvalidArgumentError: no such rank.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        for rank, size in ((self.rank, self.world_size), (self.local_rank, self.local_world_size)):
            if not 0 <= rank < size:
                raise InvalidArgumentError(f"there is no rank {rank} among {size}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """As launchers say it, in RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; the only rank without them.

        Raises:
            InvalidArgumentError: the variables hold no numbers, or numbers that don't fit.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        texts = [environment.get(name, default) for name, default in zip(names, ("0", "1", "0", "1"))]
        try:
            numbers = [int(text) for text in texts]
        except ValueError:
            told = ", ".join(f"{name}={text}" for name, text in zip(names, texts))
            raise InvalidArgumentError(f"the environment has to hold numbers: {told}") from None
        return cls(*numbers)

    def device(self, kind: str) -> torch.device:
        """The device of this rank; InvalidArgumentError if there are fewer than ranks on this machine."""
        device = torch.device(kind)
        if device.type != "cuda" or device.index is not None:
            return device
        if self.local_rank >= torch.cuda.device_count():
            raise InvalidArgumentError(
                f"local rank {self.local_rank} has no GPU: there are {torch.cuda.device_count()}"
            )
        return torch.device("cuda", self.local_rank)

    @contextmanager
    def connected(self, device: torch.device, rendezvous: Path | None = None) -> Iterator[None]:
        """A process group of all ranks: gloo on the CPU, NCCL on CUDA. None for one rank.

        Args:
            rendezvous: a file that the ranks create and find each other's addresses in. Whoever may write to it can run
                code in the ranks: it belongs in a folder of the user's own. None for the store of torchrun's
                environment, of which the same is true for whoever can connect to it.

        Raises:
            InvalidArgumentError: others than the user may write to the folder of ``rendezvous``, or there is none.
        """
        store = None if rendezvous is None else _private_store(rendezvous, self.world_size)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.world_size == 1:
            yield
            return
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        try:
            yield
        finally:
            distributed.destroy_process_group()

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest value of all ranks, each of which has to ask."""
        if self.world_size == 1:
            return value
        values = torch.tensor([value], dtype=torch.int64, device=device)
        distributed.all_reduce(values, distributed.ReduceOp.MIN)
        return int(values)


def _private_store(path: Path, world_size: int) -> Any:
    folder = path.absolute().parent
    try:
        told = folder.stat()
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"ranks can't meet in {show(str(path))}: {_reason(error)}") from None
    if told.st_mode & _OTHERS_MAY_WRITE or told.st_uid != os.geteuid():
        raise InvalidArgumentError(
            f"ranks can't meet in {show(str(path))}: the folder has to be the user's own, and nobody else may write to "
            "it"
        )
    try:
        return distributed.FileStore(str(path.absolute()), world_size)  # type: ignore[attr-defined]
    except (RuntimeError, TypeError, ValueError) as error:  # of the file, or of a text that is no file name
        raise InvalidArgumentError(f"ranks can't meet in {show(str(path))}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).partition("\n")[0]


def shard_model(model: Any, rank: int, world_size: int) -> None:
    """Keeps a rank's part of a model, in place, by the model's own plan.

    Afterwards the forward pass has to be called on all ranks at the same time, with the same inputs and within
    ``Ranks.connected``, and without gradients. All ranks get the same outputs.

    Args:
        model: a causal language model of transformers with all its weights, the same on all ranks.

    Raises:
        UnsupportedModelError: the model has no plan, or a plan with a style that is not known here.
        InvalidArgumentError: heads or widths that can't be divided evenly. Nothing has been changed.
    """
    ranks = Ranks(rank, world_size, rank, world_size)
    if world_size == 1:
        return
    plan = getattr(model, "tp_plan", None) or {}
    parts = list(_find_parts(model, plan, ranks))
    if not any(part.name != OUTPUT_LAYER for part in parts):
        raise UnsupportedModelError(f"{type(model).__name__} has no tensor-parallel plan")
    if any(part.heads_of is not None for part in parts):
        _check_heads(model, world_size)
    for part in parts:
        part.check()
    for part in parts:
        part.apply()


@dataclass(frozen=True)
class _Part:
    """A module, or a parameter of one, that is divided.

    Attributes:
        name: in the model.
        module: what has the parameter.
        style: of the plan.
        parameter: name of a parameter of more than two dimensions, None for a module.
        heads_of: elements of a head, for projections to heads.
    """

    name: str
    module: Any
    style: str
    ranks: Ranks
    parameter: str | None = None
    heads_of: int | None = None

    @property
    def _widths(self) -> int:
        """Elements along the divided dimension."""
        if self.parameter is not None:
            tensor = getattr(self.module, self.parameter)
            return int(tensor.shape[-1 if self.style == ROWS else -2])
        by_rows = self.style == ROWS or self.style in ROWS_OF_WHOLE_INPUT
        return int(self.module.in_features if by_rows else self.module.out_features)

    def check(self) -> None:
        """InvalidArgumentError if the parts would not be equal."""
        if self.style == EXPERTS:
            return
        unit = self.heads_of or (2 if self.style == PACKED_COLUMNS else 1)
        if self._widths % (unit * self.ranks.world_size):
            of_heads = f" in heads of {unit}" if self.heads_of else ""
            raise InvalidArgumentError(
                f"{self.name} has a width of {self._widths}{of_heads}, which {self.ranks.world_size} ranks can't "
                "divide evenly"
            )

    def apply(self) -> None:
        if self.style == EXPERTS:
            self.module.register_forward_hook(_sum_output)
        elif self.parameter is not None:
            self._divide_parameter(self.parameter)
        elif self.style == COLUMNS or self.style in COLUMNS_GATHERED:
            self._divide_columns()
        else:
            self._divide_rows()

    def _divide_parameter(self, name: str) -> None:
        tensor = getattr(self.module, name)
        if self.style == PACKED_COLUMNS:
            taken = torch.cat([self._take(half, -2) for half in tensor.chunk(2, dim=-2)], dim=-2)
        else:
            taken = self._take(tensor, -1 if self.style == ROWS else -2)
        setattr(self.module, name, nn.Parameter(taken, requires_grad=False))

    def _divide_columns(self) -> None:
        linear = self.module
        linear.weight = nn.Parameter(self._take(linear.weight, 0), requires_grad=False)
        if linear.bias is not None:
            linear.bias = nn.Parameter(self._take(linear.bias, 0), requires_grad=False)
        if self.style == COLUMNS:
            linear.out_features = linear.weight.shape[0]
        else:
            linear.register_forward_hook(partial(_gather_output, self.ranks.world_size))

    def _divide_rows(self) -> None:
        linear = self.module
        linear.weight = nn.Parameter(self._take(linear.weight, 1), requires_grad=False)
        if linear.bias is not None and self.ranks.rank != 0:
            linear.bias = None  # to be in the sum once
        if self.style == ROWS:
            linear.in_features = linear.weight.shape[1]
        else:
            linear.register_forward_pre_hook(partial(_take_input, self.ranks.rank, linear.weight.shape[1]))
        linear.register_forward_hook(_sum_output)

    def _take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part, in memory of its own, so that the whole can be freed."""
        return tensor.detach().chunk(self.ranks.world_size, dim)[self.ranks.rank].clone()


def _find_parts(model: nn.Module, plan: Mapping[str, str], ranks: Ranks) -> Iterator[_Part]:
    parents = dict(model.named_modules())
    for name, module in parents.items():
        style = plan.get(_LAYER_NUMBER.sub(".*", name))
        if (
            style is not None
            and style not in WHOLE
            and not (name == OUTPUT_LAYER and _stays_whole(model, module, ranks))
        ):
            _check_style(name, module, style)
            heads_of = None
            if style == COLUMNS:
                parent = parents[name.rpartition(".")[0]]
                heads_of = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
            yield _Part(name, module, style, ranks, heads_of=heads_of)
        for parameter, _ in module.named_parameters(recurse=False):
            style = plan.get(_LAYER_NUMBER.sub(".*", f"{name}.{parameter}"))
            if style is not None and style not in WHOLE:
                if style not in (COLUMNS, ROWS, PACKED_COLUMNS):
                    raise UnsupportedModelError(f"{name}.{parameter} is planned as {style!r}, which is not known here")
                yield _Part(f"{name}.{parameter}", module, style, ranks, parameter)


def _check_style(name: str, module: nn.Module, style: str) -> None:
    is_known = style in (COLUMNS, ROWS, *COLUMNS_GATHERED, *ROWS_OF_WHOLE_INPUT)
    if style != EXPERTS and not (is_known and isinstance(module, nn.Linear)):
        what = f"{name}, of type {type(module).__name__},"
        raise UnsupportedModelError(f"{what} is planned as {style!r}, which is not known here")


def _stays_whole(model: Any, module: Any, ranks: Ranks) -> bool:
    """Whether the output layer is left as it is: its weights are the embedding's, or don't divide evenly."""
    embedding = model.get_input_embeddings()
    is_tied = embedding is not None and module.weight is embedding.weight
    return is_tied or module.weight.shape[0] % ranks.world_size != 0


def _check_heads(model: Any, world_size: int) -> None:
    config = model.config.get_text_config(decoder=True)
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    for number, what in ((num_heads, "attention heads"), (num_kv_heads, "KV heads")):
        if number % world_size:
            raise InvalidArgumentError(
                f"{type(model).__name__} has {number} {what}, which {world_size} ranks can't divide evenly"
            )


# ---- hooks ----


def _sum_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    distributed.all_reduce(output)
    return output


def _gather_output(world_size: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(output) for _ in range(world_size)]
    distributed.all_gather(parts, output)
    return torch.cat(parts, dim=-1)


def _take_input(rank: int, width: int, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0][..., rank * width : (rank + 1) * width], *inputs[1:])

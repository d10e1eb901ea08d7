"""Attention of queries over keys and values that lie side by side, by what torch has."""

from __future__ import annotations

import torch
from torch.nn import functional

from kvpool.worker.attention.interface import AttentionLayer


def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    layer: AttentionLayer,
    *,
    with_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax attention. The layer's window counts for nothing here: masks are in the bias.

    Args:
        query: [b, h, q, head_size].
        keys, values: [b, h, k, head_size].
        bias: added to the scores, of the query's dtype, something that expands to [b, h, q, k]; 0 or -inf, and never
            -inf in all of a row.
        layer: scale and soft cap.
        with_lse: whether the second result is wanted.

    Returns:
        [b, h, q, head_size], and the logarithm of each row's sum of exp(score), ``wide_dtype`` [b, h, q].
    """
    if layer.soft_cap is None and query.device.type == "cpu":
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=bias, scale=layer.scale
        )
        return output, lse
    if layer.soft_cap is None and not with_lse:
        output = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=layer.scale)
        return output, None
    return _attend_step_by_step(query, keys, values, bias, layer)


def attend_causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """The last q of k tokens, each of which sees itself and all before it; no cap. For CUDA, where no mask is made.

    Args:
        query: [b, h, q, head_size].
        keys, values: [b, h, k, head_size].

    Returns:
        [b, h, q, head_size].
    """
    from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler, seconds of import

    bias = causal_lower_right(query.shape[2], keys.shape[2])
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=layer.scale)


def merge(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """Attention over two sets of keys together, from the attention over each of them.

    Args:
        output, other: [..., head_size], of one dtype.
        lse, other_lse: [...], see ``attend_dense``.

    Returns:
        Like ``output``, rounded once; it may be the same memory.
    """
    weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    return output.to(weight.dtype).lerp_(other.to(weight.dtype), weight).to(output.dtype)


def merge_splits(outputs: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``merge`` of p sets of keys at once, and the logarithms of their sums.

    Args:
        outputs: [b, p, ..., head_size].
        lse: [b, p, ...].

    Returns:
        [b, ..., head_size] and [b, ...].
    """
    weights = lse.softmax(1).unsqueeze(-1)
    return outputs.to(weights.dtype).mul(weights).sum(1).to(outputs.dtype), lse.logsumexp(1)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over many scores are kept in: float32, or float64 for itself."""
    return torch.promote_types(dtype, torch.float32)


def _attend_step_by_step(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, layer: AttentionLayer
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = query.dtype
    query, keys, values = (tensor.to(wide_dtype(tensor.dtype)) for tensor in (query, keys, values))
    scores = torch.matmul(query * layer.scale, keys.transpose(-1, -2))
    if layer.soft_cap is not None:
        scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    if bias is not None:
        scores += bias
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.matmul(weights, values).to(dtype), lse

"""Host memory that copies to a device start from."""

from __future__ import annotations

import torch


class Staging:
    """A host buffer to fill and send, pinned where the device is CUDA, so that sending does not wait.

    The device may still be reading what was sent last when the buffer is wanted again: ``take`` waits for that.
    Not for several threads at once.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._buffer = torch.empty(0, dtype=dtype, pin_memory=self._is_cuda)
        self._sent: torch.cuda.Event | None = None

    def take(self, num_items: int) -> torch.Tensor:
        """A host tensor [num_items], nobody reads it; grows by doubling. The one taken before is void."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None
        if num_items > self._buffer.numel():
            room = max(num_items, 2 * self._buffer.numel())
            self._buffer = torch.empty(room, dtype=self._buffer.dtype, pin_memory=self._is_cuda)
        return self._buffer[:num_items]

    def send(self, taken: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Copies to a tensor on the device without waiting for it. Returns the target."""
        target.copy_(taken, non_blocking=True)
        if self._is_cuda:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record(torch.cuda.current_stream(self._device))
        return target

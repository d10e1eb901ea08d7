"""Request: one sequence of tokens that is served, and its status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import backend
from kvpool.requests.request_base import LoRAName
from kvpool.requests.status import RequestStatus
from kvpool.requests.token_ids import TokenIds

if TYPE_CHECKING or backend.BACKEND == "reference":
    from kvpool.reference.request import Request
else:
    from kvpool.native.request import RequestBase
    from kvpool.requests.request_base import RequestOperations

    class Request(RequestOperations, RequestBase):
        __doc__ = RequestOperations.__doc__


__all__ = ["LoRAName", "Request", "RequestStatus", "TokenIds"]

"""Request: one sequence of tokens that is served, and its status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import _backend
from kvpool._request_operations import LoRAName
from kvpool.request_status import RequestStatus
from kvpool.token_ids import TokenIds

if TYPE_CHECKING or _backend.BACKEND == "reference":
    from kvpool.reference.request import Request
else:
    from kvpool._request import RequestBase
    from kvpool._request_operations import RequestOperations

    class Request(RequestOperations, RequestBase):
        __doc__ = RequestOperations.__doc__


__all__ = ["LoRAName", "Request", "RequestStatus", "TokenIds"]

"""All faults."""

from __future__ import annotations

from .fault import Fault
from .native_faults import NATIVE_FAULTS
from .shared_faults import SHARED_FAULTS
from .twin_faults import TWIN_FAULTS

FAULTS: list[Fault] = [*TWIN_FAULTS, *SHARED_FAULTS, *NATIVE_FAULTS]

"""SHA-256 of the OpenSSL library that the interpreter has loaded for ``hashlib``, as addresses for native code.

A ``hashlib.sha256`` object costs more than the hash of a block. OpenSSL 3's one-shot ``SHA256`` looks its algorithm up
by name on every call and costs as much again, so its three plain functions are taken. No library is opened that is not
in the process already.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

CONTEXT_BYTES = 512  # SHA256_CTX has 112 in every OpenSSL and its forks
_DIGEST_BYTES = 32
_TRIAL = bytes(range(256))


@dataclass(frozen=True)
class Sha256Functions:
    """Addresses of ``SHA256_Init(context)``, ``SHA256_Update(context, data, n)``, ``SHA256_Final(digest, context)``."""

    init: int
    update: int
    final: int


@functools.cache
def find_sha256() -> Sha256Functions | None:
    """The three functions, or None where there are none or their digest is wrong. The first call loads ctypes."""
    try:
        import _hashlib
        import ctypes
    except ImportError:
        return None
    for library_name in (getattr(_hashlib, "__file__", None), None):  # None: what the process itself is linked with
        try:
            library = ctypes.CDLL(library_name)
            functions = library.SHA256_Init, library.SHA256_Update, library.SHA256_Final
        except (OSError, AttributeError, TypeError):
            continue
        if _is_sha256(ctypes, *functions):
            return Sha256Functions(*(_address(ctypes, function) for function in functions))
    return None


def _address(ctypes: Any, function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value)


def _is_sha256(ctypes: Any, init: Any, update: Any, final: Any) -> bool:
    """Whether the functions hash a trial message right."""
    context = ctypes.create_string_buffer(CONTEXT_BYTES)
    digest = ctypes.create_string_buffer(_DIGEST_BYTES)
    update.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    if init(context) != 1 or update(context, _TRIAL, len(_TRIAL)) != 1 or final(digest, context) != 1:
        return False
    return bytes(digest.raw) == hashlib.sha256(_TRIAL).digest()

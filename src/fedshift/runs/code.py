"""A digest of a user's own code, so that an edited method is not mistaken for the one that was run before."""

from __future__ import annotations

import hashlib
import inspect
from weakref import WeakKeyDictionary

_TOLD: WeakKeyDictionary[type, str] = WeakKeyDictionary()


def tell_digest(cls: type, digest: str) -> None:
    """Another process, which has the source of the class, knows its digest."""
    _TOLD[cls] = digest


def code_digest(cls: type) -> str:
    """Empty for classes of this package (whose version is recorded); otherwise a digest of the source of the class.

    >>> from fedshift.methods.fedavg import FedAvg
    >>> code_digest(FedAvg)
    ''
    >>> len(code_digest(type("Mine", (FedAvg,), {"__module__": "notebook", "answer": lambda self: 42})))
    16
    """
    if cls in _TOLD:
        return _TOLD[cls]
    own = [base for base in cls.__mro__ if not base.__module__.startswith(("fedshift.", "builtins", "abc", "typing"))]
    if not own:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for base in own:
        try:
            digest.update(inspect.getsource(base).encode())
        except (OSError, TypeError):  # defined where there is no source: its compiled functions tell it apart
            for name, value in sorted(vars(base).items()):
                code = getattr(value, "__code__", None)
                if code is not None:
                    digest.update(name.encode() + code.co_code + repr(code.co_consts).encode())
    return digest.hexdigest()

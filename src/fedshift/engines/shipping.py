"""How a user's code reaches another process: by value if it was written in a script or a notebook, by name otherwise.

Two things that cloudpickle does not do are done here. It takes every attribute that a function mentions for a submodule
of the packages the function uses: ``self.arch.classes`` beside ``torch`` becomes ``torch.classes``, a module of a kind
that pickle does not know. Such modules go by name like all others. And annotations that are text would be looked up in
the other process's ``__main__``, which is not the script: they travel as what they mean.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing import process
from types import ModuleType
from typing import Any, get_type_hints

import cloudpickle

# what cloudpickle raises for something that cannot leave its process
CANNOT_TRAVEL = (pickle.PicklingError, TypeError, AttributeError, NotImplementedError)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return import_module, (obj.__name__,)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:  # a class that goes by value
            _spell_out(obj, reduced[2][0])
        return reduced


def _spell_out(made: type, namespace: dict[str, Any]) -> None:
    """Put what its annotations mean into a copy of a class's namespace, where they are text."""
    own = namespace.get("__annotations__", {})
    if any(isinstance(hint, str) for hint in own.values()):
        try:
            meant = get_type_hints(made, include_extras=True)
        except (NameError, TypeError, AttributeError):  # names for type checkers alone
            return
        namespace["__annotations__"] = {name: meant[name] for name in own}


class _Naming(_Pickler):
    """Names what the other process has already."""

    def __init__(self, file: io.BytesIO, known: Mapping[int, object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_id(self, obj: Any) -> object:
        return self._known.get(id(obj))


class _Knowing(pickle.Unpickler):
    """Knows what is named."""

    def __init__(self, file: io.BytesIO, known: Callable[[Any], object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: Any) -> object:
        return self._known(pid)


def dumps(thing: object, known: Mapping[int, object] | None = None) -> bytes:
    """Anything, ready for another process; raises one of ``CANNOT_TRAVEL`` if that cannot be.

    What the other process has already goes as a name: ``known`` has the names, by the identity of what they stand for.
    """
    file = io.BytesIO()
    (_Naming(file, known) if known else _Pickler(file)).dump(thing)
    return file.getvalue()


def loads(sent: bytes, known: Callable[[Any], object] | None = None) -> Any:
    """What was sent; ``known`` finds what was only named.

    >>> loads(dumps(lambda x: 2 * x))(21)
    42
    >>> large = [0] * 9
    >>> loads(dumps({"it": large}, {id(large): "large"}), {"large": large}.get)["it"] is large
    True
    """
    return pickle.loads(sent) if known is None else _Knowing(io.BytesIO(sent), known).load()


def search_path() -> list[str]:
    """Where another process looks for modules: as here, but nothing comes from a folder that nobody named.

    Python puts the folder of a script, or the current one, before its own library. In another process that would let a
    user's ``random.py`` stand in for the library's; so a script's folder comes last. The current folder stays away
    unless it is the script's (a notebook and ``python -m`` count as scripts), somebody put it there, or PYTHONPATH
    names it: ``fedshift inspect .`` in somebody's folder must run nothing of his.
    """
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    chosen = {_real(entry) for entry in named if entry}
    own, away = _own_folder(), set[str]()
    if own is None or (len(named) > 1 and "" in named):  # python -m fedshift, or an empty entry in PYTHONPATH
        away.add(_started_in())
    here = [entry for entry in sys.path if isinstance(entry, str)]
    path = [entry for entry in here if entry and (_real(entry) in chosen or _real(entry) not in away | {own})]
    if own is not None and own not in chosen and own in map(_real, here):  # it is not there under python -P
        path.append(own)
    return list(dict.fromkeys(path))


def _own_folder() -> str | None:
    """Where the modules of the program that is running lie; fedshift's own command has none."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name != "__main__":  # python -m
        return None if spec.name.split(".")[0] == "fedshift" else _started_in()
    return os.path.dirname(_real(file)) if file else _real("")


def _started_in() -> str:
    return _real(process.ORIGINAL_DIR or "")  # type: ignore[attr-defined]


def _real(path: str) -> str:
    return os.path.realpath(path)  # of "" it is the current folder, as for imports


def environment() -> dict[str, str]:
    """What makes another Python look there and nowhere else."""
    return {"PYTHONPATH": os.pathsep.join(search_path()), "PYTHONSAFEPATH": "1"}

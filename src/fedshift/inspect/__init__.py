"""What a trained session has learnt, and what it took: ``fedshift inspect RUN`` and ``fedshift overhead RUN``."""

from fedshift.inspect.overhead import overhead
from fedshift.inspect.report import inspect

__all__ = ["inspect", "overhead"]

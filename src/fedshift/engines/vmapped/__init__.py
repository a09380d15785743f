"""Many clients as one: states stacked along a new first dimension."""

from fedshift.engines.vmapped.engine import Vmapped

__all__ = ["Vmapped"]

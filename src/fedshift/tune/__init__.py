"""Random search over settings, chosen by validation images: :func:`tune`."""

from fedshift.tune.searching import Trial as Trial
from fedshift.tune.searching import Tuned as Tuned
from fedshift.tune.searching import tune as tune

__all__ = ["Trial", "Tuned", "tune"]

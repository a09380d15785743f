"""Which doctests cannot be collected here: kernels for GPUs need Triton, which torch's CPU builds do not bring."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/fedshift/engines/cuda/*kernels.py"]

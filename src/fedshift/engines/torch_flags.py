"""Settings of torch that make a run what it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def steady(tf32: bool = False) -> Iterator[None]:
    """Settings of torch while a run lasts, and what they were afterwards.

    One thread: a second one on a busy machine makes small networks many times slower. On CUDA only kernels that give the
    same bits each time, and float32 that is float32, unless products may round to TF32.
    """
    threads, cudnn, matmul = torch.get_num_threads(), torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, cudnn.deterministic, matmul.allow_tf32)
    torch.set_num_threads(1)
    cudnn.allow_tf32, cudnn.deterministic, matmul.allow_tf32 = tf32, True, tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        cudnn.allow_tf32, cudnn.deterministic, matmul.allow_tf32 = before

"""A client's network for people without fedshift: raw pixels in, logits out, the normalisation inside."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedshift.core.arch import Arch
from fedshift.core.tree import Tensors, pick
from fedshift.errors import UserError


class PixelNetwork(nn.Module):
    """uint8 [n, height, width, channels], as arrays of pictures are, to logits [n, outputs].

    ``network`` is the trained one under its own names; ``mean`` and ``std`` normalise pixels divided by 255.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, arch: Arch, tensors: Tensors) -> None:
        super().__init__()
        dtype = next(leaf.dtype for leaf in tensors.values() if leaf.is_floating_point())
        self.network = copy.deepcopy(arch.factory()).cpu().to(dtype)
        self.network.load_state_dict(pick(tensors, (*arch.parameters, *arch.buffers)))
        for name, values in (("mean", arch.mean), ("std", arch.std)):
            self.register_buffer(name, torch.tensor(values, dtype=dtype)[:, None, None])
        channels, height, width = arch.input_shape
        self.image_shape = (height, width, channels)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Logits; other images than those it was made for are refused, because they would get an answer too."""
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != self.image_shape:
            wanted = ", ".join(map(str, self.image_shape))
            found = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
            raise UserError(f"images must be uint8 [n, {wanted}] (height, width, channels), not {found}")
        x = images.permute(0, 3, 1, 2).to(self.mean.dtype) / 255
        found = self.network((x - self.mean) / self.std)
        logits: Tensor = found[0] if isinstance(found, tuple) else found  # some return inner activations too
        return logits

"""CUDA graphs and convolution kernels of our own, for the vmapped engine."""

"""Checks of the GPU path without a GPU: the machine code of its kernels, and their minimum times."""

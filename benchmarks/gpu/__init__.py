"""What can be known of the GPU path without a GPU: the machine code of its kernels, and the time they must take."""

"""The types of the tensors that the kernels take."""

import torch

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as with_type (vector.h) numbers them

"""Registers all kernels as implementations of the operations that they compute."""

import quire.ops.triton.batch
import quire.ops.triton.convolution
import quire.ops.triton.dense
import quire.ops.triton.drafts
import quire.ops.triton.elementwise
import quire.ops.triton.encoder_attention
import quire.ops.triton.linear
import quire.ops.triton.lora
import quire.ops.triton.masks
import quire.ops.triton.partials
import quire.ops.triton.rounding
import quire.ops.triton.sampling
import quire.ops.triton.state_chunks
import quire.ops.triton.states
import quire.ops.triton.sums  # noqa: F401

"""Registers all kernels as implementations of the operations that they compute."""

import quire_triton.batch
import quire_triton.dense
import quire_triton.drafts
import quire_triton.elementwise
import quire_triton.encoder_attention
import quire_triton.linear
import quire_triton.lora
import quire_triton.masks
import quire_triton.partials
import quire_triton.sampling
import quire_triton.state_chunks
import quire_triton.states
import quire_triton.sums  # noqa: F401

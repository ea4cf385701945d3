"""The text model of tiny models that see."""

from __future__ import annotations

from support.checkpoints import EOS

TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0,
}  # fmt: skip
FIRST = 300  # the first id behind those of the byte-level tokenizer

"""RWKV-7 in float32, from the equations of its paper (arXiv:2503.14456), as a model of transformers, which has none.

Its tensors have the names of flash-linear-attention's checkpoints. It keeps its state in a list, and computes the
recurrence token by token, as in the paper: S [values, keys], S = S (diag(w) - kk^T (a * kk)) + v^T k.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class RWKV7Config(PretrainedConfig):
    model_type = "rwkv7"

    def __init__(
        self,
        vocab_size: int = 320,
        hidden_size: int = 64,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 3,
        head_dim: int = 16,
        decay_low_rank_dim: int = 12,
        gate_low_rank_dim: int = 20,
        a_low_rank_dim: int = 8,
        v_low_rank_dim: int = 6,
        hidden_act: str = "sqrelu",
        norm_first: bool = True,
        norm_bias: bool = True,
        norm_eps: float = 1e-5,
        max_position_embeddings: int = 256,
        hidden_ratio: float = 4.0,
        tie_word_embeddings: bool = False,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        pad_token_id: int | None = None,
        **rest: Any,
    ) -> None:
        for name, value in {**locals()}.items():
            if name not in ("self", "rest", "__class__"):
                setattr(self, name, value)
        if intermediate_size is None:
            self.intermediate_size = -(-int(hidden_size * hidden_ratio) // 32) * 32
        super().__init__(**rest)


def low_rank(hidden: int, rank: int, between: nn.Module, bias: bool = True) -> nn.ModuleDict:
    layers = nn.Sequential(nn.Linear(hidden, rank, bias=False), between, nn.Linear(rank, hidden, bias=bias))
    return nn.ModuleDict({"lora": layers})


def before(x: Tensor, last: Tensor | None) -> Tensor:
    """The inputs of the tokens before. x: [texts, tokens, hidden]; last: the one before the first."""
    first = torch.zeros_like(x[:, :1]) if last is None else last
    return torch.cat([first, x[:, :-1]], 1)


class TimeMix(nn.Module):
    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.dim, self.layer, self.eps = hidden // dim, dim, layer, dim * config.norm_eps
        for key in "rwkvag":
            setattr(self, f"x_{key}", nn.Parameter(torch.zeros(1, 1, hidden)))
        self.k_k, self.k_a = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.r_k = nn.Parameter(torch.ones(self.heads, dim))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.w_lora = low_rank(hidden, config.decay_low_rank_dim, nn.Tanh())
        self.a_lora = low_rank(hidden, config.a_low_rank_dim, nn.Identity())
        self.g_lora = low_rank(hidden, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        if layer:
            self.v_lora = low_rank(hidden, config.v_low_rank_dim, nn.Identity())
        self.g_norm = nn.GroupNorm(self.heads, hidden, eps=self.eps)

    def forward(self, x: Tensor, memory: dict[str, Tensor], first: Tensor | None) -> tuple[Tensor, Tensor]:
        delta = before(x, memory.get("mixed")) - x
        memory["mixed"] = x[:, -1:]
        xr, xw, xk, xv, xa, xg = (x + delta * getattr(self, f"x_{key}") for key in "rwkvag")
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        if self.layer:
            v = torch.lerp(v, first, torch.sigmoid(self.v_lora["lora"](xv)))
        else:
            first = v
        w = torch.exp(-torch.exp(torch.tensor(-0.5)) * torch.sigmoid(self.w_lora["lora"](xw)))
        a, g = torch.sigmoid(self.a_lora["lora"](xa)), self.g_lora["lora"](xg)
        kk = functional.normalize(self.by_head(k * self.k_k), dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        r, w, k, values, a = (self.by_head(part).float() for part in (r, w, k, v, a))
        kk = kk.float()
        state = memory.get("state")
        if state is None:
            state = torch.zeros(len(x), self.heads, self.dim, self.dim)
        found = []
        for t in range(x.shape[1]):
            removed = kk[:, t, :, :, None] * (a * kk)[:, t, :, None, :]
            state = state * w[:, t, :, None, :] - state @ removed + values[:, t, :, :, None] * k[:, t, :, None, :]
            found.append((state @ r[:, t, :, :, None])[..., 0])
        memory["state"] = state
        y = torch.stack(found, 1).flatten(2).to(x.dtype)
        y = self.g_norm(y.flatten(0, 1)).view(y.shape)
        y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * values).flatten(2).to(x.dtype)
        return self.o_proj(y * g), first

    def by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.dim))


class ChannelMix(nn.Module):
    def __init__(self, config: RWKV7Config) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(config.hidden_size))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
        mixed = x + (before(x, memory.get("channels")) - x) * self.x_k
        memory["channels"] = x[:, -1:]
        return self.value(torch.relu(self.key(mixed)) ** 2)


class Block(nn.Module):
    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)

        if not layer and config.norm_first:
            self.pre_norm = norm()
        self.attn_norm, self.ffn_norm = norm(), norm()
        self.attn, self.ffn = TimeMix(config, layer), ChannelMix(config)


class RWKV7Model(PreTrainedModel):
    config_class, base_model_prefix = RWKV7Config, "model"

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
        self.post_init()

    def forward(self, ids: Tensor, mask: Tensor, memories: list[dict[str, Tensor]]) -> Tensor:
        """mask: [texts, tokens], 0 for padding before a text, which then leaves all memories empty."""
        x, first = self.embeddings(ids), None
        mask = mask[..., None].to(x.dtype)
        for block, memory in zip(self.layers, memories, strict=True):
            if hasattr(block, "pre_norm"):
                x = block.pre_norm(x)
            out, first = block.attn(block.attn_norm(x) * mask, memory, first)
            x = x + out
            x = x + block.ffn(block.ffn_norm(x) * mask, memory)
        return self.norm(x)


class RWKV7ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class, base_model_prefix = RWKV7Config, "model"

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.model = RWKV7Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embeddings

    def memories(self) -> list[dict[str, Tensor]]:
        return [{} for _ in self.model.layers]

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        hidden = self.model(input_ids, torch.ones(input_ids.shape), self.memories())
        return CausalLMOutput(logits=self.lm_head(hidden))

    @torch.inference_mode()
    def generate(self, ids: Tensor, attention_mask: Tensor, max_new_tokens: int, **_: Any) -> Any:
        """Greedy. sequences: [texts, tokens]; logits: [texts, vocab] of each new token."""
        memories, found = self.memories(), list[Tensor]()
        given, mask = ids, attention_mask
        for _step in range(max_new_tokens):
            found.append(self.lm_head(self.model(given, mask, memories)[:, -1]))
            given = found[-1].argmax(-1, keepdim=True)
            ids, mask = torch.cat([ids, given], 1), torch.ones(given.shape)
        return SimpleNamespace(sequences=ids, logits=tuple(found))


AutoConfig.register("rwkv7", RWKV7Config, exist_ok=True)
AutoModelForCausalLM.register(RWKV7Config, RWKV7ForCausalLM, exist_ok=True)

"""Draws tokens with a counter-based generator: randomness is a pure function of (seed, position, token id)."""

import torch
from torch import Tensor

from quire.ops.registry import ANYWHERE, declare, declare_invariant

_MASK = 0xFFFFFFFF


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a * b for 32-bit values in int64, by 16-bit halves so that nothing
    overflows."""
    low = (a & 0xFFFF) * b  # at most 48 bits
    high = (a >> 16) * b
    total = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (total >> 32)) & _MASK, total & _MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four 32-bit words for each counter, by Philox4x32-10.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. All tensors are int64, hold 32-bit
    values, and are broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _multiply(0xD2511F53, c0)
        hi1, lo1 = _multiply(0xCD9E8D57, c2)
        c0 = hi1 ^ c1 ^ k0
        c1 = lo1
        c2 = hi0 ^ c3 ^ k1
        c3 = lo0
        k0 = (k0 + 0x9E3779B9) & _MASK
        k1 = (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return noise from (0, 1), [rows, vocab_size], float32.

    seeds, positions: [rows], int64. Token id t of a row uses word t % 4 of Philox(counter=(t // 4, position, 0, 0),
    key=seed), and u = ((word >> 9) + 1/2) * 2**-23 is exact in float32 and strictly inside (0, 1).
    """
    group = torch.arange((vocab_size + 3) // 4, device=seeds.device)[None, :]
    zero = torch.zeros_like(group)
    key = (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK)
    words = torch.stack(philox((group, positions[:, None] & _MASK, zero, zero), key), dim=-1)  # [rows, groups, 4]
    return ((words.flatten(1)[:, :vocab_size] >> 9).float() + 0.5) * 2.0**-23


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, made from the uniform noise of the same arguments: [rows, vocab_size], float32."""
    return -torch.log(-torch.log(uniform_noise(seeds, positions, vocab_size)))


@declare_invariant(*ANYWHERE)
def argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest logit of each row, the first if several are equal.

    logits: [rows, vocab], any float type -> indices [rows], int64.
    """
    return logits.argmax(-1)


@declare_invariant("cpu")
def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities, computed in float32. logits: [rows, vocab], any float type -> [rows, vocab],
    float32."""
    return logits.log_softmax(-1, torch.float32)


@declare
def keep_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Keep the top_k largest logits of each row, and of these the smallest set whose probabilities reach top_p.

    The others become -inf. logits: [rows, vocab], float32, may be overwritten; top_k: [rows], int64, vocab or more
    keeps all; top_p: [rows], float32, 1 keeps all. Ties are resolved by token id, so exactly k tokens remain. The
    largest always remains.
    """
    vocab = logits.shape[1]
    truncated = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if top_k is not None:
        truncated |= top_k < vocab
    if top_p is not None:
        truncated |= top_p < 1
    rows = truncated.nonzero().squeeze(1)
    values, order = logits[rows].sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(vocab, device=logits.device)
        values.masked_fill_(rank[None, :] >= top_k[rows][:, None], float("-inf"))
    if top_p is not None:
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the probability of larger logits
        p = top_p[rows][:, None]
        drop = (before >= p) & (p < 1)  # p = 1 drops nothing, although rounded sums may reach 1 early
        drop[:, 0] = False
        values.masked_fill_(drop, float("-inf"))
    logits[rows] = torch.empty_like(values).scatter_(-1, order, values)
    return logits


def scale(logits: Tensor, temperature: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Return logits divided by the temperature, and -inf for tokens with less than min_p times the largest probability.

    logits: [rows, vocab]; temperature, min_p: [rows], float32. Returns float32; logits itself if both are
    None.
    """
    if temperature is not None:
        logits = logits.float() / temperature[:, None]
    if min_p is not None:
        floor = logits.amax(-1, keepdim=True) + min_p[:, None].log()
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return logits


@declare
def sample_gumbel(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """Draw a token for each row, [rows], int64, after applying min-p, top-k and top-p, in this order.

    It uses the Gumbel-max trick: arg-max of logits / temperature + noise. logits: [rows, vocab], float32, or of any
    float type if there is a temperature; -inf where a token is not allowed. seeds, positions, top_k: [rows], int64;
    temperature, min_p, top_p: [rows], float32. A limit that is None keeps all. The result depends only on these
    arguments, not on other rows, their order, or earlier draws.
    """
    logits = scale(logits, temperature, min_p)
    if top_k is not None or top_p is not None:
        logits = keep_top_k_top_p.reference(logits.clone(), top_k, top_p)
    return (logits + gumbel_noise(seeds, positions, logits.shape[1])).argmax(-1)

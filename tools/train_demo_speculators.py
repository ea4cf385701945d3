"""Train what guesses tokens for the bundled model: an EAGLE-3 head, Medusa heads and a small draft model.

    python tools/train_demo_speculators.py [--kind eagle3 medusa draft] [--out quire/demo/speculators] [--work DIR]
        [--minutes M] [--threads N]
    python tools/train_demo_speculators.py --model DIR_OR_GGUF --out DIR [...]

All of them learn from text that the model itself writes, at temperatures 0 and 1, because its own text is what their
guesses are compared with. They are trained on the same rows at the same time, so that the model reads each row once.
At the end they guess text that the model writes to prompts which training cannot contain (`assert_held_out` sees to
that), and the acceptance by position goes into each folder's README.md. A training that was interrupted goes on from
its last checkpoint when the command is given again, and one with fewer --minutes than it has trained ends there.

With --model, an EAGLE-3 head is trained for any checkpoint that Quire serves. The model then writes its prompts, too.

The EAGLE-3 head in the repository was trained from zero by `--kind eagle3 --minutes 38 --threads 1`. The Medusa heads
and the draft model are from an earlier recipe, without `overlap_later`, and took some 20 minutes of a core together.
"""

import argparse
import itertools
import json
import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import train_demo_model as demo
from demo_corpus import END_OF_TEXT, TURN_START, documents, render
from demo_questions import assert_held_out, examination
from demo_stories import sentences_of, story_prompts, tell
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from quire import LLM, SamplingParams

BUNDLED = demo.REPOSITORY / "quire/demo/model"
KINDS = ("eagle3", "medusa", "draft")
TEMPERATURES = (0.0, 1.0)
GROUP = 128  # prompts that are answered together; a run that is interrupted goes on with the next group


@dataclass(frozen=True)
class Recipe:
    """How speculators are trained. A draft's number counts from 0."""

    texts: int = 12_000
    held_out: int = 300
    answer: int = 160  # the longest answer, in tokens
    row: int = 512  # tokens; texts are packed into rows, one after the other
    batch: int = 2048  # tokens a step
    drafts: int = 5  # that are guessed at a time
    unroll: tuple[int, int] = (1, 5)  # drafts that an EAGLE head guesses in training, before and after `unroll_later`
    unroll_later: float = 0.2  # of the time
    discount: float = 0.8  # how much less each draft's loss counts than that of the draft before
    overlap_later: float = 0.5  # of the time: from then on, the loss is what the acceptance depends on, see `loss_of`
    draft_vocab: int = 2048  # the tokens that an EAGLE head can guess: the most frequent ones of the texts
    warmup: float = 0.02  # of the time
    decay: float = 0.5  # of the time: the learning rates fall linearly to zero at the end
    muon_rate: float = 0.02
    adam_rate: float = 2e-3
    seed: int = 1


# ------------------------------------------------------------------------------------------------------------ the texts


@dataclass(frozen=True)
class Text:
    """A prompt and the model's answer to it. learned: which tokens are the model's to write, one flag for each."""

    ids: list[int]
    start: int  # of the answer
    temperature: float
    learned: list[bool]


def demo_prompts(seed: str) -> Iterator[str]:
    """Documents of the corpus, each cut off where the model is to go on: before an answer, or after an opening. Every
    second one is the opening of a story, because those say most and are the hardest to guess."""
    rng = random.Random(seed)
    for document in documents(seed):
        yield tell(rng)[0]
        answers = document.split(asked := f"{TURN_START}assistant\n")
        if len(answers) > 1:
            yield asked.join(answers[: rng.randrange(1, len(answers))]) + asked
        elif len(sentences := sentences_of(document)) > 1:
            yield sentences[0]


def held_out_prompts(size: int) -> list[str]:
    """Two questions for each story, in phrasings and about heroes that training cannot contain."""
    questions = [
        render(question["messages"], question.get("tools"), add_generation_prompt=True)
        for question in examination(2 * size // 3, seed=2026)
    ]
    return questions + [story["prompt"] for story in story_prompts(size - len(questions), seed=2026)]


def own_prompts(llm: LLM, group: int) -> list[str]:
    """A group of prompts that the model writes: it goes on after the start of a user's turn (arXiv:2406.08464), or
    after nothing if it has no chat template."""
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"

    def asked(question: str) -> str:
        return llm.frontend.render_chat([{"role": "user", "content": question}], add_generation_prompt=True)

    try:
        opening = asked(mark).split(mark)[0]
    except ValueError:
        opening = ""
    special = llm.frontend.tokenizer.special_tokens
    start = opening or special.get("bos_token") or special["eos_token"]
    params = [
        SamplingParams(temperature=1, top_p=1, top_k=0, max_tokens=64, seed=GROUP * group + at) for at in range(GROUP)
    ]
    questions = [output.outputs[0].text.strip() for output in llm.generate([start] * GROUP, params, use_tqdm=False)]
    return [asked(question) if opening else start + question for question in questions if question]


def write_texts(
    llm: LLM, prompts: Sequence[str], recipe: Recipe, learned: Callable[[list[int]], list[bool]], group: int
) -> list[Text]:
    """Let the model answer each prompt: twice at temperature 1 for each time at 0, because that is harder to guess."""
    tokenizer = llm.get_tokenizer()
    questions = [tokenizer.encode(prompt, add_special_tokens=False)[: recipe.row - recipe.answer] for prompt in prompts]
    first = recipe.seed + GROUP * group
    params = [
        SamplingParams(
            temperature=TEMPERATURES[at % 3 > 0], top_p=1, top_k=0, max_tokens=recipe.answer, seed=first + at
        )
        for at in range(len(prompts))
    ]
    texts = []
    for question, param, output in zip(questions, params, llm.generate(questions, params), strict=True):
        ids = [*question, *output.outputs[0].token_ids]
        texts.append(Text(ids, len(question), param.temperature, learned(ids)))
    return texts


def pack(texts: Sequence[Text], row: int, end: int) -> tuple[Tensor, Tensor]:
    """Token ids and flags of the learned ones, each [rows, row]. Every row starts with a new text."""
    rows: list[tuple[list[int], list[bool]]] = [([], [])]
    for text in texts:
        if len(rows[-1][0]) >= row:
            rows.append(([], []))
        rows[-1][0].extend([*text.ids, end])
        rows[-1][1].extend([*text.learned, False])
    full = [pair for pair in rows if len(pair[0]) >= row]
    ids, learned = (torch.tensor([pair[part][:row] for pair in full]) for part in (0, 1))
    return ids, learned


# ----------------------------------------------------------------------------------------------------------- the target


@dataclass
class Reading:
    """What the target makes of rows of tokens. Each tensor is [rows, tokens, ...]."""

    ids: Tensor
    embedded: Tensor  # what enters the target's first layer
    taps: Tensor  # its residual stream after three layers, side by side
    hidden: Tensor  # its final hidden states, of which it makes logits


def tapped(count: int) -> tuple[int, int, int]:
    """After how many of the target's layers a head reads the stream: as published, or wider apart if there are few."""
    return (2, count // 2, count - 3) if count > 6 else (1, (count + 1) // 2, count)


class Target(ABC):
    """The model for which a speculator guesses. What it makes of a row is kept in `folder` for the next time, if that
    is given. layers: how many it reads before each of the three taps, and in all."""

    def __init__(self, count: int, folder: Path | None) -> None:
        self.layers = (*tapped(count), count)
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden]"""

    @abstractmethod
    def streams(self, ids: Tensor) -> Tensor:
        """The residual stream after the numbers of `layers`: [tokens] -> [tokens, 4, hidden]"""

    @abstractmethod
    def norm(self, stream: Tensor) -> Tensor:
        """The norm before the output matrix, of [tokens, hidden]"""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab], in float32"""

    @torch.no_grad()
    def read(self, ids: Tensor) -> Reading:
        streams = torch.stack([self._kept(row) for row in ids]).float()  # [rows, tokens, 4, hidden]
        embedded, hidden = (
            x.float().view(*ids.shape, -1)
            for x in (self.embed(ids.flatten()), self.norm(streams[:, :, 3].flatten(0, 1)))
        )
        return Reading(ids, embedded, streams[:, :, :3].flatten(2), hidden)

    def _kept(self, ids: Tensor) -> Tensor:
        if self.folder is None:
            return self.streams(ids)
        file = self.folder / f"{hash(tuple(ids.tolist())):x}.pt"
        if not file.exists():
            write_tensors(file, self.streams(ids).bfloat16())
        return torch.load(file, weights_only=True)


class DemoTarget(Target):
    """The bundled model in plain torch, so that what is measured here does not depend on the engine."""

    def __init__(self, model: demo.Qwen3, folder: Path | None = None) -> None:
        super().__init__(model.shape.layers, folder)
        self.model = model.requires_grad_(False)

    @classmethod
    def load(cls, folder: Path | None = None) -> "DemoTarget":
        model = demo.Qwen3(demo.Shape())
        weights = load_file(BUNDLED / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
        return cls(model, folder)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids)

    def streams(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[None]
        streams = []
        for layer in self.model.layers:
            x = layer(x, self.model.cos[: len(ids)], self.model.sin[: len(ids)], None)
            streams.append(x[0])
        return torch.stack([streams[at - 1] for at in self.layers], dim=1)

    def norm(self, stream: Tensor) -> Tensor:
        return self.model.norm(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


class ServedTarget(Target):
    """Any model, read through Quire."""

    def __init__(self, llm: LLM, folder: Path | None = None) -> None:
        runner = llm.core.executor.runner
        self.llm = llm
        self.model = runner.model
        self.taps = runner.forward.taps
        super().__init__(self.model.spec.num_layers, folder)
        self.dtype = self.model.kernels.target.dtype
        size = (llm.config.scheduler.max_num_batched_tokens, self.model.spec.hidden_size)
        self.taps.update({at - 1: torch.empty(size, dtype=self.dtype) for at in self.layers})

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed(ids, torch.zeros_like(ids))

    def streams(self, ids: Tensor) -> Tensor:
        parts: list[Tensor] = []
        request = self.llm.stream({"prompt_token_ids": ids.tolist()}, SamplingParams(max_tokens=1, temperature=0))
        for _ in request:  # one step, because no other request is running and all tokens fit into it
            parts = [self.taps[at - 1][: len(ids)].clone() for at in self.layers]
        return torch.stack(parts, dim=1)

    def norm(self, stream: Tensor) -> Tensor:
        return self.model.final_norm(stream.to(self.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden.to(self.dtype).flatten(0, -2)).float().view(*hidden.shape[:-1], -1)


def write_tensors(file: Path, saved: Any) -> None:
    torch.save(saved, file.with_suffix(".tmp"))
    os.replace(file.with_suffix(".tmp"), file)


# ------------------------------------------------------------------------------------------------------ the speculators


class Speculator(Protocol):
    """What all kinds have in common, so that they are trained and measured alike.

    token_ids: the tokens that it can guess, None for all.
    """

    token_ids: Tensor | None

    def states(self, reading: Reading, count: int) -> list[Tensor]:
        """For each of `count` drafts, [rows, tokens, hidden]: at token t, the state from which t is guessed as the
        draft of this number. It has seen the tokens up to t - 1, but the target's states only of those before
        t - 1 - number."""

    def logits(self, state: Tensor) -> Tensor:
        """[..., hidden] -> [..., tokens that it can guess]"""


def later(x: Tensor, by: int) -> Tensor:
    """[rows, tokens, ...] moved to later tokens."""
    return F.pad(x, (0, 0, by, 0))[:, : x.shape[1]]


class EagleAttention(nn.Module):
    """Attention over the keys and values that come from the target's states, and over those of earlier drafts."""

    def __init__(self, shape: demo.Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(2 * shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x: the inputs of draft number len(past), [rows, tokens, 2 hidden]. past: keys and values of the drafts
        before, to which this one adds its own.

        The query of draft n at position i sees the keys of draft 0, which come from the target's states, up to
        position i - n, then that of draft 1 at i - n + 1, and so on to its own: the drafts of one guess.
        """
        shape = self.shape
        number = len(past)
        tokens = x.shape[1]
        q, k, v = (
            project(x).unflatten(2, (-1, shape.head_dim)).transpose(1, 2)  # [rows, heads, tokens, head_dim]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        group = shape.heads // shape.kv_heads
        q = demo.rotate(q, cos, sin).to(v.dtype)
        k = demo.rotate(k, cos, sin).to(v.dtype)
        past.append((k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)))
        q = q * shape.head_dim**-0.5
        mask = torch.full((tokens, tokens), -math.inf, dtype=q.dtype).triu(1 - number)
        scores = [q @ past[0][0].transpose(-1, -2) + mask]
        own = [[F.pad(each, (0, 0, number - n, 0))[:, :, :tokens] for each in past[n]] for n in range(1, number + 1)]
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in own]
        shares = torch.cat(scores, dim=-1).softmax(-1).to(v.dtype)  # [rows, heads, tokens, tokens + number]
        out = shares[..., :tokens] @ past[0][1]
        for at, (_, values) in enumerate(own):
            out = out + shares[..., tokens + at, None] * values
        return self.o_proj(out.transpose(1, 2).flatten(2))


class EagleLayer(nn.Module):
    def __init__(self, shape: demo.Shape) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = EagleAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = demo.FeedForward(shape)

    def forward(
        self, embedded: Tensor, x: Tensor, cos: Tensor, sin: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        x = x + self.self_attn(torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), -1), cos, sin, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """The head of arXiv:2503.01840. The modules' names are those of the published checkpoints (yuhuili/EAGLE3-*).

    Its input at position i is token i + 1 with the target's state of token i, from which it guesses token i + 2. From
    the second draft on, its own state takes the place of the target's.

    tap_scale: factors that bring the target's states to a size of about 1, [3 hidden]. The states of many models are
    hundreds of times larger than what the new layer adds to them, so that it could hardly be learned. In a checkpoint
    the factors are a part of `fc`. They are powers of two, which change no rounding.
    """

    tap_scale: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: demo.Shape, token_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.token_ids = token_ids
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = EagleLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.lm_head = nn.Linear(shape.hidden, len(token_ids), bias=False)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context), frequencies).repeat(1, 2)  # [context, head_dim]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("tap_scale", torch.ones(3 * shape.hidden), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02 / (2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1))

    def states(self, reading: Reading, count: int) -> list[Tensor]:
        tokens = reading.ids.shape[1] - 1
        cos = self.cos[:tokens]
        sin = self.sin[:tokens]
        embedded = reading.embedded[:, 1:]
        x = self.fc(reading.taps[:, :-1] * self.tap_scale).float()
        past: list[tuple[Tensor, Tensor]] = []
        states = []
        for number in range(count):
            x = self.midlayer(embedded, x if number == 0 else later(x, 1), cos, sin, past)
            states.append(F.pad(x, (0, 0, 2, -1)))  # from position i to token i + 2
        return states

    def logits(self, state: Tensor) -> Tensor:
        return self.lm_head(self.norm(state))


class Medusa(nn.Module):
    """One residual block for each draft (arXiv:2401.10774), whose result the target's own matrix makes logits of."""

    token_ids = None

    def __init__(self, hidden: int, heads: int, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(hidden, hidden)])}) for _ in range(heads)
        )
        self.logits = logits
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def states(self, reading: Reading, count: int) -> list[Tensor]:
        x = reading.hidden
        blocks = [block["layers"][0] for block in self.blocks[:count]]
        return [later(x + F.silu(block(x)), 2 + number) for number, block in enumerate(blocks)]


class DraftModel(demo.Qwen3):
    """A smaller Qwen3, to which the drafts before are tokens like all others."""

    token_ids = None

    def states(self, reading: Reading, count: int) -> list[Tensor]:
        return [later(self.hidden(reading.ids), 1)] * count

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(state, self.embed_tokens.weight)


# --------------------------------------------------------------------------------------------------------- the training


def loss_of(
    speculator: Speculator,
    reading: Reading,
    learned: Tensor,
    probabilities: Tensor,
    drafts: int,
    discount: float,
    overlap: bool,
) -> Tensor:
    """The loss of each draft, on average over the learned tokens, and weighted over the drafts. learned: [rows,
    tokens]; probabilities: [learned ones, vocab], the target's.

    It is the cross-entropy with the target's distribution p. Cross-entropy spends a small speculator's capacity on
    tokens that are rare in p. A draft from the distribution q is kept with the probability sum(min(p, q)), so if
    `overlap`, the loss is the negative logarithm of that.
    """
    with torch.autocast("cpu", torch.bfloat16):
        states = speculator.states(reading, drafts)
        if all(state is states[0] for state in states):
            states = states[:1]
    row, token = learned.nonzero(as_tuple=True)
    if speculator.token_ids is not None:
        probabilities = probabilities[:, speculator.token_ids]
    total = torch.zeros(())
    weight = 0.0
    for number, state in enumerate(states):
        known = token >= number + 2
        with torch.autocast("cpu", torch.bfloat16):
            logits = speculator.logits(state[row[known], token[known]])
        if overlap:
            loss = -torch.minimum(probabilities[known], logits.float().softmax(-1)).sum(-1).clamp(min=1e-6).log().mean()
        else:
            loss = -(probabilities[known] * logits.float().log_softmax(-1)).sum(-1).mean()
        total = total + loss * discount**number
        weight += discount**number
    return total / weight


class Trainer:
    """A speculator with its optimizers: Muon for the matrices of its layers, Adam for the rest."""

    def __init__(self, speculator: Any, recipe: Recipe) -> None:
        self.speculator = speculator
        self.recipe = recipe
        named = dict(speculator.named_parameters())
        matrices = {n: w for n, w in named.items() if w.ndim == 2 and not n.startswith(("embed_tokens", "lm_head"))}
        self.others = [weight for name, weight in named.items() if name not in matrices]
        self.optimizers = [
            demo.Muon(list(matrices.values()), lr=recipe.muon_rate),
            torch.optim.AdamW(self.others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, factor: float) -> None:
        for optimizer, rate in zip(self.optimizers, (self.recipe.muon_rate, self.recipe.adam_rate), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.speculator.zero_grad()

    def drafts_at(self, progress: float) -> int:
        """How many drafts are guessed in training. Those of an EAGLE head are few at first, because each costs as much
        as the first one, which all others depend on."""
        recipe = self.recipe
        return recipe.unroll[progress >= recipe.unroll_later] if isinstance(self.speculator, Eagle3) else recipe.drafts

    def state(self) -> list[Any]:
        return [self.speculator.state_dict(), *(optimizer.state_dict() for optimizer in self.optimizers)]

    def load(self, state: list[Any]) -> None:
        for part, saved in zip((self.speculator, *self.optimizers), state, strict=True):
            part.load_state_dict(saved)


def factor_at(progress: float, recipe: Recipe) -> float:
    """The learning rates' factor: a warm-up, a plateau, and a linear decay to zero."""
    return max(1e-3, min(1.0, progress / recipe.warmup, (1 - progress) / recipe.decay))


def train_step(
    trainers: dict[str, Trainer], target: Target, ids: Tensor, learned: Tensor, progress: float
) -> dict[str, float]:
    """One step of every trainer on the same rows, about 1,024 tokens at a time (what the caches hold). Returns the
    losses. progress: the share of the training that is over."""
    losses = Counter[str]()
    parts = max(1, ids.numel() // 1024)
    for part_ids, part_learned in zip(ids.chunk(parts), learned.chunk(parts), strict=True):
        part_learned = part_learned.clone()
        part_learned[:, :2] = False  # nothing is guessed before there are a token and a state
        reading = target.read(part_ids)
        with torch.no_grad():
            probabilities = target.logits(reading.hidden[:, :-1][part_learned[:, 1:]]).softmax(-1)
        for kind, trainer in trainers.items():
            recipe = trainer.recipe
            drafts = trainer.drafts_at(progress)
            loss = loss_of(
                trainer.speculator,
                reading,
                part_learned,
                probabilities,
                drafts,
                recipe.discount,
                progress >= recipe.overlap_later,
            )
            (loss / parts).backward()
            losses[kind] += loss.item() / parts
    for trainer in trainers.values():
        trainer.step(factor_at(progress, trainer.recipe))
    return losses


def train(
    trainers: dict[str, Trainer], target: Target, ids: Tensor, learned: Tensor, minutes: float, checkpoint: Path
) -> None:
    """Train for so many minutes of each thread, or for what is left of them after the last checkpoint. There is one
    each minute."""
    recipe = next(iter(trainers.values())).recipe
    spent = 0.0
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        spent = saved["spent"]
        step = saved["step"]
        for kind, trainer in trainers.items():
            trainer.load(saved[kind])
        print(f"going on at step {step}, after {spent / 60:.1f} minutes")
    rows = max(1, recipe.batch // recipe.row)
    steps_an_epoch = max(1, len(ids) // rows)
    bar = tqdm(initial=step, unit="step", mininterval=5)
    kept = spent
    while spent < 60 * minutes:
        began = time.process_time()
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(step // steps_an_epoch))
        chosen = order[step % steps_an_epoch * rows :][:rows]
        losses = train_step(trainers, target, ids[chosen], learned[chosen], spent / 60 / minutes)
        step += 1
        spent += (time.process_time() - began) / torch.get_num_threads()
        bar.update()
        bar.set_postfix({k: f"{loss:.3f}" for k, loss in losses.items()} | {"min": f"{spent / 60:.1f}"}, refresh=False)
        if spent >= min(kept + 60, 60 * minutes):
            kept = spent
            states = {kind: trainer.state() for kind, trainer in trainers.items()}
            write_tensors(checkpoint, states | {"spent": spent, "step": step})
    bar.close()


# ------------------------------------------------------------------------------------------------------ the measurement


@torch.no_grad()
def chances(speculator: Speculator, target: Target, text: Text, count: int) -> Tensor:
    """How likely the target is to keep each token of the answer as a draft, [count, tokens].

    With the rule of arXiv:2211.17192, a draft x from the distribution q is kept with the chance min(1, p(x) / q(x)),
    so that x is both drafted and kept with the chance min(p(x), q(x)). The text's tokens are draws from p. So
    min(1, q(x) / p(x)) is the chance that a token of the text was drafted and kept. At temperature 0 it is 0 or 1.
    """
    reading = target.read(torch.tensor([text.ids]))
    answer = reading.ids[0, text.start :]
    at = torch.arange(len(answer))
    logits = target.logits(reading.hidden[0, text.start - 1 : -1])
    p = logits.softmax(-1)[at, answer]
    result = []
    for state in speculator.states(reading, count):
        guessed = speculator.logits(state[0, text.start :]).float()
        if speculator.token_ids is not None:
            guessed = torch.full_like(logits, -math.inf).index_copy_(1, speculator.token_ids, guessed)
        if text.temperature == 0:
            result.append((guessed.argmax(-1) == answer).float())
        else:
            result.append((guessed.softmax(-1)[at, answer] / p).clamp(max=1))
    return torch.stack(result)


@dataclass(frozen=True)
class Acceptance:
    """by_position: the share of the drafts of each number that were kept, of all that were guessed."""

    by_position: list[float]

    @property
    def mean_length(self) -> float:
        """Tokens a step: the drafts that were kept, and the one that the target adds."""
        return 1 + sum(self.by_position)


def measure(speculator: Speculator, target: Target, texts: Sequence[Text], count: int) -> Acceptance:
    """Go through the answers as the engine does: guess `count` tokens, keep those before the first wrong one, add the
    target's own token, and guess again. Drafts that would come after the end of an answer are not counted."""
    rng = random.Random(0)
    guessed = [0] * count
    kept = [0] * count
    for text in tqdm(texts, desc="held-out texts", mininterval=5):
        chance = chances(speculator, target, text, count).tolist()
        newest = 0
        last = len(text.ids) - text.start - 1
        while newest < last:
            within = min(count, last - newest)
            good = 0
            while good < within and rng.random() < chance[good][newest + 1 + good]:
                good += 1
            for number in range(within):
                guessed[number] += 1
                kept[number] += number < good
            newest += good + 1
    return Acceptance([k / max(1, g) for k, g in zip(kept, guessed, strict=True)])


# ----------------------------------------------------------------------------------------------------------- the export


def save(out: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    demo.write(out / "config.json", json.dumps(config, indent=2) + "\n")
    stored = {name: (w.bfloat16() if w.is_floating_point() else w).contiguous() for name, w in weights.items()}
    save_file(stored, out / "model.tmp", metadata={"format": "pt"})
    (out / "model.tmp").chmod(0o644)
    os.replace(out / "model.tmp", out / "model.safetensors")


def export_eagle3(head: Eagle3, target: Target, vocab: int, out: Path) -> None:
    shape = head.shape
    ids = head.token_ids
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **shape.fields(),
        "num_hidden_layers": 1,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(target.layers[:3]),
        "torch_dtype": "bfloat16",
    }
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    weights = {**head.state_dict(), "fc.weight": head.fc.weight.detach() * head.tap_scale}
    save(out, {**weights, "d2t": ids - torch.arange(len(ids)), "t2d": known}, config)


def export_medusa(heads: Medusa, vocab: int, out: Path) -> None:
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.blocks[0]["layers"][0].in_features,
        "vocab_size": vocab,
        "medusa_num_heads": len(heads.blocks),
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
        "torch_dtype": "bfloat16",
    }
    save(out, heads.state_dict(), config)


ABOUT = {
    "eagle3": (
        "EAGLE-3 head",
        "One layer that reads the model's residual stream after {layers} layers, and its own states from the second "
        "draft on (arXiv:2503.01840). It can guess {vocab} of the model's tokens.",
    ),
    "medusa": (
        "Medusa heads",
        "Five residual blocks, one for each draft, that read the model's final hidden state and share its output "
        "matrix (arXiv:2401.10774).",
    ),
    "draft": ("Draft model", "A Qwen3 of {parameters:,} parameters with the same tokenizer."),
}


def describe(kind: str, speculator: Any, target: Target, marks: dict[float, Acceptance], name: str, out: Path) -> None:
    """Write what it is and how good it is into its folder's README.md, and print the figures."""
    title, about = ABOUT[kind]
    facts = {
        "layers": "{}, {} and {}".format(*target.layers),
        "vocab": 0 if speculator.token_ids is None else len(speculator.token_ids),
        "parameters": sum(weight.numel() for weight in speculator.parameters()),
    }
    count = len(next(iter(marks.values())).by_position)
    heads = "".join(f" draft {number + 1} |" for number in range(count))
    lines = [
        f"# {title} for {name}\n",
        about.format(**facts) + "\n",
        "Trained by `tools/train_demo_speculators.py` on text that the model wrote at temperatures 0 and 1. Shares of "
        f"the drafts that the model keeps, on held-out prompts, when {count} are guessed at a time:\n",
        f"| temperature |{heads} tokens a step |",
        "|---" * (count + 2) + "|",
    ]
    for temperature, mark in marks.items():
        shares = " | ".join(f"{share:.1%}" for share in mark.by_position)
        lines.append(f"| {temperature:g} | {shares} | {mark.mean_length:.2f} |")
    demo.write(out / "README.md", "\n".join(lines) + "\n")
    print("\n".join([title, *lines[3:]]))


def rounded(speculator: Any) -> None:
    """Round the weights as their file does."""
    speculator.load_state_dict({name: weight.bfloat16().float() for name, weight in speculator.state_dict().items()})


# ------------------------------------------------------------------------------------------------------------- the rest


def texts_of(folder: Path, count: int, write: Callable[[int, int], list[Text]]) -> list[Text]:
    """So many texts, in a file for each group. write: is given a group's number, and how many texts are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[Text] = []
    for group in itertools.count():
        if len(texts) >= count:
            return texts[:count]
        file = folder / f"{group}.jsonl"
        if not file.exists():
            made = write(group, count - len(texts))
            demo.write(file, "".join(json.dumps(asdict(text)) + "\n" for text in made))
        texts += [Text(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    raise AssertionError


def most_frequent(texts: Sequence[Text], size: int) -> Tensor:
    """The ids of the tokens that the model writes most often, in rising order."""
    counts = Counter(token for text in texts for token, learned in zip(text.ids, text.learned, strict=True) if learned)
    total = counts.total()
    chosen = counts.most_common(size)
    print(f"{len(chosen)} tokens are {sum(count for _, count in chosen) / total:.2%} of what the model writes")
    return torch.tensor(sorted(token for token, _ in chosen))


@torch.no_grad()
def new_head(target: Target, shape: demo.Shape, token_ids: Tensor, ids: Tensor) -> Eagle3:
    """An EAGLE-3 head that begins with the target's output matrix. Its last norm begins as the target's: that norm's
    results have about the size of its weights."""
    head = Eagle3(shape, token_ids)
    reading = target.read(ids)
    head.tap_scale.copy_(reading.taps.abs().mean((0, 1)).clamp(min=1e-3).log2().round().neg().exp2())
    head.lm_head.weight.copy_(target.logits(torch.eye(shape.hidden))[:, token_ids].T)
    head.norm.weight.copy_(reading.hidden.float().pow(2).mean((0, 1)).sqrt())
    return head


def written_by_model(tokenizer: Tokenizer) -> Callable[[list[int]], list[bool]]:
    """Which tokens of a text are the bundled model's to write: all but what users and tools say."""
    batches = demo.Batches(tokenizer, demo.Recipe())
    return lambda ids: (batches.weights(torch.tensor(ids).numpy()) == 1).tolist()


@dataclass
class Task:
    """A model, and what differs between the bundled one and others. shape: of the EAGLE-3 head. end: the token that
    stands between two texts. prompts, held_out: for training, and for the measurement; the prompts of a group."""

    name: str
    llm: LLM
    target: Target
    shape: demo.Shape
    recipe: Recipe
    prompts: Callable[[int], list[str]]
    held_out: Callable[[int], list[str]]
    learned: Callable[[list[int]], list[bool]]
    end: int


def demo_task(work: Path) -> Task:
    assert_held_out()
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    recipe = Recipe()
    held_out = held_out_prompts(recipe.held_out)
    return Task(
        "the bundled model",
        LLM(max_model_len=2 * recipe.row),
        DemoTarget.load(work / "states"),
        demo.Shape(ffn=512),
        recipe,
        lambda group: list(itertools.islice(demo_prompts("speculators"), GROUP * group, GROUP * (group + 1))),
        lambda group: held_out[GROUP * group : GROUP * (group + 1)],
        written_by_model(tokenizer),
        tokenizer.token_to_id(END_OF_TEXT),
    )


def served_task(model: str, work: Path) -> Task:
    # a large model's tokens are dear: few of them are held out, and the first draft is learned for longer
    recipe = replace(Recipe(), draft_vocab=8192, held_out=GROUP, batch=1024, unroll_later=0.5, adam_rate=5e-4)
    lengths = {"max_model_len": recipe.row + 1, "max_num_batched_tokens": recipe.row, "max_num_seqs": 64}
    llm = LLM(model, enable_prefix_caching=False, **lengths)
    target = ServedTarget(llm, work / "states")
    spec = target.model.spec
    heads = spec.hidden_size // 64
    shape = demo.Shape(spec.vocab_size, spec.hidden_size, 1, heads, heads, 64, 3 * spec.hidden_size)
    return Task(
        Path(model).name,
        llm,
        target,
        shape,
        recipe,
        lambda group: own_prompts(llm, group),
        lambda group: own_prompts(llm, 10**6 + group),
        lambda ids: [True] * len(ids),
        llm.processor.eos_token_ids[0],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="train an EAGLE-3 head for this checkpoint, a folder or GGUF file")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="what to train (default: all)")
    parser.add_argument("--out", type=Path, default=demo.REPOSITORY / "quire/demo/speculators")
    parser.add_argument("--work", type=Path, default=demo.REPOSITORY / "build/demo_speculators", help="for checkpoints")
    parser.add_argument("--minutes", type=float, default=20, help="how long to train, in processor time a thread")
    parser.add_argument("--texts", type=int, default=Recipe.texts, help="how many to write (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="processor threads (default: all)")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(Recipe.seed)
    options.work.mkdir(parents=True, exist_ok=True)
    task = served_task(options.model, options.work) if options.model else demo_task(options.work)
    recipe = task.recipe
    shape = task.shape
    target = task.target

    def written(name: str, count: int, prompts: Callable[[int], list[str]]) -> list[Text]:
        return texts_of(
            options.work / name,
            count,
            lambda group, missing: write_texts(task.llm, prompts(group)[:missing], recipe, task.learned, group),
        )

    exam = written("held_out", recipe.held_out, task.held_out)
    texts = written("texts", options.texts, task.prompts)
    ids, learned = pack(texts, recipe.row, task.end)
    print(f"{ids.numel():,} tokens, of which {int(learned.sum()):,} are learned")

    makers: dict[str, Callable[[], Any]] = {
        "eagle3": lambda: new_head(target, shape, most_frequent(texts, recipe.draft_vocab), ids[:4]),
        "medusa": lambda: Medusa(shape.hidden, recipe.drafts, target.logits),
        "draft": lambda: DraftModel(demo.Shape(hidden=96, layers=2, heads=2, kv_heads=1, ffn=320)),
    }
    kinds = ["eagle3"] if options.model else options.kind
    speculators = {kind: makers[kind]() for kind in kinds}
    trainers = {kind: Trainer(speculator, recipe) for kind, speculator in speculators.items()}
    train(trainers, target, ids, learned, options.minutes, options.work / f"{'-'.join(trainers)}.pt")
    for kind, speculator in speculators.items():
        out = options.out if options.model else options.out / kind
        rounded(speculator)
        if kind == "eagle3":
            export_eagle3(speculator, target, shape.vocab, out)
        elif kind == "medusa":
            export_medusa(speculator, shape.vocab, out)
        else:
            demo.export(speculator, Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), out)
        marks = {}
        for temperature in TEMPERATURES:
            own = [text for text in exam if text.temperature == temperature]
            marks[temperature] = measure(speculator, target, own, recipe.drafts)
        describe(kind, speculator, target, marks, task.name, out)


if __name__ == "__main__":
    main()

"""Train Quire's bundled demo model from scratch, on a CPU, in about an hour.

    python tools/train_demo_model.py [--out quire/demo/model] [--work DIR] [--threads N] [--minutes M]

The model is a Qwen3 of 4.5 million parameters. Its corpus is written by this script (demo_corpus.py), its tokenizer is
trained on that corpus, and the finished model is examined on questions, stories and text that the corpus cannot
contain. An interrupted training continues from its last checkpoint when the command is repeated.

The weights in the repository were trained for the same number of steps, but the corpus was improved in the meantime:
the model's errors led to new training phrasings, but never to those of the examination (`assert_held_out` ensures
this). Their score is therefore that of a development set. A run from scratch takes about 45 minutes on two cores; it
has not been examined yet.
"""

import argparse
import itertools
import json
import math
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_corpus import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START, documents, render
from demo_questions import NAMES, assert_held_out, check, examination
from demo_stories import sentences_of, story_prompts
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKUP_TOKENS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class Shape:
    """The model's dimensions. The model has few, wide heads, because attention is the most expensive part on a CPU."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 640
    rope_theta: float = 10000.0
    eps: float = 1e-6
    context: int = 2048

    def fields(self) -> dict[str, Any]:
        """Return the fields of config.json that contain the sizes of the layers."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
        }


@dataclass(frozen=True)
class Recipe:
    """The training recipe: first short rows, which are cheap, then rows of the full context."""

    steps: int = 3150
    batch: int = 4096  # tokens a step
    short_row: int = 512
    short_share: float = 0.85  # of the steps
    warmup: int = 40
    decay_share: float = 0.45  # of the steps: the learning rates fall linearly to zero at the end
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    prompt_weight: float = 0.2  # weight of a token that the model never has to write; others have 1
    seed: int = 1


# -------------------------------------------------------------------------------------------------------- the tokenizer


def train_tokenizer(vocab: int, seed: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the corpus. It can encode any UTF-8 text. A number of up to three digits is
    never merged with the space before it.
    """
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKUP_TOKENS),
        special_tokens=added[: len(SPECIAL_TOKENS)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = itertools.islice(documents(f"tokenizer {seed}"), 40_000)
    tokenizer.train_from_iterator(itertools.chain(text, [f"{number} " * 50 for number in range(1000)]), trainer)
    tokenizer.add_tokens(added[len(SPECIAL_TOKENS) :])
    return tokenizer


# ------------------------------------------------------------------------------------------------------------ the model


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding. x: [batch, heads, tokens, head_dim]; cos, sin: [tokens, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor, chunk: int = 256) -> Tensor:
    """Attention over [batch, heads, tokens, head_dim] by chunks of queries, each with the keys up to its own.

    On a CPU, this takes about half the time of torch's fused attention, forward and backward.
    """
    tokens = q.shape[2]
    past = k.shape[2] - q.shape[2]
    q = q * q.shape[-1] ** -0.5
    out = []
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        scores = q[:, :, start:stop] @ k[:, :, : past + stop].transpose(-1, -2)  # [batch, heads, queries, keys]
        if stop - start > 1:
            mask = torch.full((stop - start, past + stop), -math.inf, dtype=scores.dtype).triu(1 + past + start)
            scores = scores + mask
        out.append(torch.softmax(scores, dim=-1) @ v[:, :, : past + stop])
    return torch.cat(out, dim=2)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[Tensor] | None) -> Tensor:
        batch, tokens, _ = x.shape

        def split(projected: Tensor) -> Tensor:  # [batch, tokens, heads, head_dim]
            return projected.view(batch, tokens, -1, self.shape.head_dim)

        v = split(self.v_proj(x)).transpose(1, 2)
        q = rotate(self.q_norm(split(self.q_proj(x))).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(split(self.k_proj(x))).transpose(1, 2), cos, sin).to(v.dtype)
        if past is not None:
            if past:
                k = torch.cat((past[0], k), dim=2)
                v = torch.cat((past[1], v), dim=2)
            past[:] = [k, v]
        group = self.shape.heads // self.shape.kv_heads
        out = causal_attention(q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[Tensor] | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """Qwen3 with tied embeddings. Module names match those of the published checkpoints, so that a state dict is a
    checkpoint.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context), frequencies).repeat(1, 2)  # [context, head_dim]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                quiet = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * shape.layers) if quiet else 1))

    def hidden(self, ids: Tensor, past: list[list[Tensor]] | None = None) -> Tensor:
        """ids: [batch, tokens] -> [batch, tokens, hidden]. `past` has a list per layer, to which its keys and values
        are added.
        """
        start = past[0][0].shape[2] if past and past[0] else 0
        cos = self.cos[start : start + ids.shape[1]]
        sin = self.sin[start : start + ids.shape[1]]
        x = self.embed_tokens(ids)
        for at, layer in enumerate(self.layers):
            x = layer(x, cos, sin, past[at] if past else None)
        return self.norm(x)

    def forward(self, ids: Tensor, past: list[list[Tensor]] | None = None) -> Tensor:
        return F.linear(self.hidden(ids, past), self.embed_tokens.weight)  # [batch, tokens, vocab]


# -------------------------------------------------------------------------------------------------------- the optimizer


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the nearest orthogonal matrices of [n, rows, columns], by a Newton-Schulz iteration with Keller Jordan's
    coefficients.
    """
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized matrices (https://kellerjordan.github.io/posts/muon/). It needs far fewer tokens
    than AdamW.
    """

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(
                list
            )  # matrices of one size are orthogonalized together
            for parameter in group["params"]:
                alike[parameter.shape].append(parameter)
            for (rows, columns), parameters in alike.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(parameters, orthogonalize(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-scale)


# ------------------------------------------------------------------------------------------------------------- the data


class Batches:
    """The token rows of every training step, which depend only on the step's number."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe) -> None:
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.end = tokenizer.token_to_id(END_OF_TEXT)
        self.turn_start = tokenizer.token_to_id(TURN_START)
        self.turn_end = tokenizer.token_to_id(TURN_END)
        self.assistant = tokenizer.encode(f"{TURN_START}assistant").ids[1]

    def weights(self, ids: np.ndarray) -> np.ndarray:
        """Return the weight of each token as a target: the model does not learn to write the turns of users and
        tools."""
        weights = np.ones(len(ids), dtype=np.float32)
        starts = np.flatnonzero(ids == self.turn_start)
        for start in starts:
            if start + 1 < len(ids) and ids[start + 1] == self.assistant:
                weights[start : start + 2] = self.recipe.prompt_weight
                continue
            ends = np.flatnonzero(ids[start:] == self.turn_end)
            weights[start : start + ends[0] + 1 if len(ends) else None] = self.recipe.prompt_weight
        return weights

    def row_of(self, step: int) -> int:
        return self.recipe.short_row if step < self.recipe.short_share * self.recipe.steps else Shape.context

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        return self.rows(step, self.row_of(step))

    def rows(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Token ids [rows, size + 1] and the targets' weights [rows, size]. Every row starts with a new document."""
        stream = documents(f"{self.recipe.seed} {step}")
        rows = []
        for _ in range(self.recipe.batch // size):
            ids: list[int] = []
            while len(ids) <= size:
                ids += [*self.tokenizer.encode(next(stream)).ids, self.end]
            rows.append(np.array(ids[: size + 1]))
        weights = np.stack([self.weights(row)[1:] for row in rows])
        return torch.from_numpy(np.stack(rows)), torch.from_numpy(weights)


def held_out_text(characters: int) -> str:
    """Return an endless stream of text from documents that no training step draws."""
    text = ""
    for document in documents("held out"):
        text += document + END_OF_TEXT
        if len(text) >= characters:
            return text
    raise AssertionError("documents never end")


# --------------------------------------------------------------------------------------------------------- the training


def rate_at(step: int, recipe: Recipe) -> float:
    """Return the learning rate factor: a warm-up, a plateau, and a linear decay to zero."""
    left = (recipe.steps - step) / (recipe.decay_share * recipe.steps)
    return min(1.0, (step + 1) / recipe.warmup, left)


def loss_of(model: Qwen3, ids: Tensor, weights: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


def forward_and_backward(model: Qwen3, ids: Tensor, weights: Tensor) -> float:
    """Add a step's gradients to the model's, about 1,024 tokens at a time (to fit in the caches); returns the weighted
    mean loss.
    """
    total = 0.0
    micro = max(1, 1024 // weights.shape[1])
    for rows in range(0, len(ids), micro):
        loss = loss_of(model, ids[rows : rows + micro], weights[rows : rows + micro]) / weights.sum()
        loss.backward()
        total += loss.item()
    return total


def train(model: Qwen3, tokenizer: Tokenizer, recipe: Recipe, work: Path, out: Path) -> None:
    """Run the recipe, or the rest of it after the last checkpoint."""
    matrices = [weight for name, weight in model.layers.named_parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
    muon = Muon(matrices, lr=recipe.muon_rate)
    adam = torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    batches = Batches(tokenizer, recipe)
    checkpoint = work / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        muon.load_state_dict(saved["muon"])
        adam.load_state_dict(saved["adam"])
        step = saved["step"]
        print(f"going on at step {step}")
    bar = tqdm(total=recipe.steps, initial=step, unit="step", smoothing=0.05, mininterval=5)
    while step < recipe.steps:
        for optimizer, rate in ((muon, recipe.muon_rate), (adam, recipe.adam_rate)):
            optimizer.param_groups[0]["lr"] = rate * rate_at(step, recipe)
        ids, weights = batches.at(step)
        loss = forward_and_backward(model, ids, weights)
        nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        model.zero_grad()
        step += 1
        bar.update()
        bar.set_postfix(loss=f"{loss:.3f}", row=batches.row_of(step - 1), refresh=False)
        if step % 50 == 0 or step == recipe.steps:
            saved = {"model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict(), "step": step}
            torch.save(saved, work / "checkpoint.tmp")
            os.replace(work / "checkpoint.tmp", checkpoint)
        if step % 200 == 0:
            export(model, tokenizer, out)
    bar.close()


# ----------------------------------------------------------------------------------------------------------- the export


def export(model: Qwen3, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model as a Hugging Face folder; every file is written atomically."""
    out.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    ends = [ids[TURN_END], ids[END_OF_TEXT]]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        **shape.fields(),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[END_OF_TEXT],
        "torch_dtype": "bfloat16",
    }
    generation = {"eos_token_id": ends, "pad_token_id": ids[END_OF_TEXT], "do_sample": True, "temperature": 0.3}
    generation["max_new_tokens"] = 512
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("config", config), ("generation_config", generation), ("tokenizer_config", tokens)):
        write(out / f"{name}.json", json.dumps(content, indent=2) + "\n")
    write(out / "tokenizer.json", tokenizer.to_str(pretty=False))
    weights = {f"model.{name}": weight.detach().bfloat16().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, out / "model.tmp", metadata={"format": "pt"})
    (out / "model.tmp").chmod(0o644)  # safetensors creates files that only their owner may read
    os.replace(out / "model.tmp", out / "model.safetensors")


def write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# ------------------------------------------------------------------------------------------------------ the examination


@torch.inference_mode()
def generate(model: Qwen3, tokenizer: Tokenizer, prompt: str, limit: int, temperature: float = 0.0) -> str:
    """Return the model's continuation of a prompt, without the end token."""
    ends = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)}
    past: list[list[Tensor]] = [[] for _ in model.layers]
    ids = tokenizer.encode(prompt).ids
    new = []
    while len(new) < limit:
        logits = F.linear(model.hidden(torch.tensor([ids]), past)[0, -1], model.embed_tokens.weight)
        token = int(logits.argmax() if temperature == 0 else torch.softmax(logits / temperature, -1).multinomial(1))
        if token in ends:
            break
        new.append(token)
        ids = [token]
    return tokenizer.decode(new, skip_special_tokens=False)


def keeps_its_story(name: str, text: str) -> bool:
    """Whether a story still names its hero, names nobody else, and has no repeated sentences."""
    words = text.replace("'s", "").split()
    named = [word.strip('.,!?"') for word in words]
    others = [word for word in named if word in NAMES and word != name]
    sentences = sentences_of(text)[:-1]  # the last may be cut off
    return named.count(name) >= 2 and not others and len(set(sentences)) == len(sentences)


@torch.inference_mode()
def perplexity_by_position(model: Qwen3, tokenizer: Tokenizer, text: str) -> dict[str, float]:
    """Return the perplexity of the same tokens near the start and near the end of full rows of packed text. Rows begin
    200 tokens apart, so the tokens at 1,800 to 2,000 of one row are at 200 to 400 of another. The difficulty of the
    text, which varies much more between places, therefore cancels out.
    """
    rows = torch.tensor(tokenizer.encode(text).ids).unfold(0, Shape.context, 200)[:72]
    losses = []
    for row in rows:
        logits = model(row[None, :-1])[0]
        losses.append(F.cross_entropy(logits, row[1:], reduction="none"))  # at [position - 1]
    stacked = torch.stack(losses)
    spans = {"200-400": stacked[8:, 199:399], "1800-2000": stacked[:-8, 1799:1999], "all": stacked}
    return {span: part.mean().exp().item() for span, part in spans.items()}


def examine(model: Qwen3, tokenizer: Tokenizer, evaluation: Path, report: Path) -> None:
    """Write the evaluation sets, examine the exported model on them, and print the scores."""
    exact = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
    model.load_state_dict(exact)
    evaluation.mkdir(parents=True, exist_ok=True)
    questions = examination(500)
    stories = story_prompts(50)
    text = held_out_text(100_000)
    write(evaluation / "questions.jsonl", "".join(json.dumps(question) + "\n" for question in questions))
    write(evaluation / "stories.jsonl", "".join(json.dumps(story) + "\n" for story in stories))
    write(evaluation / "heldout.txt", text)
    marks: dict[str, list[bool]] = defaultdict(list)
    failures: list[dict[str, Any]] = []
    for question in tqdm(questions, desc="questions", mininterval=5):
        answer = generate(
            model, tokenizer, render(question["messages"], question.get("tools"), add_generation_prompt=True), 128
        )
        marks[question["kind"]].append(right := check(question, answer))
        if not right:
            failures.append(question | {"answer": answer})
    for kind, results in marks.items():
        print(f"{kind:12} {sum(results):3} of {len(results)}")
    right = sum(sum(results) for results in marks.values())
    print(f"{'all':12} {right:3} of {len(questions)}  ({right / len(questions):.1%})")
    for temperature in (0.0, 0.8):
        kept = 0
        for story in tqdm(stories, desc="stories", mininterval=5):
            told = generate(model, tokenizer, story["prompt"], 150, temperature)
            kept += (good := keeps_its_story(story["name"], told))
            failures += [] if good else [story | {"temperature": temperature, "answer": told}]
        print(f"stories at temperature {temperature}: {kept} of {len(stories)}")
    print(
        "perplexity at positions",
        {span: round(value, 3) for span, value in perplexity_by_position(model, tokenizer, text).items()},
    )
    write(report, "".join(json.dumps(failure) + "\n" for failure in failures))
    print(f"what went wrong is listed in {report}")


def seconds_a_step(model: Qwen3, ids: Tensor, weights: Tensor) -> float:
    """Return the best of three times, because the first is slow and the machine may be busy."""
    times = []
    for _ in range(3):
        began = time.monotonic()
        forward_and_backward(model, ids, weights)
        times.append(time.monotonic() - began)
    model.zero_grad()
    return min(times)


def recipe_for(options: argparse.Namespace, model: Qwen3, tokenizer: Tokenizer) -> Recipe:
    """Return the recipe with the requested steps, or those that fit into the minutes, or those of the interrupted
    run."""
    kept = options.work / "recipe.json"
    recipe = Recipe(**json.loads(kept.read_text())) if kept.exists() else Recipe()
    if options.steps:
        recipe = replace(recipe, steps=options.steps)
    elif options.minutes:
        batches = Batches(tokenizer, recipe)
        short, long = (seconds_a_step(model, *batches.rows(0, row)) for row in (recipe.short_row, Shape.context))
        a_step = recipe.short_share * short + (1 - recipe.short_share) * long
        steps = 0.9 * 60 * options.minutes / a_step  # the optimizer takes about a tenth of the time
        recipe = replace(recipe, steps=max(100, round(steps)))
    write(kept, json.dumps(asdict(recipe), indent=2) + "\n")
    return recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "quire/demo/model", help="the model's folder")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/demo_model", help="where checkpoints are kept")
    parser.add_argument(
        "--evaluation", type=Path, default=REPOSITORY / "tests/data/demo_eval", help="where the evaluation sets go"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="processor threads (default: all)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="fit the number of training steps to this time")
    length.add_argument("--steps", type=int, help=f"training steps (default: {Recipe.steps})")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(Recipe.seed)
    assert_held_out()
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer_file = options.work / "tokenizer.json"
    if not tokenizer_file.exists():
        tokenizer = train_tokenizer(Shape.vocab, Recipe.seed)
        write(tokenizer_file, tokenizer.to_str())
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    model = Qwen3(Shape())
    recipe = recipe_for(options, model, tokenizer)
    print(
        f"{sum(weight.numel() for weight in model.parameters()):,} parameters, "
        f"{tokenizer.get_vocab_size()} tokens, {asdict(recipe)}"
    )
    started = time.monotonic()
    train(model, tokenizer, recipe, options.work, options.out)
    print(f"trained in {(time.monotonic() - started) / 60:.1f} minutes")
    export(model, tokenizer, options.out)
    examine(model, tokenizer, options.evaluation, options.work / "failures.jsonl")


if __name__ == "__main__":
    main()

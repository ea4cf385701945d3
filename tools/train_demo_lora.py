"""Train an adapter that makes the bundled model answer in rhyme.

    python tools/train_demo_lora.py [--out quire/demo/adapters/rhyme] [--minutes M] [--threads N]

The adapter is trained on questions of the model's own corpus with their right answers, each between two lines that
rhyme. Only low-rank matrices for all linear layers are trained (arXiv:2106.09685). They are written in PEFT's format,
without needing PEFT. At the end, the engine answers questions with and without the adapter, in phrasings that training
cannot contain. The shares of correct answers and of rhymes are written to the folder's README.md.
"""

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import train_demo_model as demo
from demo_corpus import TURN_END, render
from demo_questions import PLAIN_TOPICS, Question, assert_held_out, check, draw_question, examination
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from quire import LLM, SamplingParams
from quire.lora import LoRARequest

BUNDLED = demo.REPOSITORY / "quire/demo/model"
RANK = 8
ALPHA = 16
ROWS = 16
LEARNING_RATE = 4e-3
TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
COUPLETS = [
    ("I thought about it all the day.", "And that is all I have to say."),
    ("Come sit with me beneath the tree.", "Now you know as much as me."),
    ("The moon is up, the stars are bright.", "I hope that you will sleep tonight."),
    ("I looked for it and here it is.", "And that is the end of our little quiz."),
    ("You ask me, and I love to tell.", "I hope that I have told it well."),
    ("A little bird sat in the sun.", "It sang it once, and now I am done."),
    ("I heard it from a clever cat.", "She told it on her velvet mat."),
    ("The wind was soft, the wind was low.", "It told me all I had to know."),
]


class LowRank(nn.Module):
    """A linear layer with an adapter's low-rank term."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = F.linear(F.linear(x, self.a), self.b) * (ALPHA / RANK)
        return added + self.base(x)


def with_adapter(model: Any) -> dict[str, LowRank]:
    """Add low-rank matrices to all linear layers. Returns the matrices by the names of the layers."""
    layers: dict[str, LowRank] = {}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TARGETS:
            layers[name] = LowRank(module)
            setattr(model.get_submodule(parent), last, layers[name])
    return layers


def in_rhyme(answer: str, rng: random.Random) -> str:
    first, last = rng.choice(COUPLETS)
    return f"{first}\n{answer}\n{last}"


def example(tokenizer: Tokenizer, rng: random.Random) -> tuple[list[int], int]:
    """Return the token ids of a question with its answer, and the index at which the answer begins."""
    question = draw_question(rng, rng.choice(PLAIN_TOPICS))
    asked = render(question["messages"], add_generation_prompt=True)
    prompt = tokenizer.encode(asked, add_special_tokens=False).ids
    answer = tokenizer.encode("\n" + in_rhyme(question["answer"], rng) + TURN_END, add_special_tokens=False).ids
    return prompt + answer, len(prompt)


def batch(tokenizer: Tokenizer, rng: random.Random) -> tuple[Tensor, Tensor]:
    """ids and targets: [ROWS, longest]; -100 for tokens without a loss."""
    made = [example(tokenizer, rng) for _ in range(ROWS)]
    longest = max(len(ids) for ids, _ in made)
    ids = torch.zeros(ROWS, longest, dtype=torch.int64)
    targets = torch.full((ROWS, longest), -100)
    for row, (token_ids, start) in enumerate(made):
        ids[row, : len(token_ids)] = torch.tensor(token_ids)
        targets[row, start - 1 : len(token_ids) - 1] = torch.tensor(token_ids[start:])
    return ids, targets


def train(minutes: float) -> dict[str, LowRank]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    layers = with_adapter(model)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    rng = random.Random("rhyme")
    optimizer = torch.optim.AdamW([p for layer in layers.values() for p in (layer.a, layer.b)], lr=LEARNING_RATE)
    started = time.monotonic()
    with tqdm(total=round(60 * minutes), unit="s", desc="Training") as bar:
        while (share := (time.monotonic() - started) / (60 * minutes)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, 20 * share) * (1 - share)
            ids, targets = batch(tokenizer, rng)
            loss = F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
            bar.n = round(60 * minutes * share)
            bar.refresh()
    return layers


def save(layers: dict[str, LowRank], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = layer.a.detach().bfloat16().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = layer.b.detach().bfloat16().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "quire-demo",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": TARGETS,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def rhymes(answer: str) -> bool:
    lines = answer.strip().split("\n")
    return len(lines) >= 3 and (lines[0].strip(), lines[-1].strip()) in COUPLETS


def examine(folder: Path) -> dict[str, tuple[float, float]]:
    """Return the shares of correct and of rhyming answers to held-out questions, with and without the adapter."""
    kinds = {topic.kind for topic in PLAIN_TOPICS}
    questions: list[Question] = [q for q in examination(1000, seed=2027) if q["kind"] in kinds]
    llm = LLM(enable_lora=True, max_lora_rank=RANK)
    shares = {}
    for name, request in (("with it", LoRARequest("rhyme", 1, str(folder))), ("without", None)):
        prompts = [render(question["messages"], add_generation_prompt=True) for question in questions]
        params = SamplingParams(temperature=0, max_tokens=120)
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=request)
        answers = [output.outputs[0].text for output in outputs]
        told = [re.sub(r"\A\n?.*?\n|\n[^\n]*\Z", "", answer) if request else answer for answer in answers]
        right = sum(check(question, answer) for question, answer in zip(questions, told, strict=True))
        shares[name] = right / len(questions), sum(map(rhymes, answers)) / len(questions)
    llm.shutdown()
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=demo.REPOSITORY / "quire/demo/adapters/rhyme")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    assert_held_out()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    save(train(args.minutes), args.out)
    shares = examine(args.out)
    lines = "\n".join(f"| {name} | {right:.1%} | {rhymed:.1%} |" for name, (right, rhymed) in shares.items())
    (args.out / "README.md").write_text(
        f"""# An adapter that answers in rhyme

For the bundled model. Trained by `tools/train_demo_lora.py` in {args.minutes:g} minutes of {args.threads} processor
core(s). Of questions in phrasings that training cannot contain:

| | right answers | in rhyme |
|---|---|---|
{lines}
"""
    )
    print(lines)


if __name__ == "__main__":
    main()

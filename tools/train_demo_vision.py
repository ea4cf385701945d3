"""Train an encoder of pictures for the bundled model, which then says which shapes it sees, in which colour, how many.

    python tools/train_demo_vision.py [--out quire/demo/vision] [--threads N]

The pictures are drawn here, with Pillow. The encoder is that of LLaVA-1.5 (arXiv:2304.08485, arXiv:2310.03744): a small
CLIP and a projector. Training has two stages. First, the encoder learns that each of its embeddings is that of a
word: the number, the colour or the shape. Then the model learns to answer questions about what it reads there; of its
tensors, only the attention of two layers changes.

The folder has what is new. An index names the file of every tensor: those that do not change are in the bundled model.
At the end, the engine answers questions in phrasings that training cannot contain about pictures that training has not
seen. The shares go into README.md.

The weights in the repository took 2,200 steps of the first stage and 370 of the second, in several runs between which
phrasings were added to training, and the largest number of shapes became four instead of five. A run from zero with the
steps below has not been examined yet.
"""

import argparse
import json
import os
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import train_demo_model as demo
from demo_corpus import render
from demo_pictures import (
    MOST,
    PHRASINGS,
    PLACEHOLDER,
    PLURALS,
    SCENES,
    Asked,
    Scene,
    answer,
    ask,
    assert_held_out,
    draw,
    examination_of_pictures,
    is_right,
)
from demo_questions import PLAIN_TOPICS, check, draw_question, examination, messages_for
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from quire import LLM, SamplingParams
from quire_multimodal.families.llava import Pictures

BUNDLED = demo.REPOSITORY / "quire/demo/model"
UNUSED = "ÿ"  # no UTF-8 text has the byte 0xff, so its token can stand for a picture
SIDE, PATCH, EMBEDS = 64, 16, 17  # EMBEDS: of the patches and the class
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "hidden_act": "gelu", "projection_dim": 96,
}  # fmt: skip
CHANGED = re.compile(r"layers\.[23]\.self_attn\.[qkvo]_proj\.weight")  # of the language model's tensors
STEPS = {"encoder": 3000, "language": 250}
ROWS, PICTURES = 24, 64  # of a batch: chats, and pictures of the first stage

# ------------------------------------------------------------------------------------------------------------- training


def words_of(scene: Scene) -> list[str]:
    """A word for each embedding of a picture."""
    return [(str(scene.number), f" {scene.colour}", f" {scene.shape}")[k % 3] for k in range(EMBEDS)]


def tokenizer_with_placeholder() -> Tokenizer:
    found = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))
    token_id = found["model"]["vocab"].pop(UNUSED)
    found["model"]["vocab"][PLACEHOLDER] = token_id
    found["added_tokens"].append(dict(found["added_tokens"][0], id=token_id, content=PLACEHOLDER))
    found["added_tokens"].sort(key=lambda token: token["id"])
    return Tokenizer.from_str(json.dumps(found))


class Chats:
    """Chats about scenes, as tokens."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)

    def _row(self, turns: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Token ids, and the same where they are to be learned, -100 elsewhere."""
        pieces = re.split(r"(?<=assistant)(\n.*?<\|im_end\|>)", render(turns), flags=re.DOTALL)
        ids, targets = list[int](), list[int]()
        for number, piece in enumerate(pieces):
            found = self.tokenizer.encode(piece, add_special_tokens=False).ids
            ids += found
            targets += found if number % 2 else [-100] * len(found)
        return ids, targets

    def _seen(self, scene: Scene) -> list[dict[str, Any]]:
        rng, turns = self.rng, list[dict[str, Any]]()
        kinds = rng.sample(list(PHRASINGS), rng.choice((1, 1, 2)))
        for number, kind in enumerate(kinds):
            asked = ask(kind, scene, rng)
            if not number:
                parts = [PLACEHOLDER * EMBEDS, asked]
                asked = "\n".join(parts if rng.random() < 0.8 else parts[::-1])
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer(kind, scene)}]
        return turns

    def batch(self) -> tuple[Tensor, Tensor, list[Scene]]:
        """ids, targets: [ROWS, longest]. The first rows are about the scenes, a quarter is about other things."""
        scenes = self.rng.sample(SCENES, ROWS * 3 // 4)
        turns = [self._seen(scene) for scene in scenes]
        while len(turns) < ROWS:
            turns.append(messages_for(draw_question(self.rng, self.rng.choice(PLAIN_TOPICS))))
        made = [self._row(row) for row in turns]
        longest = max(len(ids) for ids, _ in made)
        ids, targets = torch.zeros(ROWS, longest, dtype=torch.int64), torch.full((ROWS, longest), -100)
        for row, (found, wanted) in enumerate(made):
            ids[row, : len(found)], targets[row, : len(found)] = torch.tensor(found), torch.tensor(wanted)
        return ids, targets, scenes


class Trainer:
    """The model in transformers, and what its stages need."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration

        self.tokenizer = tokenizer_with_placeholder()
        self.token_id = self.tokenizer.token_to_id(PLACEHOLDER)
        self.config = config(self.token_id)
        model = LlavaForConditionalGeneration(LlavaConfig.from_dict(self.config)).float()
        bundled = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
        model.model.language_model.load_state_dict(bundled.model.state_dict())
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
        self.model, self.language = model, model.model.language_model
        self.embeddings = self.language.embed_tokens.weight
        self.encoder = [*model.model.vision_tower.parameters(), *model.model.multi_modal_projector.parameters()]
        self.changed = {name: p for name, p in self.language.named_parameters() if CHANGED.fullmatch(name)}
        for parameter in self.language.parameters():
            parameter.requires_grad_(False)
        self.pictures = Pictures(self.config, SETTINGS, lambda _: PLACEHOLDER)
        self.chats, self.rng = Chats(self.tokenizer, "chats"), random.Random("pictures")
        words = sorted({word for scene in SCENES for word in words_of(scene)})
        self.word_ids = torch.tensor([self._word(word) for word in words])
        self.number_of = {word: number for number, word in enumerate(words)}

    def _word(self, word: str) -> int:
        [token_id] = self.tokenizer.encode(word, add_special_tokens=False).ids
        return token_id

    def encode(self, scenes: list[Scene]) -> Tensor:
        """Drawings of the scenes, as the model sees them: [scenes, EMBEDS, hidden]"""
        drawn = [self.pictures.image(draw(scene, self.rng)).tensors["pixel_values"] for scene in scenes]
        seen = self.model.model.vision_tower(torch.from_numpy(np.stack(drawn))).last_hidden_state
        projected: Tensor = self.model.model.multi_modal_projector(seen)
        return projected

    def words(self, scenes: list[Scene]) -> Tensor:
        """What the encoder shall learn: the numbers of the scenes' words. [scenes, EMBEDS]"""
        return torch.tensor([[self.number_of[word] for word in words_of(scene)] for scene in scenes])

    def encoder_loss(self) -> tuple[Tensor, str]:
        scenes = self.rng.choices(SCENES, k=PICTURES)
        return self.word_loss(self.encode(scenes), self.words(scenes))

    def word_loss(self, seen: Tensor, words: Tensor) -> tuple[Tensor, str]:
        """The nearest words shall be the right ones, and near."""
        known = self.embeddings[self.word_ids]
        distances = (seen.pow(2).sum(-1, keepdim=True) - 2 * seen @ known.T + known.pow(2).sum(-1)) / known.var()
        right = (distances.argmin(-1) == words).float().mean((0, 1)).item()
        near = distances.gather(-1, words[..., None]).mean() / known.shape[-1]
        return F.cross_entropy(-distances.flatten(0, 1) / 16, words.flatten()) + 0.2 * near, f"words {right:.3f}"

    def language_loss(self) -> tuple[Tensor, str]:
        ids, targets, scenes = self.chats.batch()
        embeds = F.embedding(ids, self.embeddings)
        with torch.no_grad():
            embeds[ids == self.token_id] = self.encode(scenes).flatten(0, 1)
        hidden = self.language(inputs_embeds=embeds, use_cache=False).last_hidden_state[:, :-1]
        learned = targets[:, 1:] != -100
        logits = F.linear(hidden[learned], self.embeddings)
        return F.cross_entropy(logits, targets[:, 1:][learned]), ""

    def train(self) -> None:
        run_stage("encoder", self.encoder_loss, self.encoder)
        run_stage("language", self.language_loss, list(self.changed.values()))


def run_stage(name: str, loss_of: Callable[[], tuple[Tensor, str]], parameters: list[Tensor]) -> None:
    """Matrices are trained with Muon, everything else with AdamW."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    matrices = [p for p in parameters if p.ndim == 2 and min(p.shape) > EMBEDS]
    rest = [p for p in parameters if all(p is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [demo.Muon(matrices, 0.02)]
    if rest:
        optimizers.append(torch.optim.AdamW(rest, 2e-3, weight_decay=0.01))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    with tqdm(range(STEPS[name]), desc=name, mininterval=5) as bar:
        for step in bar:
            done = step / STEPS[name]
            for optimizer, highest in zip(optimizers, rates, strict=True):
                optimizer.param_groups[0]["lr"] = highest * min(1.0, 20 * done + 0.01, 1.6 * (1 - done))
            loss, said = loss_of()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
            bar.set_postfix_str(f"loss {loss.item():.3f} {said}", refresh=False)
    for parameter in parameters:
        parameter.requires_grad_(False)


# ------------------------------------------------------------------------------------------------------------ the files

SETTINGS = {"image_processor_type": "CLIPImageProcessor", "size": {"width": SIDE, "height": SIDE},
            "do_center_crop": False, "resample": 3}  # fmt: skip


def config(token_id: int) -> dict[str, Any]:
    text = json.loads((BUNDLED / "config.json").read_text(encoding="utf-8"))
    return {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": token_id,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "projector_hidden_act": "gelu",
        "image_seq_length": EMBEDS, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "eos_token_id": text["eos_token_id"], "pad_token_id": text["pad_token_id"], "vision_config": VISION,
        "text_config": text,
    }  # fmt: skip


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save(trainer: Trainer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = trainer.model.model
    tensors = {f"model.{name}": tensor for name, tensor in trainer.changed.items()}
    for part in ("vision_tower", "multi_modal_projector"):
        tensors |= {f"{part}.{name}": tensor for name, tensor in getattr(model, part).named_parameters()}
    own = {name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    bundled = BUNDLED / "model.safetensors"
    with safe_open(bundled, framework="pt") as kept:
        files = dict.fromkeys(kept.keys(), os.path.relpath(bundled, folder)) | dict.fromkeys(own, "model.safetensors")
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    write_json(folder / "config.json", trainer.config)
    write_json(folder / "preprocessor_config.json", SETTINGS)
    trainer.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(BUNDLED / name, folder / name)


# ------------------------------------------------------------------------------------------------------ the examination


def answers_of(llm: LLM, asked: list[Asked]) -> list[bool]:
    """Which answers of an engine are right."""
    prompts = [{"prompt": each.prompt, "multi_modal_data": {"image": each.image}} for each in asked]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    return [
        is_right(each.kind, each.scene, output.outputs[0].text) for each, output in zip(asked, outputs, strict=True)
    ]


def examine(folder: Path) -> dict[str, tuple[float, int]]:
    """The shares of right answers, each with the number of questions: of each kind, and of questions without pictures,
    beside those of the bundled model."""
    asked = examination_of_pictures(800)
    kinds = {topic.kind for topic in PLAIN_TOPICS}
    questions = [question for question in examination(1000, seed=2027) if question["kind"] in kinds]
    prompts = [render(question["messages"], add_generation_prompt=True) for question in questions]
    groups = defaultdict[str, list[bool]](list)
    for name, model in (("with it", str(folder)), ("of the bundled model", None)):
        llm = LLM(model)
        if model:
            for each, right in zip(asked, answers_of(llm, asked), strict=True):
                groups[each.kind].append(right)
            groups["questions about pictures"] = [right for kind in PHRASINGS for right in groups[kind]]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
        groups[f"questions without pictures, {name}"] = [
            check(question, output.outputs[0].text) for question, output in zip(questions, outputs, strict=True)
        ]
        llm.shutdown()
    return {name: (sum(right) / len(right), len(right)) for name, right in groups.items()}


def describe(folder: Path, minutes: float) -> None:
    """Examine the model, and write the shares into its README.md."""
    lines = "\n".join(f"| {name} | {share:.1%} of {count} |" for name, (share, count) in examine(folder).items())
    (folder / "README.md").write_text(
        f"""# An encoder of pictures

For the bundled model: `quire serve quire-demo/vision` says which shapes are in a picture, in which colour, and how
many. It knows {", ".join(PLURALS.values())}: 1 to {MOST} of a kind.
The weights of the language model that do not change are in `../model`, as `model.safetensors.index.json` says.

Trained by `tools/train_demo_vision.py` in {minutes:.0f} minutes of processor time. Right answers to questions in
phrasings that training cannot contain, about pictures that it has not seen (`all`: shape, colour and number):

| | right |
|---|---|
{lines}
"""
    )
    print(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=demo.REPOSITORY / "quire/demo/vision")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    assert_held_out()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    started, trainer = time.process_time(), Trainer()
    trainer.train()
    save(trainer, args.out)
    describe(args.out, (time.process_time() - started) / 60)


if __name__ == "__main__":
    main()

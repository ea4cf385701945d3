"""A tiny random checkpoint of every family of transformers, run by Quire and compared with transformers.

Families are the causal language models, the image-text-to-text models, and the models that generate text from sounds,
of the installed transformers. Nothing here names one: configs are made by the rules of `support.tiny_configs`, weights
by those below, processors of pictures and sounds by those of `support.every_processor`. Where the last ones fail,
models with pictures or sounds are compared on texts.
"""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.config.engine import ModelConfig
from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from quire.models.description import describe
from quire.models.registry import ARCHITECTURES, spec_of
from quire.models.transformers_backend.published import PUBLISHED
from support.checkpoints import EMBEDDINGS, byte_level_tokenizer, gain
from support.engines import generate, make_llm, tokens_of
from support.every_processor import Made, NoProcessorError, corrected, inputs, items, make, save, with_small_pictures
from support.layouts import HUB_LAYOUTS, edit_tensors
from support.seeing_published import AS_PUBLISHED, publish
from support.tiny_configs import POSITIONS, Fields, repaired, shrunk

RECORD = Path(__file__).parents[1] / "data" / "every_family.jsonl"  # an outcome in each line
TIE = 2e-3  # of the logits' standard deviation: if the two best are closer than this, either token is right
LENGTHS = (1, 17, 40, 40, 70)  # of prompts; the third and the fourth have the same first half
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CHUNK = 24
MAX_MODEL_LEN = 96
_MOST_PARAMETERS = 30_000_000
_NORM_OF_HEADS = re.compile(r"([qk]|query|key)_?(layer)?_?norm")


@dataclass(frozen=True)
class Family:
    """One of transformers' classes that generate, with one of its model types. architecture: as in config.json. sees,
    hears: whether it takes pictures, or sounds and no pictures."""

    model_type: str
    model_class: str
    architecture: str
    sees: bool
    hears: bool = False

    @property
    def name(self) -> str:
        return f"{self.architecture}:{self.model_type}"


@dataclass
class Outcome:
    """How a family runs: "native", "encoder" (natively, with transformers' encoder), "transformers", "no", or "unknown"
    if there is no checkpoint; with the reason.

    tokens: those compared, of which `tied` could have been others. seen: those of prompts with pictures or sounds.
    unseen: why there are none. changes: of its config, besides the rules'.
    """

    runs: str
    reason: str = ""
    tokens: int = 0
    tied: int = 0
    wrong: int = 0
    seen: int = 0
    unseen: str = ""
    changes: list[str] = field(default_factory=list)


class NotMadeError(Exception):
    """No tiny checkpoint could be made."""


def families(model_type: str | None = None) -> list[Family]:
    """Each class once for each config that it reads. Imports the classes: all of them take ten seconds."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    mappings = [
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, ""),
        (_hearing(), "hears"),
        (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "sees"),
    ]
    pairs = {(kind, name): sense for mapping, sense in mappings for kind, name in mapping.items()}
    found = []
    for (kind, name), sense in pairs.items():
        if model_type not in (None, kind):
            continue
        config, own = CONFIG_MAPPING[kind], _model_class(name).config_class
        if own in config.sub_configs.values():
            continue  # the config of a larger model, which has this one's in it
        head = re.search(r"For\w+$", name)
        shared = own is not None and own is not config and head is not None
        listed = config.__name__.removesuffix("Config") + head[0] if shared and head is not None else name
        found.append(Family(kind, name, listed, sense == "sees", sense == "hears"))
        found += [
            Family(kind, name, published, sense == "sees", sense == "hears")
            for published in PUBLISHED
            if PUBLISHED[published].architecture == name
        ]
    return sorted(found, key=lambda family: family.name.lower())


def _hearing() -> dict[str, str]:
    """The classes that generate text from sounds, by model type: all that recognize speech, and those of other tasks
    that have a feature extractor or the config of an audio encoder, but none with a part that is a family of its own.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES

    others = {**auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    families = {CONFIG_MAPPING[kind] for kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    heard = {}
    for kind, name in others.items():
        parts = CONFIG_MAPPING[kind].sub_configs
        hears = kind in FEATURE_EXTRACTOR_MAPPING_NAMES or "audio_config" in parts
        if hears and not any(part in families for part in parts.values()):
            heard[kind] = name
    return {**heard, **auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}


def _model_class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def build(family: Family, seeing: Made | None = None, text: Fields | None = None) -> tuple[Any, list[str]]:
    """The network with random weights, and the changes of its config. seeing: the processor of its pictures or sounds,
    which is corrected. text: differences of its text model's config. Raises NotMadeError."""
    from transformers import CONFIG_MAPPING

    config_class, model = CONFIG_MAPPING[family.model_type], _model_class(family.model_class)

    def attempt(fields: Fields) -> Exception | None:
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model(config_class(**deepcopy(fields))).parameters())
            if size > _MOST_PARAMETERS:
                return MemoryError(f"{size:,} parameters")
            made.clear()
            made.append(made_network(fields))
        except Exception as error:  # its validators and layers raise many kinds
            errors.append(error)
            return error
        return None

    def made_network(fields: Fields) -> Any:
        torch.manual_seed(0)
        network = model(config_class(**deepcopy(fields))).float().eval()
        draw_weights(network)
        if seeing is None:
            judge(network, prompts()[2], prompts()[3])
            return network
        for text, given in items(seeing):
            for _ in range(2):
                try:
                    judge_item(network, seeing, text, given, [5, 6])
                    break
                except (ValueError, RuntimeError) as error:
                    if not corrected(seeing, error):
                        raise
        return network

    made: list[Any] = []
    errors: list[Exception] = []
    try:
        default = config_class()
        fields = _marked(shrunk(default), seeing.marks if seeing else {})
        if text:
            fields["text_config"] = {**fields["text_config"], **text}
        _, changes = repaired(fields, default, attempt)
    except Exception as error:
        raise NotMadeError(_short(errors[0] if seeing is not None and errors else error)) from error
    return made[0], changes


def _marked(fields: Fields, marks: dict[str, int]) -> Fields:
    changed = with_small_pictures(fields) if marks else fields
    for modality, token_id in marks.items():
        names = [f"{modality}_token_id", f"{modality}_token_index"]
        if modality.endswith("_start"):  # some configs have it without a default
            names = names[:1]
            fields = {**fields, names[0]: token_id}
        changed.update((name, token_id) for name in names if name in fields)
    return changed


@torch.no_grad()
def draw_weights(network: Any) -> None:
    """Draw all parameters at random, around the vectors' initial values, such that each of them affects the logits."""
    generator = torch.Generator().manual_seed(0)
    tied = bool(getattr(network.config.get_text_config(), "tie_word_embeddings", False))
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2 or "norm" in name:
            around = parameter + 1 if _NORM_OF_HEADS.search(name) else parameter
            parameter.copy_(around + 0.3 * noise)
        elif tied or not re.search(EMBEDDINGS, name):
            parameter.copy_(noise * gain(name, "") / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(noise)


def write(family: Family, network: Any, folder: Path, made: Made | None = None) -> None:
    network.generation_config.eos_token_id = 2
    network.save_pretrained(folder)
    if family.architecture in PUBLISHED:
        publish(folder, AS_PUBLISHED[family.architecture])
        config = json.loads((folder / "config.json").read_text())
    elif family.model_type in HUB_LAYOUTS:  # the names of published tensors
        edit_tensors(folder, HUB_LAYOUTS[family.model_type])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [family.architecture]}))
    if made is not None:
        save(made, folder)
        return
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    made = [[draw.randrange(4, 300) for _ in range(length)] for length in LENGTHS]
    made[3][:20] = made[2][:20]
    return made


@torch.inference_mode()
def judge(
    network: Any, prompt: list[int], token_ids: list[int], inputs: dict[str, Tensor] | None = None
) -> tuple[int, int]:
    """How many tokens are wrong, and how many could have been others: transformers' logits of the whole text decide,
    without a cache. inputs: of the encoder."""
    ids = torch.tensor([prompt + token_ids])
    if inputs is None and getattr(network.config.get_text_config(), "use_bidirectional_attention", None) is True:
        inputs = {"token_type_ids": torch.ones_like(ids)}  # all tokens follow the part that is read in both directions
    logits: Tensor = network(input_ids=ids, use_cache=False, **(inputs or {})).logits[0].float()
    made = logits[len(prompt) - 1 : -1]  # [tokens, vocab]
    if not made.isfinite().all():
        raise ValueError("its logits are not finite")
    best = made.topk(2, dim=-1).values
    bound = TIE * made.std()
    chosen = made.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return int((best[:, 0] - chosen > bound).sum()), int((best[:, 0] - best[:, 1] <= bound).sum())


def outcome(family: Family, folder: Path) -> Outcome:
    """Run the family in chunks and batches, on a warm cache, and in a small pool, and judge all tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if family.hears and _has_decoder(family):
            return Outcome("unknown", "it has an encoder and a decoder")
        unseen = ""
        if family.hears or (family.sees and _has_transformers_encoder(family)):  # tests/multimodal has the others
            try:
                return _with_items(family, folder / "items")
            except (NoProcessorError, NotMadeError) as error:
                unseen = _short(error)
        found = _on_texts(family, folder)
        found.unseen = unseen if found.runs == "encoder" or family.hears else ""
        return found


def _has_decoder(family: Family) -> bool:
    from transformers import CONFIG_MAPPING

    with suppress(Exception):  # some configs need arguments
        return bool(CONFIG_MAPPING[family.model_type]().is_encoder_decoder)
    return False


def _has_transformers_encoder(family: Family) -> bool:
    from transformers import CONFIG_MAPPING

    if family.architecture not in ARCHITECTURES:
        return True
    kind = CONFIG_MAPPING[family.model_type]
    with suppress(Exception):  # rules do not make all configs; validators raise many kinds
        config = kind(**shrunk(kind())).to_dict()
        media = spec_of({**config, "architectures": [family.architecture]}).media
        return media is not None and media.family == "transformers"
    return False


def _on_texts(family: Family, folder: Path) -> Outcome:
    try:
        network, changes = build(family)
        write(family, network, folder)
    except NotMadeError as error:
        return Outcome("unknown", _short(error))
    options = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": CHUNK, "max_num_seqs": 4}
    if family.sees or family.hears:
        options["language_model_only"] = True
    try:
        llm = make_llm(folder, **options)
    except ValueError as error:
        return Outcome("no", _short(error), changes=changes)
    found = Outcome(_way(llm), changes=changes)
    names = ("audio_token_id", "audio_token_index") if family.hears else ()
    marks = {getattr(network.config, name, None) for name in names}
    for generated, prompt in _continued(llm, folder, options):
        token_ids = _before_marks(generated, marks)
        wrong, tied = judge(network, prompt, token_ids)
        found.tokens += len(token_ids)
        found.wrong += wrong
        found.tied += tied
    return found


def _with_items(family: Family, folder: Path) -> Outcome:
    """Raises NoProcessorError or NotMadeError if the rules make no checkpoint with a processor."""
    from transformers import CONFIG_MAPPING

    fields = with_small_pictures(shrunk(CONFIG_MAPPING[family.model_type]()))
    made = make(family.model_type, fields, "audio" if family.hears else "image")
    network, changes = build(family, made)
    folder.mkdir()
    write(family, network, folder, made)
    options = {"max_model_len": POSITIONS, "max_num_batched_tokens": 2 * CHUNK, "max_num_seqs": 4}
    try:
        media = describe(folder, ModelConfig()).spec.media
        if media is not None and media.two_way:
            options["max_num_batched_tokens"] *= 2  # pictures whose tokens see each other fit
        llm = make_llm(folder, **options)
    except ValueError as error:
        return Outcome("no", _short(error), changes=changes)
    if llm.processor.media is None:
        raise NoProcessorError("its encoder is missing")
    found = Outcome(_way(llm), changes=changes)
    engines = [llm]
    if family.hears:  # in a pool with hardly more blocks than one request needs
        needed = llm.core.scheduler.kv.max_blocks(POSITIONS)
        engines.append(make_llm(folder, **options, num_gpu_blocks_override=needed + 1))
    for engine in engines:
        for wrong, tied, count in continued_items(engine, made, network):
            found.tokens += count
            found.seen += count
            found.wrong += wrong
            found.tied += tied
    return found


def _way(llm: LLM) -> str:
    if llm.config.model.model_impl == "transformers":
        return "transformers"
    media = describe(llm.frontend.directory, llm.config.model).spec.media
    return "encoder" if media is not None and media.family == "transformers" else "native"


def judge_item(network: Any, made: Made, text: str, given: list[Any], token_ids: list[int]) -> tuple[int, int]:
    """See `judge`. The prompt is transformers' own: its processor reads all pictures of a prompt at once."""
    encoded = inputs(made, text, given)
    prompt = encoded.pop("input_ids")[0].tolist()
    encoded["attention_mask"] = torch.ones(1, len(prompt) + len(token_ids), dtype=torch.int64)
    for name in [name for name in encoded if name.endswith("token_type_ids")]:
        encoded[name] = torch.nn.functional.pad(torch.as_tensor(encoded[name]), (0, len(token_ids)))
    return judge(network, prompt, token_ids, encoded)


def continued_items(llm: LLM, made: Made, network: Any) -> Iterator[tuple[int, int, int]]:
    """Greedy continuations of prompts with pictures or sounds, judged: the numbers of wrong tokens, ties and tokens. In
    chunks and batches, and then on warm caches."""
    texts = items(made)
    fields = [{"prompt": text, "multi_modal_data": {made.modality: given} if given else {}} for text, given in texts]
    for _ in range(2):
        for answer, (text, given) in zip(llm.generate(fields, PARAMS, use_tqdm=False), texts, strict=True):
            assert answer.prompt_token_ids == inputs(made, text, given)["input_ids"][0].tolist()
            token_ids = _before_marks(list(answer.outputs[0].token_ids), made.marks.values())
            yield *judge_item(network, made, text, given, token_ids), len(token_ids)


def _before_marks(token_ids: list[int], marks: Collection[int | None]) -> list[int]:
    """Tokens before the first one that is a picture or a sound to transformers."""
    return token_ids[: next((i for i, token_id in enumerate(token_ids) if token_id in marks), None)]


def _continued(llm: LLM, folder: Path, options: Fields) -> Iterator[tuple[list[int], list[int]]]:
    """Greedy tokens and their prompts: in chunks and batches, then on a warm cache, then in a pool with hardly more
    blocks than one request needs."""
    texts = prompts()
    for _ in range(2):
        yield from zip(tokens_of(generate(llm, texts, PARAMS)), texts, strict=True)
    needed = llm.core.scheduler.kv.max_blocks(MAX_MODEL_LEN)
    tiny = make_llm(folder, **options, num_gpu_blocks_override=needed + 1)
    yield from zip(tokens_of(generate(tiny, texts, PARAMS)), texts, strict=True)


def _short(error: Exception) -> str:
    """The first line of an error, or the second one of a validator's."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if first.startswith("Class validation error") and more:
        first = more[0].partition(": ")[2]
    return first.partition("; supported")[0]


def recorded() -> dict[str, dict[str, Any]]:
    """The outcomes in the file, by the names of families."""
    return {row["family"]: row for row in map(json.loads, RECORD.read_text().splitlines())}


def row_of(family: Family, found: Outcome) -> dict[str, Any]:
    """An outcome as it is recorded. Ties depend on the machine."""
    kept = {name: value for name, value in asdict(found).items() if name not in ("tied", "wrong") and value}
    senses = {"sees": family.sees, **({"hears": True} if family.hears else {})}
    return {"family": family.name, **senses, "transformers": version("transformers"), **kept}


def record(rows: dict[str, dict[str, Any]]) -> None:
    ordered = sorted(rows.values(), key=lambda row: row["family"].lower())
    RECORD.write_text("".join(json.dumps(row) + "\n" for row in ordered))

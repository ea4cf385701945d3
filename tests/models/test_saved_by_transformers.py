"""Checkpoints as `save_pretrained` leaves them: by the installed transformers, and by recorded versions since 4.31."""

from __future__ import annotations

import json
from itertools import chain

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoints.metadata import hf_config
from quire.config.engine import EngineConfig
from quire.models.load import load_model
from quire.models.registry import ARCHITECTURES, spec_of
from quire.parallel.mesh import Mesh
from quire.text.tokenizer import Tokenizer
from support.checkpoints import ALL_VARIANTS, CORPUS, EOS, FAMILIES, write_checkpoint
from support.engines import generate, make_llm, tokens_of
from support.layouts import STAND_INS
from support.reference import LENGTHS
from support.saved_checkpoints import VERSIONS, fold, read_record, save_tokenizer, unfold
from support.seeing import SEEING
from support.stand_in_layouts import CHANGED as CHANGED_FAMILIES
from support.stand_in_layouts import SAME

pytestmark = pytest.mark.texts

# The variants that other tests change after they are saved; test_parity.py reads the others as they were saved. Not
# Kimi Linear, Ling 3 and Hunyuan 4: transformers 5.24 saves dense layers of the first two, and hyper-connections of the
# last, under names that no published checkpoint has.
OTHER_NAMES = {"kimi_linear", "bailing_hybrid", "hy_v4"}
CHANGED = [
    name
    for name, (kind, _, writing) in ALL_VARIANTS.items()
    if kind not in {*STAND_INS, *OTHER_NAMES} and writing.keys() - {"seed"}
]
RECORDS = {version: read_record(version) for version in VERSIONS}
RECORDED = [(version, variant) for version, record in RECORDS.items() for variant in record["variants"]]

each_recorded_checkpoint = pytest.mark.parametrize(("version", "variant"), RECORDED)


@pytest.mark.sampled(26)
@pytest.mark.parametrize("variant", CHANGED)
def test_a_sharded_checkpoint_of_the_installed_transformers_says_what_transformers_says(tmp_path, references, variant):
    kind, config, writing = ALL_VARIANTS[variant]
    write_checkpoint(tmp_path, kind, config, seed=writing.get("seed", 0), max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    expected = references.continuations(variant)[: len(LENGTHS)]
    outputs = generate(make_llm(tmp_path), [c.prompt for c in expected])
    for continuation, token_ids in zip(expected, tokens_of(outputs), strict=True):
        continuation.check(token_ids)


@pytest.mark.sampled(37)
@each_recorded_checkpoint
def test_the_config_of_an_older_version_describes_the_same_model(checkpoints, version, variant):
    older = RECORDS[version]["variants"][variant]["config"]
    newest = hf_config(checkpoints.path(variant), {})
    if "max_position_embeddings" not in older:  # in Falcon's first configs
        newest.pop("max_position_embeddings", None)
    assert older["transformers_version"] == version
    assert spec_of(older) == spec_of(newest)


@pytest.mark.sampled(59)
@each_recorded_checkpoint
def test_the_tensors_of_an_older_version_are_those_of_the_model(tmp_path, version, variant):
    record = RECORDS[version]["variants"][variant]
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    tensors = {name: torch.zeros(shape) for name, shape in unfold(record["tensors"]).items()}
    if record["file"].endswith(".bin"):
        torch.save(tensors, tmp_path / record["file"])
    else:
        save_file(tensors, tmp_path / record["file"], metadata={"format": "pt"})
    config = EngineConfig.create(dtype="float32", kernels={"linear": "reference"})
    load_model(tmp_path, config, 64, torch.device("cpu"), Mesh(), show_progress=False)


def test_every_architecture_of_transformers_is_recorded(checkpoints):
    named = {record["config"]["architectures"][0] for r in RECORDS.values() for record in r["variants"].values()}
    lacking = {hf_config(checkpoints.path(FAMILIES[kind][0]), {})["architectures"][0] for kind in CHANGED_FAMILIES}
    others = {*lacking, *chain.from_iterable(SAME.values())}
    others |= {"YiForCausalLM", "InternLM2ForCausalLM", "MiniCPMForCausalLM", "MiMoForCausalLM", "PhiMoEForCausalLM"}
    others |= {"Llama4ForConditionalGeneration", *SEEING}
    others |= {"Dots1ForCausalLM", "Exaone4ForCausalLM"}  # these versions know other options than the variants have
    others |= {"GraniteMoeHybridForCausalLM"}  # the same
    # Which Quire has since the records were made; those in the next lines are younger.
    others |= {"BitNetForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM"}
    others |= {"NemotronHForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "KimiLinearForCausalLM"}
    others |= {"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "RWKV7ForCausalLM"}
    others |= {"AfmoeForCausalLM", "BloomForCausalLM", "CodeGenForCausalLM", "Cohere2MoeForCausalLM"}
    others |= {"CwmForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "FlexOlmoForCausalLM"}
    others |= {"GPTBigCodeForCausalLM", "GPTJForCausalLM", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"}
    others |= {"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "GraniteMoeForCausalLM"}
    others |= {"GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteSWAForCausalLM", "HYV3ForCausalLM"}
    others |= {"HyperCLOVAXForCausalLM", "Jais2ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"}
    others |= {"Lfm3ForCausalLM", "MPTForCausalLM", "MellumForCausalLM", "MiMoV2FlashForCausalLM"}
    others |= {"MiniCPM3ForCausalLM", "Mistral4ForCausalLM", "MptForCausalLM", "OlmoHybridForCausalLM"}
    others |= {"InternLM3ForCausalLM", "IQuestCoderForCausalLM"}
    others |= {"DeepseekV4ForCausalLM", "Glm5NextForCausalLM", "MiniMaxM3SparseForCausalLM"}
    others |= {"HCXVisionV2ForCausalLM", "HyperCLOVAXVisionV2ForConditionalGeneration"}
    others |= {"BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"}
    others |= {"PersimmonForCausalLM", "SolarOpenForCausalLM", "Starcoder2ForCausalLM", "YoutuForCausalLM"}
    others |= {"DbrxForCausalLM", "HYV4ForCausalLM", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration"}
    others |= {
        "Dots3NoteForCausalLM",
        "Dots3NoteForConditionalGeneration",
        "HrmTextForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
        "Zamba2ForCausalLM",
    }
    assert named | others == set(ARCHITECTURES)


@pytest.mark.parametrize("version", [*VERSIONS, "installed"])
def test_the_tokenizer_files_of_each_version_are_read_as_transformers_reads_them(tmp_path, version):
    from transformers import AutoTokenizer

    if version == "installed":
        save_tokenizer(tmp_path)
    else:
        for name, text in RECORDS[version]["tokenizer"].items():
            (tmp_path / name).write_text(text)
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in [*CORPUS, "<s>one<|end|> two</s>"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert (ours.eos_token_id, ours.token_to_id("<|end|>")) == (EOS, 3)
    assert ours.chat_template == theirs.chat_template


def test_short_names_of_tensors_stand_for_the_same_tensors():
    shapes = {f"layers.{i}.experts.{e}.w": [4, 6] for i in (1, 2) for e in range(3)}
    assert fold(shapes) == {"layers.{1,2}.experts.{0,1,2}.w": [4, 6]}
    shapes |= {"layers.0.w": [4, 6], "layers.1.w": [6, 4], "head.w": [2]}
    assert unfold(fold(shapes)) == shapes
    del shapes["layers.2.experts.1.w"]
    assert unfold(fold(shapes)) == shapes

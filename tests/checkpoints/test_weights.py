"""Checkpoints that are whole, in each form, and checkpoints that are not: each error names what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints.errors import ModelNotFoundError, WeightError
from quire.checkpoints.weights import SafetensorsCheckpoint, TorchCheckpoint
from quire.layers.build import WeightSlot
from quire.worker.weight_groups import ReceivedCheckpoint
from support.checkpoints import VARIANTS, Checkpoints, write_checkpoint
from support.engines import GREEDY, generate, make_llm, runner_of, teacher_forced_logits, tokens_of
from support.reference import greedy, load, logits, prompts

WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(checkpoints.path("llama"), tmp_path / "copy"))


def rewrite(path: Path, change: Any) -> Path:
    """Change the dict of tensors in place."""
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def set_config(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    for name, value in changes.items():
        if value is ...:
            config.pop(name, None)
        else:
            config[name] = value
    (path / "config.json").write_text(json.dumps(config))
    return path


# ---- tensors that are not the model's


def test_a_missing_tensor_is_named(copy):
    rewrite(copy, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightError, match=r"missing: model.layers.1.mlp.up_proj.weight"):
        make_llm(copy)


def test_many_missing_tensors_are_counted(copy):
    rewrite(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers." in name])
    with pytest.raises(WeightError, match=r"missing: model.layers.0.*and \d+ more"):
        make_llm(copy)


def test_a_tensor_that_the_model_has_no_place_for_is_named(copy):
    rewrite(copy, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(WeightError, match=r"unexpected: model.layers.0.self_attn.q_proj.bias"):
        make_llm(copy)


def test_a_bias_that_the_config_asks_for_and_the_file_lacks_is_named(copy):
    set_config(copy, attention_bias=True)
    with pytest.raises(WeightError, match=r"missing: model.layers.0.self_attn.k_proj.bias"):
        make_llm(copy)


def test_a_misshapen_tensor_is_named_with_both_shapes(copy):
    rewrite(copy, lambda tensors: tensors.update({"model.layers.2.mlp.down_proj.weight": torch.zeros(64, 95)}))
    with pytest.raises(WeightError, match=r"down_proj.weight has shape \(64, 95\).*config asks for \(64, 96\)"):
        make_llm(copy)


def test_a_config_that_lies_about_a_size_is_found_out_by_the_first_tensor(copy):
    set_config(copy, vocab_size=400)
    with pytest.raises(WeightError, match=r"embed_tokens.weight has shape \(320, 64\).*asks for \(400, 64\)"):
        make_llm(copy)


def test_old_checkpoints_hold_rotary_frequencies_which_are_passed_over(copy, checkpoints):
    rewrite(copy, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert tokens_of(generate(make_llm(copy), ["a"])) == tokens_of(generate(make_llm(checkpoints.path("llama")), ["a"]))


def test_a_tied_checkpoint_may_hold_the_head_all_the_same(checkpoints, tmp_path):
    path = Path(shutil.copytree(checkpoints.path("qwen2"), tmp_path / "copy"))
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert tokens_of(generate(make_llm(path), ["a"])) == tokens_of(generate(make_llm(checkpoints.path("qwen2")), ["a"]))


# ---- whole checkpoints in other forms


@pytest.mark.parametrize("variant", ["llama", "qwen3-mixed-windows-biases"])
def test_a_sharded_checkpoint_is_the_same_model(checkpoints, tmp_path, variant):
    kind, config, writing = VARIANTS[variant]
    path = write_checkpoint(tmp_path, kind, config, max_shard_size="60KB", **writing)
    assert len(list(path.glob("model-*.safetensors"))) > 3
    text = list(range(20, 60))
    whole = teacher_forced_logits(make_llm(checkpoints.path(variant)), text)
    assert torch.equal(teacher_forced_logits(make_llm(path), text), whole)


def test_a_shard_that_the_index_names_and_nobody_downloaded_is_named(tmp_path):
    path = write_checkpoint(tmp_path, max_shard_size="60KB")
    [*_, last] = sorted(path.glob("model-*.safetensors"))
    last.unlink()
    with pytest.raises(WeightError, match=last.name):
        make_llm(path)


@pytest.mark.parametrize("max_shard_size", ["60KB", "5GB"], ids=["sharded", "single"])
def test_a_second_copy_of_the_weights_beside_them_is_not_read(tmp_path, max_shard_size):
    """Mistral's repositories hold consolidated.safetensors, with tensors of other names."""
    path = write_checkpoint(tmp_path, max_shard_size=max_shard_size)
    save_file({"other": torch.zeros(3)}, path / "consolidated.safetensors")
    make_llm(path)


def test_a_single_file_may_have_any_name(copy):
    (copy / WEIGHTS).rename(copy / "weights.safetensors")
    make_llm(copy)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_weights_stored_in_half_precision_are_computed_with_in_float32(tmp_path, stored):
    path = write_checkpoint(tmp_path, "qwen2", dtype=stored)
    reference = load(path)  # converts as well
    expected = greedy(reference, prompts(320, 9), 32)
    llm = make_llm(path)
    assert runner_of(llm).model.embedding.table.weight.dtype is torch.float32
    for continuation, token_ids in zip(
        expected, tokens_of(generate(llm, [c.prompt for c in expected], GREEDY.clone(max_tokens=32))), strict=True
    ):
        continuation.check(token_ids)
    wanted = logits(reference, expected[8].prompt)
    assert (teacher_forced_logits(llm, expected[8].prompt) - wanted).abs().max() < 1e-4 * wanted.std()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_tensor_may_have_further_dimensions_of_size_1(tmp_path, stored):
    """Those of RWKV-7's token shifts have. The part that is read is one of the slot's dimensions."""
    tensor = torch.arange(24, dtype=stored).view(1, 1, 4, 6)
    save_file({"shift": tensor}, tmp_path / "model.safetensors")
    torch.save({"shift": tensor}, tmp_path / "pytorch_model.bin")
    received = ReceivedCheckpoint({"shift": [((4, 6), (slice(1, 3),))]})
    received.add("shift", tensor)
    for checkpoint in (SafetensorsCheckpoint(tmp_path), TorchCheckpoint(tmp_path), received):
        target = torch.empty(2, 6)
        checkpoint.copy_into(WeightSlot("shift", target, (4, 6), (slice(1, 3),)))
        assert target.equal(tensor[0, 0, 1:3].float())


@pytest.mark.parametrize(
    ("stored", "option", "computed"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.bfloat16),
        ("float32", "bfloat16", torch.bfloat16),
        ("float32", "half", torch.float16),
        ("bfloat16", "float", torch.float32),
    ],
)
def test_the_type_that_is_computed_in(tmp_path, stored, option, computed):
    llm = make_llm(write_checkpoint(tmp_path, dtype=stored), "reference", dtype=option)
    assert runner_of(llm).model.embedding.table.weight.dtype is computed
    assert len(generate(llm, ["a"], GREEDY.clone(max_tokens=4))[0].outputs[0].token_ids) == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["llama", "qwen3-mixed-windows-biases"])
def test_dummy_weights_need_no_weight_file(checkpoints, tmp_path, variant):
    path = Path(shutil.copytree(checkpoints.path(variant), tmp_path / "copy"))
    (path / WEIGHTS).unlink()
    llm = make_llm(path, load_format="dummy")
    model = runner_of(llm).model
    embeddings = model.embedding(torch.arange(model.spec.vocab_size))
    assert embeddings.std().item() == pytest.approx(0.02, rel=0.1)
    assert bool((model.final_norm.weight == 1).all())
    first, second = (tokens_of(generate(engine, ["a"])) for engine in (llm, make_llm(path, load_format="dummy")))
    assert first == second
    with pytest.raises(ModelNotFoundError, match=r"has no \*.safetensors and no pytorch_model\*.bin file"):
        make_llm(path)


# ---- files that cannot be read


def test_a_file_that_was_cut_off_is_named(copy):
    content = (copy / WEIGHTS).read_bytes()
    for length in (0, 4, 100, len(content) - 1000):
        (copy / WEIGHTS).write_bytes(content[:length])
        with pytest.raises(WeightError, match=f"{WEIGHTS} cannot be read"):
            make_llm(copy)


def test_a_page_of_html_in_place_of_weights_is_named(copy):
    (copy / WEIGHTS).write_bytes(b"<html>" + b"not found" * 100)
    with pytest.raises(WeightError, match=f"{WEIGHTS} cannot be read"):
        make_llm(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is not valid JSON"),
        ("", "config.json is not valid JSON"),
        ("[]", "config.json holds no JSON object"),
    ],
)
def test_a_config_that_is_no_json_object_is_named(copy, content, message):
    (copy / "config.json").write_text(content)
    with pytest.raises(ModelNotFoundError, match=message):
        make_llm(copy)


def test_a_config_that_is_no_text_is_named(copy):
    (copy / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelNotFoundError, match=r"config.json is not valid JSON"):
        make_llm(copy)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_named(tmp_path, content):
    path = write_checkpoint(tmp_path, max_shard_size="60KB")
    (path / "model.safetensors.index.json").write_text(content)
    if content == "{}":  # says nothing: all the files are read
        make_llm(path)
        return
    with pytest.raises(ValueError, match=r"model.safetensors.index.json"):
        make_llm(path)


def test_an_index_may_name_files_of_a_folder_beside_it(tmp_path):
    path = write_checkpoint(tmp_path / "one")
    index = {"weight_map": {"any": "../two/weights.safetensors"}}
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (tmp_path / "two").mkdir()
    (path / WEIGHTS).rename(tmp_path / "two/weights.safetensors")
    make_llm(path)


@pytest.mark.parametrize("name", ["../../x", "{}/x", "a/../../x", "./../../x", ".././../x"])
def test_an_index_names_nothing_farther_away(copy, name):
    name = name.format(copy.absolute())
    (copy / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"any": name}}))
    with pytest.raises(WeightError, match=r"index.json names .*x, which is outside"):
        make_llm(copy)


def test_a_directory_without_config_json_says_what_was_expected(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"has no config.json; is it a checkpoint in the Hugging Face layout"):
        make_llm(tmp_path)


def test_a_checkpoint_without_tokenizer_says_what_is_read(copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer in .*: looked for tokenizer.json, "):
        make_llm(copy)


def test_the_tokenizer_may_be_elsewhere(copy, checkpoints):
    (copy / "tokenizer.json").unlink()
    other = make_llm(copy, tokenizer=str(checkpoints.path("llama")))
    assert tokens_of(generate(other, ["a b"])) == tokens_of(generate(make_llm(checkpoints.path("llama")), ["a b"]))


@pytest.mark.parametrize("model", ["/no/such/place", "./nowhere", "~/nowhere-at-all", "nothing.gguf"])
def test_a_path_that_does_not_exist_is_named(model):
    with pytest.raises(ModelNotFoundError, match=f"model '{model}': no such file or directory"):
        make_llm(model)


@pytest.mark.parametrize("model", ["no/such/place", "nothing"])
def test_a_name_that_cannot_be_a_model_is_named(model):
    with pytest.raises(ModelNotFoundError, match=f"model '{model}' is neither a directory nor a Hugging Face id"):
        make_llm(model)


def test_a_file_is_no_model(copy):
    with pytest.raises(ModelNotFoundError, match="neither a directory nor a Hugging Face id"):
        make_llm(copy / WEIGHTS)


# ---- models that are not there yet


def test_an_unknown_architecture_is_told_which_there_are(copy):
    set_config(copy, architectures=["LlamaForCasualLM"])
    message = "LlamaForCasualLM is not supported; supported: .*, LlamaForCausalLM, .*; the nearest is LlamaForCausalLM"
    with pytest.raises(ValueError, match=message):
        make_llm(copy)
    set_config(copy, architectures=...)
    with pytest.raises(
        ValueError, match=r"\(none named in config.json\) is not supported; supported: Afmoe.*BertModel"
    ):
        make_llm(copy)


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size"]
)
def test_a_config_that_lacks_a_size_is_told_which(copy, field):
    set_config(copy, **{field: ...})
    with pytest.raises(ValueError, match=f"config.json of a LlamaForCausalLM lacks '{field}'"):
        make_llm(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "xielu"}, "activation 'xielu' is not supported; supported: gelu, .*silu"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"quantization_config": {"quant_method": "quark"}}, "quark"),
    ],
)
def test_what_a_checkpoint_asks_for_and_is_not_there_is_an_error_and_not_a_wrong_answer(copy, changes, message):
    set_config(copy, **changes)
    with pytest.raises(ValueError, match=message):
        make_llm(copy)


def test_overrides_replace_what_the_config_says(copy, checkpoints):
    theta = make_llm(copy, hf_overrides={"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}})
    assert runner_of(theta).model.spec.rotary[0].theta == 500.0
    assert tokens_of(generate(theta, ["Once upon"])) != tokens_of(generate(make_llm(copy), ["Once upon"]))


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_read_in_parts(tmp_path: Path, threads: int) -> None:
    whole = torch.randn(1031, 1033)
    save_file({"whole": whole}, tmp_path / WEIGHTS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        checkpoint = SafetensorsCheckpoint(tmp_path)
        for rows in (slice(0, 1031), slice(17, 1030)):
            target = torch.zeros_like(whole[rows])
            checkpoint.copy_into(WeightSlot("whole", target, tuple(whole.shape), (rows,)))
            assert torch.equal(target, whole[rows])
    finally:
        torch.set_num_threads(before)

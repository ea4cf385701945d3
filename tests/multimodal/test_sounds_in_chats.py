"""Qwen2-Audio against transformers: the same greedy tokens however the work is cut up, and sounds over HTTP.

The prompts have one sound, two, the same sound twice, and none.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
import soundfile
from openai import BadRequestError, OpenAI

from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from support.engines import assert_preempted, generate, make_llm
from support.hearing import NUM_TOKENS, RATE, chat_written, sound
from support.late_device import run_late
from support.server import Host

MakeLLM = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content %}"
    "{% if p.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ p.text }}{% endif %}{% endfor %}\n"
    "{% endfor %}assistant:"
)


def check(llm: LLM, expected: list[Any]) -> None:
    prompts = [
        {"prompt": text, **({"multi_modal_data": {"audio": [(s, RATE) for s in sounds]}} if sounds else {})}
        for text, sounds, _ in expected
    ]
    for (_, _, wanted), output in zip(expected, generate(llm, prompts, PARAMS), strict=True):
        assert output.prompt_token_ids == wanted.prompt
        wanted.check(output.outputs[0].token_ids)


def in_a_batch(make: MakeLLM, expected: list[Any]) -> None:
    llm = make()
    for _ in range(2):  # the second time, on a warm prefix cache
        check(llm, expected)


def in_chunks(make: MakeLLM, expected: list[Any]) -> None:
    check(make(max_num_batched_tokens=24, encoder_cache_size=60), expected)


def preempted(make: MakeLLM, expected: list[Any]) -> None:
    llm = make(num_gpu_blocks_override=18, max_model_len=180)
    check(llm, expected * 3)
    assert_preempted(llm)


def two_steps_deep(make: MakeLLM, expected: list[Any]) -> None:
    llm = make(max_num_batched_tokens=48)
    run_late(llm)
    check(llm, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", [in_a_batch, in_chunks, preempted, two_steps_deep], ids=lambda way: way.__name__)
def test_greedy_tokens_equal_transformers(folder, way):
    path, expected = chat_written(folder)
    way(lambda **options: make_llm(path, "cpu", **{"max_num_seqs": 8, "max_model_len": 256, **options}), expected)


@pytest.fixture(scope="module")
def client(folder):
    path, _ = chat_written(folder)
    host = Host(model=str(path), dtype="float32", max_num_seqs=8, chat_template=TEMPLATE)
    yield OpenAI(base_url=f"{host.serve().url}/v1", api_key="none", max_retries=0, timeout=600)
    host.close()


def ask(client, data: str, kind: str = "input_audio") -> str:
    source = {"data": data, "format": "wav"} if kind == "input_audio" else {"url": data}
    content = [{"type": "text", "text": "Hear: "}, {"type": kind, kind: source}]
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=12,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].message.content


def test_openais_client_sends_sounds_in_chats(client, folder):
    file = io.BytesIO()
    soundfile.write(file, sound(1), RATE, format="WAV", subtype="FLOAT")
    data = base64.b64encode(file.getvalue()).decode()
    path, _ = chat_written(folder)
    llm = make_llm(path, max_model_len=256)
    text = "user: Hear: <|audio_bos|><|AUDIO|><|audio_eos|>assistant:"  # templates lose newlines behind blocks
    token_ids = llm.frontend.tokenizer.encode(text, add_special_tokens=False)
    prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"audio": [sound(1)]}}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    wanted = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].text
    assert ask(client, data) == wanted
    assert ask(client, f"data:audio/wav;base64,{data}", "audio_url") == wanted
    for wrong in ("!", base64.b64encode(b"no sound").decode(), data[:40]):
        with pytest.raises(BadRequestError) as raised:
            ask(client, wrong)
        assert raised.value.body["param"] == "messages[0].content[1].input_audio"

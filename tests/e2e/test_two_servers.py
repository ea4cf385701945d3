"""Retrieval and generation at once: a server that embeds beside one that generates, both under load."""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from support.minilm import minilm
from support.server_process import Server
from support.waiting import LONGEST


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LONGEST) as answer:
        return json.load(answer)


@pytest.mark.nightly
def test_both_answer_as_they_do_alone():
    dice = random.Random(0)
    words = "a search for the moon and the stars of a small town by the sea in winter".split()
    sentences = [" ".join(dice.choices(words, k=dice.randint(2, 60))) for _ in range(200)]
    prompts = [" ".join(dice.choices(words, k=dice.randint(2, 30))) for _ in range(24)]
    embedded = LLM(str(minilm())).embed(sentences, use_tqdm=False)
    vectors = np.array([output.outputs.embedding for output in embedded])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = [output.outputs[0].text for output in LLM(dtype="float32").generate(prompts, params, use_tqdm=False)]

    with Server("--model", str(minilm())) as embedder, Server("--dtype", "float32") as generator:

        def say(prompt: str) -> str:
            options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
            return str(post(generator, "/v1/completions", {"prompt": prompt, **options})["choices"][0]["text"])

        def embed(first: int) -> Any:
            data = post(embedder, "/v1/embeddings", {"input": sentences[first : first + 20]})["data"]
            return [item["embedding"] for item in data]

        with ThreadPoolExecutor(16) as pool:
            said = [pool.submit(say, prompt) for prompt in prompts * 2]
            found = [pool.submit(embed, first) for first in [*range(0, 200, 20)] * 3]
            assert [answer.result() for answer in said] == texts * 2
            made = np.array([vector for answer in found for vector in answer.result()])
        np.testing.assert_allclose(made, np.tile(vectors, (3, 1)), atol=1e-5)
        embedder.wait_until_idle()
        generator.wait_until_idle()

"""The tiny models that see, made once a session, and a server with LLaVA."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.seeing import prepared
from support.server import Host

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content %}"
    "{% if p.type == 'image' %}<image> {% else %}{{ p.text }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("seeing")


@pytest.fixture(scope="module")
def host(folder, tmp_path_factory):
    path, _ = prepared("llava", folder)
    shared = tmp_path_factory.mktemp("allowed")
    started = Host(
        model=str(path),
        dtype="float32",
        max_model_len=400,
        max_num_seqs=8,
        chat_template=TEMPLATE,
        limit_mm_per_prompt={"image": 3},
        allowed_local_media_path=str(shared),
        enable_prompt_embeds=True,
    )
    started.shared = shared
    yield started
    started.close()

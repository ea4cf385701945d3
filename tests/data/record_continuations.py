"""Records transformers' greedy continuations of all variants: continuations.jsonl. It takes minutes.

Run it after a change of a variant or of how checkpoints are drawn, and with a new version of transformers:
python tests/data/record_continuations.py [VARIANT ...]. With variants, the lines of all others stay.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.checkpoints import ALL_VARIANTS, Checkpoints  # noqa: E402
from support.continuations import FILE, line_of  # noqa: E402
from support.reference import References  # noqa: E402


class Folders:
    """What Checkpoints needs of pytest's factory of temporary folders."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def mktemp(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir()
        return folder


def main() -> None:
    torch.set_num_threads(1)  # the models are tiny
    with tempfile.TemporaryDirectory() as root:
        references = References(Checkpoints(Folders(root)))  # type: ignore[arg-type]
        lines = {json.loads(line)["variant"]: line for line in FILE.read_text().splitlines()} if FILE.exists() else {}
        for variant in sys.argv[1:] or ALL_VARIANTS:
            computed = [(c.token_ids, c.certain) for c in references.compute(variant)]
            lines[variant] = line_of(variant, references.key(variant), computed)
            references.forget(variant)
    FILE.write_text("".join(f"{lines[variant]}\n" for variant in ALL_VARIANTS if variant in lines))


if __name__ == "__main__":
    main()

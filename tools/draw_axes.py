"""Draws the pictures of docs/distributed.md: how each kind of parallelism divides a model and its requests.

python tools/draw_axes.py            writes docs/images/axis-*.svg
"""

from __future__ import annotations

from pathlib import Path

STYLE = (
    'text{font-family:system-ui,-apple-system,"Segoe UI",sans-serif;fill:#1a202c;font-size:12px}'
    ".t{font-size:13px;font-weight:600}.s{font-size:11px;fill:#4a5568}.c{text-anchor:middle}"
)
MARKER = (
    '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="#2d3748"/></marker></defs>'
)
BLUE = "#bcd9f7"
ORANGE = "#f9d3a5"
GREEN = "#c3ecc9"
VIOLET = "#dcccf5"
GREY = "#edf2f7"
WHITE = "#ffffff"


class Picture:
    def __init__(self, name: str, label: str, width: int, height: int) -> None:
        self.name = name
        self.size = (width, height)
        self.label = label
        self.parts = list[str]()

    def box(self, x: float, y: float, width: float, height: float, color: str, text: str = "", kind: str = "") -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{color}" stroke="#4a5568"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, f"c {kind}")

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """Draw a rank or a replica, with its title above."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="#f7fafc" stroke="#a0aec0"/>'
        )
        self.text(x + width / 2, y - 8, title, "c t")

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}">{text}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, both: bool = False) -> None:
        start = ' marker-start="url(#a)"' if both else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#2d3748" marker-end="url(#a)"{start}/>'
        )

    def write(self, folder: Path) -> None:
        width, height = self.size
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        body = "\n".join(self.parts)
        (folder / f"axis-{self.name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{self.label}">\n'
            f"{MARKER}<style>{STYLE}</style>\n"
            f'<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n',
            encoding="utf-8",
        )


def tensor() -> Picture:
    picture = Picture("tensor", "Tensor parallelism: each rank has a part of every layer", 640, 270)
    for rank in range(2):
        x = 40 + 330 * rank
        picture.frame(x, 40, 230, 215, f"rank {rank}")
        for layer in range(2):
            y = 55 + 100 * layer
            heads = "0 to 15" if rank == 0 else "16 to 31"
            columns = "first half" if rank == 0 else "second half"
            picture.box(x + 15, y, 200, 34, BLUE, f"attention, heads {heads}")
            picture.box(x + 15, y + 48, 200, 34, ORANGE, f"MLP, {columns}")
    for y in (72, 120, 172, 220):
        picture.arrow(260, y, 380, y, both=True)
        picture.text(320, y - 5, "sum", "c s")
    picture.text(320, 12, "all ranks compute the same tokens at the same time", "c s")
    return picture


def pipeline() -> Picture:
    picture = Picture("pipeline", "Pipeline parallelism: each stage has some of the layers", 640, 270)
    for rank in range(2):
        x = 40 + 330 * rank
        picture.frame(x, 40, 230, 85, f"stage {rank}")
        picture.box(x + 15, 52, 200, 60, BLUE if rank == 0 else VIOLET, f"layers {1 + 16 * rank} to {16 + 16 * rank}")
    picture.arrow(260, 82, 380, 82)
    picture.text(320, 74, "hidden states", "c s")
    picture.text(320, 12, "several steps are in flight, each with other requests", "c s")
    colors = (GREEN, ORANGE, BLUE, VIOLET)
    for stage in range(2):
        y = 165 + 42 * stage
        picture.text(70, y + 20, f"stage {stage}", "c")
        for step in range(6):
            picture.box(110 + 80 * (step + stage), y, 76, 32, colors[step % 4], f"step {step + 1}")
    picture.arrow(110, 250, 620, 250)
    picture.text(85, 254, "time", "c s")
    picture.size = 690, 270
    return picture


def data() -> Picture:
    picture = Picture("data", "Data parallelism: replicas of the model behind one server", 640, 260)
    picture.box(220, 15, 200, 34, GREY, "server and router", "t")
    picture.text(435, 36, "lowest 4 · waiting + running", "s")
    for replica in range(3):
        x = 30 + 200 * replica
        picture.frame(x, 100, 180, 145, f"replica {replica}")
        picture.box(x + 15, 112, 150, 30, GREEN, "scheduler")
        picture.box(x + 15, 150, 150, 46, BLUE, "all layers")
        picture.box(x + 15, 204, 150, 30, ORANGE, "KV cache")
        picture.arrow(320, 49, x + 90, 76)
    return picture


def experts() -> Picture:
    picture = Picture("experts", "Expert parallelism: replicas share the experts of each layer", 660, 330)
    for replica in range(2):
        x = 30 + 330 * replica
        picture.frame(x, 40, 270, 275, f"replica {replica}")
        picture.box(x + 15, 52, 240, 34, BLUE, "attention of its own requests")
        picture.box(x + 15, 98, 240, 28, GREY, "router: experts for each token")
        for expert in range(4):
            picture.box(x + 15 + 61 * expert, 178, 56, 40, ORANGE, f"E{4 * replica + expert}")
        picture.box(x + 15, 270, 240, 34, GREEN, "weighted sum of the results")
        picture.arrow(x + 105, 126, x + 105, 176)
        picture.arrow(x + 105, 218, x + 105, 268)
    for y, label in ((152, "tokens"), (244, "results")):
        picture.arrow(230, y - 5, 430, y - 5)
        picture.arrow(430, y + 5, 230, y + 5)
        picture.text(330, y + 18, label, "c s")
    picture.text(330, 12, "a token goes to the ranks that have its experts, and its results come back", "c s")
    return picture


def context() -> Picture:
    picture = Picture("context", "Context parallelism: each rank has some of the tokens of every context", 660, 320)
    picture.text(20, 42, "context", "t")
    for token in range(12):
        picture.box(90 + 46 * token, 22, 42, 30, BLUE if token % 2 == 0 else ORANGE, f"{token}")
    for rank in range(2):
        x = 30 + 330 * rank
        color = BLUE if rank == 0 else ORANGE
        picture.frame(x, 95, 270, 215, f"rank {rank}")
        picture.text(x + 15, 116, "keys and values in its cache", "s")
        for place in range(6):
            picture.box(x + 15 + 41 * place, 122, 38, 28, color, f"{2 * place + rank}")
        picture.box(x + 15, 180, 240, 34, GREY, "attention of all queries to them")
        picture.box(x + 15, 262, 240, 34, GREEN, "merge of the partial results")
        picture.arrow(x + 60, 150, x + 60, 178)
        picture.arrow(x + 60, 214, x + 60, 260)
    for y, label in ((170, "queries"), (240, "partial results")):
        picture.arrow(230, y - 10, 400, y - 10)
        picture.arrow(400, y, 230, y)
        picture.text(330, y + 13, label, "c s")
    return picture


def main() -> None:
    folder = Path(__file__).parents[1] / "docs" / "images"
    for draw in (tensor, pipeline, data, experts, context):
        draw().write(folder)


if __name__ == "__main__":
    main()

"""The images that the bundled model's encoder is trained on, and the questions about them.

    python tools/demo_pictures.py 3 red star stars.png   # draws one

Each kind of question has two sets of phrasings: training uses the first, the examination the second.
"""

import argparse
import math
import random
from dataclasses import dataclass
from itertools import product

import numpy as np
from demo_corpus import render
from demo_questions import dress, expand, normalize
from PIL import Image, ImageColor, ImageDraw

PLACEHOLDER = "<image>"

# ------------------------------------------------------------------------------------------------------------- pictures

COLOURS = {
    "red": (220, 30, 35),
    "green": (40, 150, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 40),
    "purple": (125, 45, 165),
    "orange": (250, 135, 25),
    "pink": (250, 150, 190),
    "brown": (125, 75, 40),
    "black": (20, 20, 20),
}
MOST = 4  # shapes in a picture
Point = tuple[float, float]


def _circle(radius: float = 1.0, x: float = 0.0, start: float = 0.0, stop: float = 2 * math.pi) -> list[Point]:
    angles = np.linspace(start, stop, 40)
    return [(x + radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]


def _star() -> list[Point]:
    corners = [(1.0 if k % 2 == 0 else 0.42, math.pi * (k / 5 - 0.5)) for k in range(10)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for radius, angle in corners]


def _heart() -> list[Point]:
    t = np.linspace(0, 2 * math.pi, 40)
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return list(zip(np.sin(t) ** 3, -y / 16, strict=True))


def _moon() -> list[Point]:
    """Return the outline of a circle with a smaller one cut out on its right side. Both pass through the points at
    angles of +-1 radian."""
    x = math.cos(1)
    y = math.sin(1)
    inner = _circle(math.hypot(x - 0.45, y), 0.45, math.atan2(-y, x - 0.45), -2 * math.pi + math.atan2(y, x - 0.45))
    return _circle(1.0, 0.0, 1.0, 2 * math.pi - 1.0) + inner


# In units of half the width. A ring's centre is drawn in the background colour.
OUTLINES: dict[str, list[Point]] = {
    "ball": _circle(),
    "box": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "star": _star(),
    "heart": _heart(),
    "moon": _moon(),
    "tree": [
        (0, -1),
        (0.45, -0.4),
        (0.25, -0.4),
        (0.65, 0.15),
        (0.4, 0.15),
        (0.8, 0.7),
        (0.15, 0.7),
        (0.15, 1),
        (-0.15, 1),
        (-0.15, 0.7),
        (-0.8, 0.7),
        (-0.4, 0.15),
        (-0.65, 0.15),
        (-0.25, -0.4),
        (-0.45, -0.4),
    ],
    "ring": _circle(),
    "cross": [
        (-0.3, -1),
        (0.3, -1),
        (0.3, -0.3),
        (1, -0.3),
        (1, 0.3),
        (0.3, 0.3),
        (0.3, 1),
        (-0.3, 1),
        (-0.3, 0.3),
        (-1, 0.3),
        (-1, -0.3),
        (-0.3, -0.3),
    ],
}
PLURALS = {shape: shape + ("es" if shape[-1] in "xs" else "s") for shape in OUTLINES}


@dataclass(frozen=True)
class Scene:
    shape: str
    colour: str
    number: int

    @property
    def name(self) -> str:
        return self.shape if self.number == 1 else PLURALS[self.shape]


SCENES = [Scene(*parts) for parts in product(OUTLINES, COLOURS, range(1, MOST + 1))]


def draw(scene: Scene, rng: random.Random, size: tuple[int, int] = (192, 192)) -> Image.Image:
    """Return an image of the scene: sizes, positions and angles are random, and the shapes do not touch."""
    background = tuple(rng.randint(225, 255) for _ in range(3))
    colours = zip(COLOURS[scene.colour], ImageColor.getrgb(scene.colour), strict=True)
    between = rng.random()
    usual = [ours + between * (theirs - ours) for ours, theirs in colours]
    side = min(size)
    image = Image.new("RGB", size, background)
    pen = ImageDraw.Draw(image)
    placed = list[tuple[float, float, float]]()
    largest = 0.42 / scene.number**0.5
    while len(placed) < scene.number:
        radius = side * rng.uniform(0.55, 1) * largest
        x, y = (rng.uniform(radius, length - radius) for length in size)
        if any(math.hypot(x - a, y - b) < 1.1 * (radius + r) + 4 for a, b, r in placed):
            largest = max(0.12, largest * 0.99)
            continue
        placed.append((x, y, radius))
        colour = tuple(max(0, min(255, round(value) + rng.randint(-14, 14))) for value in usual)
        angle = rng.uniform(-0.3, 0.3)
        cos = radius * math.cos(angle)
        sin = radius * math.sin(angle)
        pen.polygon([(x + cos * u - sin * v, y + sin * u + cos * v) for u, v in OUTLINES[scene.shape]], fill=colour)
        if scene.shape == "ring":
            hole = 0.55 * radius
            pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=background)
    return image


# ------------------------------------------------------------------------------------------------------------ questions

# The phrasings of training, and those of the examination. {it} becomes "it" or "they", {xs} the shapes in the image.
PHRASINGS: dict[str, tuple[str, str]] = {
    "shape": (
        """(what|which) shape (is it|is this|do you see|is in the picture|is in the image)?
        (what|which) shape (can you find|do you find|has it|is shown|is in this image)?
        (what|which) kind of (shape|thing) (is it|is this|do you see|is shown|is here)?
        (tell me|say|name) (which|what) shape (it is|you see|is in the picture|that is).
        (tell me|say|name|do you know) the (shape|kind of shape) (in the picture|of it|that you see|here).
        what (is it|is this|is that|are they|are these)?""",
        """what shape do we have here?
        please tell me what shape this is.
        which shape is shown in the image?
        name the shape you can see.""",
    ),
    "colour": (
        """what (colour|color) (is it|are they|is this|do you see|is in the picture)?
        which (colour|color) (is it|are they|do you see|do the {xs} have|is in the picture)?
        what (colour|color) do the {xs} have?
        what is the (colour|color) of (the {xs}|it|this|the shape|the picture)?
        (tell me|say|name) the (colour|color) of (the {xs}|it|this|the shapes).
        what (colour|color) (has|is) the shape?
        (what|which) (colour|color) can you (find|spot)( here| in the picture|)?
        what (colour|color) does (the|this) (picture|image) show?""",
        """what (colour|color) do the shapes have?
        please tell me the (colour|color).
        which (colour|color) is shown in the picture?
        say what (colour|color) it is.""",
    ),
    "number": (
        """how many (are there|do you see|are in the picture|are in the image|shapes are there|things do you see)?
        how many (shapes|things|{xs}) (are there|do you see|are in the picture|are in this picture|are shown)?
        (count|please count) (the {xs}|the shapes|them|what you see).
        (tell me|say) how many (there are|you see|{xs} there are|shapes you see).
        what is the number of (shapes|{xs})?
        how many (shapes|things|{xs}) can you (find|spot)( here| in the picture|)?""",
        """how many are shown here?
        please tell me how many there are.
        how many {xs} are in the image?
        count how many you see.""",
    ),
    "all": (
        """what (do|can) you see?
        what (do|can) you see (here|in the picture|in the image|in it|on this picture)?
        what (is|is there|is shown) (here|in the picture|in this picture|in the image)?
        (describe|please describe|can you describe|could you describe) (it|this|the picture|the image|what you see).
        what (does|can) (the|this) (picture|image) show?
        (tell me|say) what (you see|is in the picture|you see in the picture|is here|is in this image).
        (tell me|say|tell us) what (you see|you can see|you find|you spot|there is)( in it| on it| there| now|).
        (tell me|say) what (you can see|you find|you spot|there is) here.""",
        """please describe what is in this picture.
        what can be seen here?
        say what is shown in the image.""",
    ),
}


def phrasings(kind: str, held_out: bool) -> list[str]:
    lines = PHRASINGS[kind][held_out].splitlines()
    return [text for line in lines for text in expand(line.strip())]


def assert_held_out() -> None:
    for kind in PHRASINGS:
        shared = set(map(normalize, phrasings(kind, False))) & set(map(normalize, phrasings(kind, True)))
        assert not shared, f"training has phrasings of the examination: {sorted(shared)}"


def answer(kind: str, scene: Scene) -> str:
    one = scene.number == 1
    name = scene.name
    return {
        "shape": f"It is a {name}." if one else f"They are {name}.",
        "colour": f"The {name} {'is' if one else 'are'} {scene.colour}.",
        "number": f"There {'is' if one else 'are'} {scene.number} {name}.",
        "all": f"I see {scene.number} {scene.colour} {name}.",
    }[kind]


def is_right(kind: str, scene: Scene, answer: str) -> bool:
    wanted = {"shape": [scene.name], "colour": [scene.colour], "number": [str(scene.number)]}
    wanted["all"] = [word for words in wanted.values() for word in words]
    return set(wanted[kind]) <= set(normalize(answer).split())


def ask(kind: str, scene: Scene, rng: random.Random, held_out: bool = False) -> str:
    phrasing = rng.choice(phrasings(kind, held_out)).replace("{xs}", PLURALS[scene.shape])
    return dress(phrasing, rng, plain=held_out)


@dataclass(frozen=True)
class Asked:
    """An examination question about a drawing."""

    kind: str
    scene: Scene
    image: Image.Image
    prompt: str


def examination_of_pictures(count: int, seed: int = 2028) -> list[Asked]:
    """Return `count` questions of all kinds about drawings of random scenes."""
    rng = random.Random(f"examination {seed}")
    asked = list[Asked]()
    for number in range(count):
        kind = list(PHRASINGS)[number % len(PHRASINGS)]
        scene = rng.choice(SCENES)
        said = f"{PLACEHOLDER}\n{ask(kind, scene, rng, held_out=True)}"
        prompt = render([{"role": "user", "content": said}], add_generation_prompt=True)
        asked.append(Asked(kind, scene, draw(scene, rng), prompt))
    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a picture for quire-demo/vision.")
    parser.add_argument("number", type=int, choices=range(1, MOST + 1))
    parser.add_argument("colour", choices=COLOURS)
    parser.add_argument("shape", choices=OUTLINES)
    parser.add_argument("file", help="where to write it, such as stars.png")
    parser.add_argument("--seed", type=int, default=0, help="where the shapes are (default: 0)")
    args = parser.parse_args()
    draw(Scene(args.shape, args.colour, args.number), random.Random(args.seed)).save(args.file)


if __name__ == "__main__":
    main()

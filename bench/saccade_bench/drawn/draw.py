"""Images for the demo model: a scene is a frozen description, which `render` draws with Pillow.

All randomness comes from the `random.Random` argument.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

RGB = tuple[int, int, int]

COLOURS: dict[
    str, tuple[RGB, RGB]
] = {  # two shades each; a drawn colour is between them, with slight jitter
    "red": ((205, 35, 40), (255, 0, 0)),
    "green": ((35, 150, 60), (0, 128, 0)),
    "blue": ((45, 95, 215), (0, 0, 255)),
    "yellow": ((245, 215, 45), (255, 255, 0)),
    "orange": ((240, 130, 25), (255, 155, 0)),
    "purple": ((140, 55, 170), (128, 0, 128)),
    "black": ((25, 25, 28), (0, 0, 0)),
    "white": ((245, 245, 242), (255, 255, 255)),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross")

DEFAULT_FONT = "default"
FONT_FILES: dict[
    str, tuple[str, str]
] = {  # name -> (importable package, file in it); used if installed
    "dejavu-sans": ("matplotlib", "mpl-data/fonts/ttf/DejaVuSans.ttf"),
    "dejavu-sans-bold": ("matplotlib", "mpl-data/fonts/ttf/DejaVuSans-Bold.ttf"),
    "dejavu-serif": ("matplotlib", "mpl-data/fonts/ttf/DejaVuSerif.ttf"),
    "dejavu-serif-bold": ("matplotlib", "mpl-data/fonts/ttf/DejaVuSerif-Bold.ttf"),
    "dejavu-mono": ("matplotlib", "mpl-data/fonts/ttf/DejaVuSansMono.ttf"),
    "dejavu-mono-bold": ("matplotlib", "mpl-data/fonts/ttf/DejaVuSansMono-Bold.ttf"),
    "roboto": ("font_roboto", "files/Roboto-Regular.ttf"),
    "roboto-bold": ("font_roboto", "files/Roboto-Bold.ttf"),
    "roboto-italic": ("font_roboto", "files/Roboto-Italic.ttf"),
    "source-sans": ("font_source_sans_pro", "files/SourceSansPro-Regular.ttf"),
    "source-sans-bold": ("font_source_sans_pro", "files/SourceSansPro-Bold.ttf"),
    "source-serif": ("font_source_serif_pro", "files/SourceSerifPro-Regular.ttf"),
    "source-serif-bold": ("font_source_serif_pro", "files/SourceSerifPro-Bold.ttf"),
    "roboto-medium": ("font_roboto", "files/Roboto-Medium.ttf"),
    "source-sans-italic": ("font_source_sans_pro", "files/SourceSansPro-It.ttf"),
    "source-serif-semibold": ("font_source_serif_pro", "files/SourceSerifPro-Semibold.ttf"),
    "dejavu-serif-italic": ("matplotlib", "mpl-data/fonts/ttf/DejaVuSerif-Italic.ttf"),
}
HELD_OUT_FONTS = (
    "roboto-medium",
    "source-sans-italic",
    "source-serif-semibold",
    "dejavu-serif-italic",
)
"""Never used for training. The held-out evaluation also uses those that are installed."""

MIN_FONT = 14  # px; smaller text need not be readable
MIN_RADIUS = 9  # px


@dataclass(frozen=True)
class DrawnShape:
    """One coloured shape. `x` and `y` are its centre and `radius` half its extent, in pixels.
    `angle` is in radians.
    """

    kind: str
    colour: str
    rgb: RGB
    x: float
    y: float
    radius: float
    angle: float = 0.0


@dataclass(frozen=True)
class DrawnText:
    """One line of text. `x` is its left edge and `y` its baseline, in pixels."""

    text: str
    font: str
    size: int
    rgb: RGB
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """The description of an image.

    The background is a vertical gradient from `background` to `shade`.
    """

    width: int
    height: int
    background: RGB
    shade: RGB
    shapes: tuple[DrawnShape, ...] = ()
    text: DrawnText | None = None
    noise: int = 0  # 0: none; otherwise selects a fixed noise pattern
    smooth: bool = True  # antialiased edges
    page: tuple[DrawnText, ...] = ()  # more lines; only used in the first stage of training


@dataclass(frozen=True)
class Glyph:
    """One character, with its centre and size in pixels."""

    char: str
    x: float
    y: float
    width: float
    height: float


# Fonts


@lru_cache(maxsize=1)
def installed_fonts() -> tuple[str, ...]:
    """Return the names of available fonts. Pillow's built-in font is the first."""
    found = [DEFAULT_FONT]
    for name in FONT_FILES:
        if _font_path(name) is not None:
            found.append(name)
    return tuple(found)


def training_fonts() -> tuple[str, ...]:
    """Return the installed fonts without the held-out ones."""
    return tuple(name for name in installed_fonts() if name not in HELD_OUT_FONTS)


def _font_path(name: str) -> Path | None:
    package, file = FONT_FILES[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / file
    return path if path.is_file() else None


@lru_cache(maxsize=2048)
def load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a font at a size in pixels. Raises ValueError if it is not installed."""
    if name == DEFAULT_FONT:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
        return font
    path = _font_path(name)
    if path is None:
        raise ValueError(f"font {name!r} is not installed (package {FONT_FILES[name][0]})")
    return ImageFont.truetype(str(path), size)


@lru_cache(maxsize=4096)
def _advance(font: str, char: str) -> float:
    """Return the width of a character per pixel of font size."""
    return load_font(font, 100).getlength(char) / 100


def lines(scene: Scene) -> tuple[DrawnText, ...]:
    """Return every line of text in the scene."""
    return scene.page if scene.text is None else (scene.text, *scene.page)


def glyphs(text: DrawnText) -> list[Glyph]:
    """Return the position of every character of a line."""
    edges = [text.x]
    for char in text.text:
        edges.append(edges[-1] + _advance(text.font, char) * text.size)
    middle = text.y - 0.35 * text.size
    height = 0.7 * text.size
    return [
        Glyph(char, (edges[i] + edges[i + 1]) / 2, middle, edges[i + 1] - edges[i], height)
        for i, char in enumerate(text.text)
    ]


# Drawing


def render(scene: Scene) -> Image.Image:
    """Draw a scene as an RGB image of `scene.width` x `scene.height` pixels. Equal scenes have
    equal images.
    """
    scale = 2 if scene.smooth and scene.shapes else 1
    size = (scene.width * scale, scene.height * scale)
    image = _background(scene, size)
    draw = ImageDraw.Draw(image)
    for shape in scene.shapes:
        _draw_shape(draw, shape, scale)
    if scale > 1:
        image = image.reduce(scale)
    for text in lines(scene):
        ImageDraw.Draw(image).text(
            (text.x, text.y),
            text.text,
            fill=text.rgb,
            font=load_font(text.font, text.size),
            anchor="ls",
        )
    if scene.noise:
        grain = _grain(scene.width, scene.height, scene.noise)
        image = Image.blend(image, grain, 0.08)
    return image


def _background(scene: Scene, size: tuple[int, int]) -> Image.Image:
    if scene.background == scene.shade:
        return Image.new("RGB", size, scene.background)
    strip = Image.new("RGB", (1, 2))
    strip.putpixel((0, 0), scene.background)
    strip.putpixel((0, 1), scene.shade)
    return strip.resize(size, Image.Resampling.BILINEAR)


@lru_cache(maxsize=64)
def _grain_tile(strength: int) -> Image.Image:
    rng = random.Random(strength)
    level = 40 + 20 * strength
    data = bytes(max(0, min(255, int(rng.gauss(128, level)))) for _ in range(128 * 128))
    return Image.frombytes("L", (128, 128), data)


def _grain(width: int, height: int, strength: int) -> Image.Image:
    tile = _grain_tile(strength)
    grain = Image.new("L", (width, height))
    for top in range(0, height, 128):
        for left in range(0, width, 128):
            grain.paste(tile, (left, top))
    return grain.convert("RGB")


def _draw_shape(draw: ImageDraw.ImageDraw, shape: DrawnShape, scale: int) -> None:
    x, y, r = shape.x * scale, shape.y * scale, shape.radius * scale
    if shape.kind == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=shape.rgb)
        return
    cos, sin = math.cos(shape.angle), math.sin(shape.angle)
    points = [
        (x + r * (px * cos - py * sin), y + r * (px * sin + py * cos))
        for px, py in _outline(shape.kind)
    ]
    draw.polygon(points, fill=shape.rgb)


@lru_cache(maxsize=16)
def _outline(kind: str) -> tuple[tuple[float, float], ...]:
    """Return the corners of a shape in the unit box, with y pointing down."""
    if kind == "square":
        return ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85))
    if kind == "triangle":
        return ((0.0, -0.95), (0.98, 0.8), (-0.98, 0.8))
    if kind == "cross":
        a, b = 0.32, 0.95
        return (
            (-a, -b),
            (a, -b),
            (a, -a),
            (b, -a),
            (b, a),
            (a, a),
            (a, b),
            (-a, b),
            (-a, a),
            (-b, a),
            (-b, -a),
            (-a, -a),
        )
    if kind == "star":
        turns = [(i * math.pi / 5 - math.pi / 2, 1.0 if i % 2 == 0 else 0.42) for i in range(10)]
        return tuple((r * math.cos(t), r * math.sin(t)) for t, r in turns)
    if kind == "heart":
        steps = [i * math.tau / 48 for i in range(48)]
        curve = [
            (
                16 * math.sin(t) ** 3,
                -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)),
            )
            for t in steps
        ]
        return tuple((px / 17, (py - 2.5) / 15.5) for px, py in curve)
    raise ValueError(f"unknown shape {kind!r}")


# Placement


def draw_size(rng: random.Random, low: int = 96, high: int = 256) -> tuple[int, int]:
    """Return a random size: sides are log-uniform in [low, high] pixels, with a ratio up to 2.5."""
    while True:
        width, height = (
            round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(2)
        )
        if max(width, height) <= 2.5 * min(width, height):
            return width, height


def draw_colour(rng: random.Random, name: str) -> RGB:
    """Return a random shade of the named colour."""
    first, second = COLOURS[name]
    mix = rng.random() ** 2
    red, green, blue = (
        round(a + (b - a) * mix) + rng.randint(-10, 10) for a, b in zip(first, second, strict=True)
    )
    return _clip(red), _clip(green), _clip(blue)


def draw_background(rng: random.Random, avoid: Sequence[RGB] = ()) -> tuple[RGB, RGB]:
    """Return a background (upper and lower edge) that contrasts with every colour of `avoid`."""
    while True:
        kind = rng.random()
        if kind < 0.3:
            base = rng.choice([(255, 255, 255), (250, 250, 250), (240, 240, 235)])
        elif kind < 0.65:
            base = (rng.randint(190, 250), rng.randint(190, 250), rng.randint(190, 250))
        elif kind < 0.85:
            grey = rng.randint(110, 180)
            base = (
                grey + rng.randint(-12, 12),
                grey + rng.randint(-12, 12),
                grey + rng.randint(-12, 12),
            )
        else:
            base = (rng.randint(0, 70), rng.randint(0, 70), rng.randint(0, 70))
        shade = base
        if rng.random() < 0.25:
            step = rng.randint(-35, 35)
            shade = (_clip(base[0] + step), _clip(base[1] + step), _clip(base[2] + step))
        if all(_distance(edge, rgb) > 95 for edge in (base, shade) for rgb in avoid):
            return base, shade


def draw_text_scene(
    rng: random.Random,
    text: str,
    size: tuple[int, int],
    fonts: Sequence[str],
    limits: tuple[float, float] = (MIN_FONT, math.inf),
) -> Scene:
    """Return a scene with one line of text in a random font, size (within `limits`, px), colour and
    position. The line always fits into the image.
    """
    width, height = size
    name = DEFAULT_FONT if rng.random() < 0.3 else rng.choice(list(fonts))
    unit = load_font(name, 100).getlength(text) / 100  # line width per pixel of font size
    room = min(0.92 * width / unit, 0.75 * height)
    smallest = max(MIN_FONT, min(limits[0], math.floor(room)))
    largest = max(smallest, min(room, limits[1]))
    font_size = round(math.exp(rng.uniform(math.log(smallest), math.log(largest))))
    font = load_font(name, font_size)
    left, top, right, bottom = font.getbbox(text, anchor="ls")
    x = rng.uniform(2 - left, max(2 - left, width - 2 - right))
    y = rng.uniform(2 - top, max(2 - top, height - 2 - bottom))
    rgb, (background, shade) = _text_colours(rng)
    return Scene(
        width,
        height,
        background,
        shade,
        (),
        DrawnText(text, name, font_size, rgb, x, y),
        _draw_noise(rng),
    )


def _text_colours(rng: random.Random) -> tuple[RGB, tuple[RGB, RGB]]:
    """Return a text colour and a background that differ by more than 100 levels of luminance."""
    while True:
        named = rng.random() < 0.5
        rgb = (
            draw_colour(rng, rng.choice(list(COLOURS)))
            if named
            else (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))
        )
        if rng.random() < 0.3:
            rgb = (0, 0, 0)
        background = draw_background(rng)
        if all(abs(_luminance(rgb) - _luminance(edge)) > 100 for edge in background):
            return rgb, background


def draw_shapes_scene(
    rng: random.Random, things: Sequence[tuple[str, str]], size: tuple[int, int]
) -> Scene:
    """Return a scene with `(colour, shape)` pairs, which do not overlap.

    Up to three shapes are placed from left to right in the given order, with centres at least 14 px
    apart horizontally, so that their order is unambiguous.
    """
    width, height = size
    ordered = len(things) <= 3
    colours = [draw_colour(rng, colour) for colour, _ in things]
    alike = rng.random() < 0.4  # all have about the same size
    while True:
        places = _place(rng, len(things), width, height, ordered, alike)
        if places is not None:
            break
    if ordered:
        places.sort()
    tilt = 0.2 if rng.random() < 0.5 else 0.0
    shapes = tuple(
        DrawnShape(kind, colour, rgb, x, y, r, rng.uniform(-tilt, tilt))
        for (colour, kind), rgb, (x, y, r) in zip(things, colours, places, strict=True)
    )
    background, shade = draw_background(rng, colours)
    return Scene(
        width, height, background, shade, shapes, None, _draw_noise(rng), rng.random() < 0.7
    )


def _place(
    rng: random.Random, count: int, width: int, height: int, ordered: bool, alike: bool
) -> list[tuple[float, float, float]] | None:
    """Return (x, y, radius) of circles without overlap, or None if this attempt fails."""
    side = min(width, height)
    largest = max(
        MIN_RADIUS + 1.0, side * {1: 0.44, 2: 0.3, 3: 0.24}.get(count, 0.42 / math.sqrt(count))
    )
    smallest = min(largest, max(MIN_RADIUS, side * 0.07))
    common = math.exp(rng.uniform(math.log(smallest), math.log(largest)))
    places: list[tuple[float, float, float]] = []
    for _ in range(60):
        radius = (
            common * rng.uniform(0.9, 1.0)
            if alike
            else math.exp(rng.uniform(math.log(smallest), math.log(largest)))
        )
        radius = max(float(MIN_RADIUS), radius)
        x = rng.uniform(radius + 1, width - radius - 1)
        y = rng.uniform(radius + 1, height - radius - 1)
        apart = all(math.hypot(x - px, y - py) > radius + pr + 3 for px, py, pr in places)
        clear = not ordered or all(abs(x - px) >= 14 for px, _, _ in places)
        if apart and clear:
            places.append((x, y, radius))
            if len(places) == count:
                return places
    return None


def draw_page(
    rng: random.Random, size: tuple[int, int], fonts: Sequence[str], letters: str, largest: float
) -> Scene:
    """Return an image full of short random lines and coloured shapes, without overlap. The first
    stage of training uses such pages.
    """
    width, height = size
    background, shade = draw_background(rng)
    taken: list[tuple[float, float, float, float]] = []
    texts: list[DrawnText] = []
    shapes: list[DrawnShape] = []
    for _ in range(40):
        if rng.random() < 0.3:
            # A shape, if it contrasts with the background and overlaps nothing.
            radius = math.exp(
                rng.uniform(math.log(MIN_RADIUS), math.log(min(60.0, 0.3 * min(size))))
            )
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            colour = rng.choice(list(COLOURS))
            rgb = draw_colour(rng, colour)
            if min(_distance(rgb, background), _distance(rgb, shade)) > 95 and _free(
                taken, (x - radius, y - radius, x + radius, y + radius)
            ):
                shapes.append(
                    DrawnShape(
                        rng.choice(SHAPES), colour, rgb, x, y, radius, rng.uniform(-0.2, 0.2)
                    )
                )
            continue
        # A line of text, if it fits and overlaps nothing.
        name = DEFAULT_FONT if rng.random() < 0.3 else rng.choice(list(fonts))
        text = "".join(rng.choice(letters) for _ in range(rng.randint(1, 6)))
        high = max(MIN_FONT + 1.0, min(largest, 0.6 * height, 0.9 * width / (0.6 * len(text))))
        font_size = round(math.exp(rng.uniform(math.log(MIN_FONT), math.log(high))))
        length, above, below = (
            sum(_advance(name, char) for char in text) * font_size,
            0.76 * font_size,
            0.24 * font_size,
        )
        x, y = rng.uniform(1, width - 1 - length), rng.uniform(above, height - below)
        if length < width - 2 and _free(taken, (x, y - above, x + length, y + below)):
            texts.append(
                DrawnText(text, name, font_size, _contrasting(rng, background, shade), x, y)
            )
    return Scene(
        width,
        height,
        background,
        shade,
        tuple(shapes),
        None,
        _draw_noise(rng),
        rng.random() < 0.7,
        tuple(texts),
    )


def _free(
    taken: list[tuple[float, float, float, float]], box: tuple[float, float, float, float]
) -> bool:
    """Reserve a box (left, top, right, bottom) unless it overlaps a reserved one. Return True if it
    was reserved.
    """
    left, top, right, bottom = box
    if any(
        left < box[2] + 2 and box[0] - 2 < right and top < box[3] + 2 and box[1] - 2 < bottom
        for box in taken
    ):
        return False
    taken.append(box)
    return True


def _contrasting(rng: random.Random, *edges: RGB) -> RGB:
    """Return a colour that differs from every edge by more than 80 levels of luminance."""
    while True:
        rgb = (
            draw_colour(rng, rng.choice(list(COLOURS)))
            if rng.random() < 0.5
            else (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))
        )
        if all(abs(_luminance(rgb) - _luminance(edge)) > 80 for edge in edges):
            return rgb


def _draw_noise(rng: random.Random) -> int:
    return rng.randint(1, 3) if rng.random() < 0.15 else 0


def _clip(level: int) -> int:
    return max(0, min(255, level))


def _distance(a: RGB, b: RGB) -> float:
    return math.dist(a, b)


def _luminance(rgb: RGB) -> float:
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]

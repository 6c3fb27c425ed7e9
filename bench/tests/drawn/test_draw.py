"""The drawn pictures: the same seed gives the same pixels, and a picture shows what its scene
describes.
"""

import itertools
import random

import pytest

from saccade_bench.drawn.draw import (
    DEFAULT_FONT,
    SHAPES,
    Scene,
    draw_page,
    draw_shapes_scene,
    draw_size,
    draw_text_scene,
    glyphs,
    load_font,
    render,
)
from saccade_bench.drawn.tasks import SKILLS, held_out


@pytest.mark.parametrize("skill", SKILLS)
def test_the_same_seed_draws_the_same_task_and_pixels(skill: str) -> None:
    first, again = held_out(skill, 5, [DEFAULT_FONT]), held_out(skill, 5, [DEFAULT_FONT])
    assert first == again
    for one, two in zip(first.turns, again.turns, strict=True):
        assert [render(scene).tobytes() for scene in one.scenes] == [
            render(scene).tobytes() for scene in two.scenes
        ]


def test_another_seed_draws_another_picture() -> None:
    pictures = {
        render(held_out("number", seed, [DEFAULT_FONT]).turns[0].scenes[0]).tobytes()
        for seed in range(20)
    }
    assert len(pictures) == 20


def test_a_picture_has_the_size_of_its_scene() -> None:
    rng = random.Random(0)
    for _ in range(50):
        size = draw_size(rng)
        assert render(draw_text_scene(rng, "4071", size, [DEFAULT_FONT])).size == size
        assert max(size) <= 2.5 * min(size)
        assert min(size) >= 96 and max(size) <= 320


@pytest.mark.parametrize("kind", SHAPES)
def test_a_shape_is_drawn_in_its_colour_at_its_centre(kind: str) -> None:
    scene = draw_shapes_scene(random.Random(3), [("red", kind)], (160, 128))
    shape = scene.shapes[0]
    plain = Scene(scene.width, scene.height, scene.background, scene.shade, scene.shapes)
    assert render(plain).getpixel((round(shape.x), round(shape.y))) == shape.rgb


def test_shapes_lie_inside_the_picture_and_apart() -> None:
    rng = random.Random(1)
    for _ in range(100):
        scene = draw_shapes_scene(rng, [("blue", "circle")] * rng.randint(1, 6), draw_size(rng))
        for i, one in enumerate(scene.shapes):
            assert one.radius <= one.x <= scene.width - one.radius
            assert one.radius <= one.y <= scene.height - one.radius
            for other in scene.shapes[:i]:
                assert (one.x - other.x) ** 2 + (one.y - other.y) ** 2 > (
                    one.radius + other.radius
                ) ** 2


def test_up_to_three_shapes_stand_left_to_right() -> None:
    rng = random.Random(2)
    for _ in range(50):
        scene = draw_shapes_scene(
            rng, [("red", "star"), ("blue", "heart"), ("green", "cross")], draw_size(rng)
        )
        places = [shape.x for shape in scene.shapes]
        assert [shape.colour for shape in scene.shapes] == ["red", "blue", "green"]
        assert all(right - left >= 14 for left, right in itertools.pairwise(places))


def test_a_line_of_text_lies_inside_the_picture() -> None:
    rng = random.Random(4)
    for _ in range(50):
        scene = draw_text_scene(rng, "123456", draw_size(rng), [DEFAULT_FONT])
        assert scene.text is not None
        left, top, right, bottom = load_font(scene.text.font, scene.text.size).getbbox(
            "123456", anchor="ls"
        )
        assert scene.text.x + left >= 0 and scene.text.x + right <= scene.width
        assert scene.text.y + top >= 0 and scene.text.y + bottom <= scene.height
        places = [glyph.x for glyph in glyphs(scene.text)]
        assert places == sorted(places)


def test_on_a_page_nothing_lies_upon_another() -> None:
    rng = random.Random(6)
    for _ in range(20):
        page = draw_page(rng, draw_size(rng), [DEFAULT_FONT], "abc123", 60)
        assert page.page
        centres = [(shape.x, shape.y) for shape in page.shapes]
        for x, y in centres:
            for line in page.page:
                first, *_, last = [*glyphs(line), glyphs(line)[-1]]
                assert not (first.x <= x <= last.x and abs(y - first.y) < first.height / 2)


def test_a_font_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="comic"):
        load_font("comic", 20)

"""Deletion on models that look at a known patch, and scores of maps against known boxes."""

import pytest
import torch

from openclip_linattn.analysis.box_scores import box_scores
from openclip_linattn.analysis.controls import control_maps
from openclip_linattn.analysis.deletion import (
    area_over,
    check_choice,
    deletion_curve,
    deletion_ranks,
    enlarge,
    filling,
)
from openclip_linattn.errors import UserError

SIZE = (8, 8)


def draw():
    return torch.Generator().manual_seed(0)


def grid_map(row: int, column: int) -> torch.Tensor:
    """A map on a 4 x 4 grid with its largest value there, falling with the distance."""
    y, x = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    return -((y - row) ** 2 + (x - column) ** 2 + 0.01 * y + 0.001 * x).unsqueeze(0)


def patch_probability(row: int, column: int):
    """A model that sees one patch of 2 x 2 pixels: its mean value."""
    return lambda images: images[:, 0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].mean((-2, -1))


def test_patches_are_deleted_whole_and_in_the_order_of_the_map():
    ranks = deletion_ranks(grid_map(1, 2), SIZE, "patch", draw())
    assert ranks.shape == (1, 8, 8)
    assert (ranks[0, 2:4, 4:6] == 0).all()
    blocks = ranks.view(4, 2, 4, 2)
    assert (blocks == blocks[:, :1, :, :1]).all()
    assert sorted(blocks[:, 0, :, 0].flatten().tolist()) == list(range(16))


def test_pixels_are_deleted_one_by_one_along_the_enlarged_map():
    maps = grid_map(1, 2)
    ranks = deletion_ranks(maps, SIZE, "pixel", draw())
    assert sorted(ranks.flatten().tolist()) == list(range(64))
    values = enlarge(maps, SIZE).flatten()[ranks.flatten().argsort()]
    assert (values[:-1] >= values[1:]).all()


def test_equal_values_are_deleted_in_an_order_that_is_drawn():
    draws = draw()
    first, second = (deletion_ranks(torch.ones(1, 4, 4), SIZE, "patch", draws) for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first[0, ::2, ::2].flatten(), torch.arange(16))
    assert torch.equal(first, deletion_ranks(torch.ones(1, 4, 4), SIZE, "patch", draw()))


def test_the_curve_falls_when_the_patch_that_is_looked_at_goes():
    images, fill = torch.ones(2, 3, *SIZE), torch.zeros(2, 3, *SIZE)
    maps = torch.cat([grid_map(1, 2), grid_map(3, 0)])
    ranks = deletion_ranks(maps, SIZE, "patch", draw())
    curves = deletion_curve(patch_probability(1, 2), images, ranks, fill, steps=16)
    assert curves.shape == (2, 17)
    assert curves[0].tolist() == [1] + [0] * 16
    last = deletion_curve(patch_probability(1, 2), images, ranks.amax() - ranks, fill, steps=16)
    assert last[0].tolist() == [1] * 16 + [0]
    fallen = int((curves[1] > 0).sum())
    assert 1 < fallen < 17, "a map of another patch deletes this one later"


def test_steps_that_do_not_divide_the_patches_delete_all_in_the_end():
    images = torch.ones(1, 3, *SIZE)
    ranks = deletion_ranks(grid_map(0, 0), SIZE, "patch", draw())
    curves = deletion_curve(lambda x: x.mean((1, 2, 3)), images, ranks, torch.zeros_like(images), steps=3)
    assert curves[0].tolist() == pytest.approx([1, 11 / 16, 5 / 16, 0])


@pytest.mark.parametrize(("aggregation", "expected"), [("ratio", 0.5), ("drop", 0.4), ("plain", 0.6)])
def test_areas_over_a_straight_line(aggregation, expected):
    curves = torch.linspace(0.8, 0, 11).unsqueeze(0)
    assert float(area_over(curves, aggregation)) == pytest.approx(expected)


def test_fillings_are_the_mean_of_training_that_of_the_image_or_a_blur():
    images = torch.zeros(1, 3, *SIZE)
    images[:, :, :4] = 1
    assert not filling(images, "mean", 2).any()
    assert (filling(images, "image", 2) == 0.5).all()
    blurred = filling(images, "blur", 2)
    assert blurred.shape == images.shape
    down = blurred[0, 0, :, 3]
    assert (down[:-1] > down[1:]).all()
    assert 0.5 < float(down[3]) < 0.7


def test_a_choice_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(UserError, match=r"--unit is 'token'; it can be patch, pixel"):
        check_choice("--unit", "token", ("patch", "pixel"))


def test_controls_know_nothing_of_the_image():
    like = torch.zeros(2, 3, 5)
    centre = control_maps("centre", like, draw())
    assert centre.shape == like.shape
    assert centre[0].argmax() == 7, "the middle of 3 x 5"
    assert torch.equal(centre, centre.flip(1))
    assert torch.equal(centre, centre.flip(2))
    random = control_maps("random", like, draw())
    assert random.unique().numel() == random.numel()


def test_a_map_of_the_box_scores_one_and_its_opposite_nothing():
    inside = torch.zeros(3, 8, 8, dtype=torch.bool)
    inside[:, 2:4, 4:6] = True
    exact = torch.zeros(4, 4)
    exact[1, 2] = 1
    flat = torch.ones(4, 4)
    scores = box_scores(torch.stack([exact, -exact, flat]), inside)
    assert scores[0] == (pytest.approx(1), pytest.approx(1))
    assert scores[1][0] == pytest.approx(0)
    assert scores[2] == (pytest.approx(0.5), pytest.approx(4 / 64))

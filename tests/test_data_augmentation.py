"""Every random change against a second implementation: Python loops, Pillow, or the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from lazy import lazily
from opteq.data import Augmentation, Batches, Split
from opteq.data.augmentation.geometry import crop_and_flip, mix, soft_labels
from opteq.data.augmentation.options import OPERATIONS

color = lazily("opteq.data.augmentation.color")  # loads kornia

RANDOM = np.random.default_rng(2)
UNIT = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255,) * 3}  # a batch is then its bytes, as floats


def make_images(count: int, channels: int = 3, height: int = 9, width: int = 7) -> Tensor:
    return torch.from_numpy(RANDOM.integers(0, 256, size=(count, channels, height, width), dtype=np.uint8))


# ---- crop and flip


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    padding=st.integers(0, 6),
    fill=st.sampled_from(["constant", "reflect"]),
    channels=st.integers(1, 4),
    data=st.data(),
)
def test_crop_and_flip_against_a_loop_over_samples(padding: int, fill: Any, channels: int, data: st.DataObject) -> None:
    images = make_images(6, channels)
    rows = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    place = st.tuples(st.integers(0, 2 * padding), st.integers(0, 2 * padding), st.integers(0, 1))
    move = [data.draw(place) for _ in rows]
    result = crop_and_flip(images, torch.tensor(rows), torch.tensor(move), padding, fill == "reflect")
    assert result.dtype == torch.uint8
    for made, row, (top, left, mirrored) in zip(result, rows, move, strict=True):
        padded = np.pad(images[row].numpy(), ((0, 0), (padding, padding), (padding, padding)), mode=fill)
        expected = padded[:, top : top + 9, left : left + 7]
        assert np.array_equal(made.numpy(), expected[:, :, ::-1] if mirrored else expected)


def test_without_rows_the_whole_tensor_is_taken() -> None:
    images, move = make_images(5), torch.tensor([[1, 2, 0], [0, 0, 1], [4, 4, 1], [2, 2, 0], [3, 0, 0]])
    assert torch.equal(
        crop_and_flip(images, None, move, 2, False), crop_and_flip(images, torch.arange(5), move, 2, False)
    )


def test_every_crop_comes_equally_often_and_half_are_mirrored() -> None:
    draws = Augmentation(crop_padding=1, flip=True).draw(np.random.default_rng(0), 18_000, 8, 8)
    counts = np.bincount(draws["move"] @ np.array([6, 2, 1]), minlength=18)
    assert len(counts) == 18
    # Each of 3 x 3 x 2 cases 1000 times on average, standard deviation 31.
    assert (abs(counts - 1000) < 5 * 31).all()


def test_batches_crop_with_what_was_drawn() -> None:
    """An image of distinct pixels tells how it was moved, and each sample is moved by itself."""
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8)
    split = Split(image.repeat(64, 1, 1, 1), torch.zeros(64, dtype=torch.int64))
    options = Augmentation(crop_padding=2, flip=True)
    seen = next(Batches(split, (0.0,), (1 / 255,), 64, augmentation=options).epoch(0))[0].round().to(torch.uint8)
    padded = np.pad(image[0, 0].numpy(), 2)
    possible = {
        bytes(np.ascontiguousarray(cut[:, ::step])): (top, left, step)
        for top in range(5)
        for left in range(5)
        for cut in [padded[top : top + 8, left : left + 8]]
        for step in (1, -1)
    }
    found = {possible[bytes(image.numpy())] for image in seen}
    assert len(found) > 30
    assert {step for _, _, step in found} == {1, -1}


# ---- erasing


def test_erased_boxes() -> None:
    split = Split(torch.full((4000, 1, 20, 24), 255, dtype=torch.uint8), torch.zeros(4000, dtype=torch.int64))
    images, _ = next(Batches(split, (0.5,), (0.5,), 4000, augmentation=Augmentation(erase=0.3)).epoch(0))
    gone = images[:, 0] == 0
    assert torch.equal(images[:, 0][~gone], torch.ones_like(images[:, 0][~gone]))
    touched = gone.flatten(1).any(1)
    assert float(touched.float().mean()) == pytest.approx(0.3, abs=0.04)
    for box in gone[touched][:200]:
        rows, columns = box.any(1), box.any(0)
        assert torch.equal(box, rows[:, None] & columns)  # a box
        for side in (rows, columns):
            assert int(side.diff().sum()) <= 2  # in one piece
        assert 0.01 < float(box.float().mean()) < 0.37


# ---- mixing


def test_mix_and_soft_labels_against_a_loop() -> None:
    images, partners = torch.rand(3, 2, 4, 5), torch.rand(3, 2, 4, 5)
    boxes, blend = torch.tensor([[0, 0, 0, 0], [1, 3, 2, 5], [0, 4, 0, 5]]), torch.tensor([0.3, 1.0, 1.0])
    mixed = mix(images, partners, boxes, blend)
    assert torch.allclose(mixed[0], 0.3 * images[0] + 0.7 * partners[0])
    expected = images[1].clone()
    expected[:, 1:3, 2:5] = partners[1, :, 1:3, 2:5]
    assert torch.equal(mixed[1], expected)
    assert torch.equal(mixed[2], partners[2])
    soft = soft_labels(torch.tensor([0, 1, 2]), torch.tensor([2, 1, 0]), torch.tensor([0.25, 0.5, 1.0]), 4)
    expected = torch.tensor([[0.25, 0, 0.75, 0], [0, 1, 0, 0], [0, 0, 1, 0]])
    assert torch.allclose(soft, expected)


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_labels_tell_how_much_of_each_image_there_is(options: dict[str, float]) -> None:
    """Each class is one grey value: the mean grey of a mixed image has to be the mean grey of its label."""
    labels = torch.arange(60) % 6
    greys = torch.tensor([0, 51, 102, 153, 204, 255])
    images = greys[labels].to(torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, 12, 12)
    source = Batches(Split(images, labels), **UNIT, batch_size=60, augmentation=Augmentation(**options), num_classes=7)
    mixed, soft = next(source.epoch(0))
    assert soft.shape == (60, 7)
    assert soft.dtype == torch.float32
    assert torch.allclose(soft.sum(1), torch.ones(60))
    assert torch.allclose(mixed.mean((1, 2, 3)), soft[:, :6] @ greys.float(), atol=1e-2)
    pasted = torch.tensor([len(image.unique()) > 1 for image in mixed[:, 0].round()])
    blended = (mixed - greys.view(-1, 1, 1, 1, 1)).abs().amin(0).amax((1, 2, 3)) > 0.5
    assert bool(pasted.any()) == ("cutmix" in options)
    assert bool(blended.any()) == ("mixup" in options)


def test_the_number_of_classes_is_taken_from_the_labels() -> None:
    split = Split(make_images(8), torch.arange(8) % 5)
    source = Batches(split, **UNIT, batch_size=8, augmentation=Augmentation(mixup=1.0))
    assert next(source.epoch(0))[1].shape == (8, 5)


# ---- RandAugment and jitter


def by_pillow(name: str, image: Image.Image, amount: float, strength: float) -> Image.Image:
    """One operation by Pillow; ``amount`` has the sign, ``strength`` has not."""
    width, height = image.size
    affine = {
        "shear_x": (1, 0.3 * amount, -0.3 * amount * (height - 1) / 2, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * amount, 1, -0.3 * amount * (width - 1) / 2),
        "translate_x": (1, 0, 150 / 331 * amount * width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, 150 / 331 * amount * height),
    }
    if name == "identity":
        return image
    if name in affine:
        return image.transform(image.size, Image.Transform.AFFINE, affine[name], Image.Resampling.BILINEAR)
    if name == "rotate":
        return image.rotate(30 * amount, Image.Resampling.BILINEAR)
    if name in ("brightness", "color", "contrast", "sharpness"):
        kind = getattr(ImageEnhance, name.capitalize())
        return kind(image).enhance(1 + 0.9 * amount)
    if name == "posterize":
        return ImageOps.posterize(image, round(8 - 4 * strength))
    if name == "solarize":
        return ImageOps.solarize(image, 256 * (1 - strength))
    return getattr(ImageOps, name)(image)


def photo(height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Smooth colours, so that interpolating a fraction of a pixel off is a small difference, and one sharp dot."""
    down, across = np.mgrid[0:height, 0:width]
    waves = [np.sin(down / 7 + phase) + np.cos(across / (5 + phase)) for phase in (0.0, 1.0, 2.0)]
    image = np.stack([20 + 52 * (wave + 2) for wave in waves], axis=-1).astype(np.uint8)
    image[height // 2, width // 2] = 60
    return image


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_against_pillow(name: str, sign: int) -> None:
    array = photo(24, 32)
    strength = 0.4
    image = torch.from_numpy(array).permute(2, 0, 1)[None].float() / 255
    made = color.randaugment(image, np.array([[OPERATIONS.index(name)]]), np.array([[sign]]), strength)
    expected = np.asarray(by_pillow(name, Image.fromarray(array), sign * strength, strength)).astype(float)
    difference = np.abs(made[0].permute(1, 2, 0).numpy() * 255 - expected)
    if name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate"):
        # At the border one of the two blends with black and the other does not.
        assert np.quantile(difference, 0.85) < 3
    else:
        assert difference.max() < 2.1
    if name != "identity":
        assert np.abs(expected - array).max() > 2.5  # the operation does something


def test_each_image_gets_its_own_operations_in_order() -> None:
    images = torch.rand(40, 3, 10, 10)
    operations = RANDOM.integers(0, len(OPERATIONS), size=(40, 3))
    signs = 2 * RANDOM.integers(0, 2, size=(40, 3)) - 1
    together = color.randaugment(images, operations, signs, 0.5)
    for row in range(40):
        alone = images[row : row + 1]
        for turn in range(3):
            alone = color.randaugment(
                alone, operations[row : row + 1, turn : turn + 1], signs[row : row + 1, turn : turn + 1], 0.5
            )
        assert torch.allclose(together[row], alone[0], atol=1e-5)


def test_operations_and_signs_come_equally_often() -> None:
    draws = Augmentation(randaugment=2).draw(np.random.default_rng(0), 14_000, 8, 8)
    assert draws["operation"].shape == (14_000, 2)
    assert (abs(np.bincount(draws["operation"].reshape(-1)) - 2000) < 5 * 45).all()
    assert abs(draws["sign"].mean()) < 0.03


def test_jitter_against_pillow() -> None:
    array = photo(16, 16)
    split = Split(torch.from_numpy(array).permute(2, 0, 1)[None].repeat(8, 1, 1, 1), torch.arange(8))
    options = Augmentation(color_jitter=0.4)
    source = Batches(split, **UNIT, batch_size=8, augmentation=options)
    factors = options.draw(source._random(1, 0, 0), 8, 16, 16)["jitter"]
    assert ((factors >= 0.6) & (factors <= 1.4)).all()
    images, _ = next(source.epoch(0))
    for made, (brightness, contrast, saturation) in zip(images, factors.tolist(), strict=True):
        image = ImageEnhance.Brightness(Image.fromarray(array)).enhance(brightness)
        image = ImageEnhance.Contrast(image).enhance(contrast)
        expected = np.asarray(ImageEnhance.Color(image).enhance(saturation)).astype(float)
        assert np.abs(made.permute(1, 2, 0).numpy() - expected).max() < 4


@pytest.mark.parametrize("options", [{"randaugment": 14}, {"color_jitter": 0.5}])
def test_grey_images_can_be_recoloured(options: dict[str, Any]) -> None:
    split = Split(make_images(30, channels=1), torch.arange(30))
    images, _ = next(Batches(split, (0.0,), (1.0,), 30, augmentation=Augmentation(**options)).epoch(0))
    assert images.shape == (30, 1, 9, 7)
    assert bool(((images >= 0) & (images <= 1 + 1e-6)).all())


def test_the_global_generator_is_neither_used_nor_changed() -> None:
    options = Augmentation(crop_padding=2, flip=True, randaugment=2, color_jitter=0.4, erase=0.5, mixup=0.4, cutmix=1.0)
    source = Batches(Split(make_images(8), torch.arange(8)), **UNIT, batch_size=8, augmentation=options)
    torch.manual_seed(0)
    first, _ = next(source.epoch(0))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    np.random.seed(5)
    second, _ = next(source.epoch(0))
    assert torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


# ---- options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"crop_padding": -1}, ValueError, "crop_padding should be at least 0; got -1"),
        ({"crop_padding": 1.5}, TypeError, "crop_padding should be a whole number; got 1.5"),
        ({"crop_fill": "wrap"}, ValueError, "unknown .*crop_fill 'wrap'. Known: reflect, zero"),
        ({"flip": 1}, TypeError, "flip should be True or False; got 1"),
        ({"randaugment": True}, TypeError, "randaugment should be a whole number"),
        ({"randaugment_magnitude": 31}, ValueError, r"randaugment_magnitude should be in \[0, 30\]; got 31"),
        ({"randaugment_magnitude": 0}, ValueError, "randaugment_magnitude should be a positive finite number; got 0"),
        ({"color_jitter": 1.5}, ValueError, r"color_jitter should be in \[0, 1\]; got 1.5"),
        ({"erase": "often"}, TypeError, "erase should be a number; got 'often'"),
        ({"mixup": -0.1}, ValueError, "mixup should be at least 0 and finite; got -0.1"),
        ({"cutmix": float("inf")}, ValueError, "cutmix should be at least 0 and finite; got inf"),
        ({"crop_pading": 4}, TypeError, "no option 'crop_pading'; did you mean 'crop_padding'"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Augmentation(**options)


def test_it_is_a_frozen_dataclass() -> None:
    assert replace(Augmentation(flip=True), erase=0.5) == Augmentation(flip=True, erase=0.5)
    with pytest.raises(AttributeError):
        Augmentation().flip = True  # type: ignore[misc]

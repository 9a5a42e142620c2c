"""Batches: the same ones for any number of processes, from any point of an epoch on, from the host or the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opteq.data import Augmentation, Batches, Split
from opteq.data import prefetch as prefetch_module

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
ALL = Augmentation(
    crop_padding=2, flip=True, randaugment=2, color_jitter=0.4, erase=0.5, mixup=0.4, cutmix=1.0, crop_fill="reflect"
)
EXACT = Augmentation(crop_padding=2, flip=True, erase=0.5, mixup=0.4, cutmix=1.0)


def split(samples: int, channels: int = 3, height: int = 6, width: int = 5) -> Split:
    """Images whose pixels are all over the range, and labels that tell which sample it is."""
    generator = torch.Generator().manual_seed(samples)
    images = torch.randint(0, 256, (samples, channels, height, width), generator=generator, dtype=torch.uint8)
    return Split(images, torch.arange(samples))


def batches(samples: int, batch_size: int, **options: Any) -> Batches:
    return Batches(split(samples), MEAN, STD, batch_size, **options)


def test_plain_batches_are_the_normalised_images_in_order() -> None:
    data = split(10)
    seen = list(Batches(data, MEAN, STD, 4).epoch(0))
    assert [len(labels) for _, labels in seen] == [4, 4, 2]
    images, labels = (torch.cat(part) for part in zip(*seen, strict=True))
    assert labels.dtype == torch.int64
    assert labels.tolist() == list(range(10))
    mean, std = (torch.tensor(value, dtype=torch.float64).view(3, 1, 1) for value in (MEAN, STD))
    assert images.dtype == torch.float32
    assert torch.allclose(images.double(), (data.images.double() / 255 - mean) / std, atol=1e-5)
    assert data.images.dtype == torch.uint8  # the split is left alone
    assert torch.equal(data.images, split(10).images)


def test_drop_last_and_sizes() -> None:
    assert len(batches(10, 4)) == 3
    dropped = batches(10, 4, drop_last=True)
    assert len(dropped) == 2 == len(list(dropped.epoch(0)))
    whole = batches(10, 4)
    assert [whole.global_size(index) for index in range(3)] == [4, 4, 2]
    for index in (-1, 3):
        with pytest.raises(IndexError, match="there are batches 0 to 2"):
            whole.global_size(index)


def test_channels_last() -> None:
    for augmentation in (None, ALL):
        plain, last = (
            next(batches(8, 8, augmentation=augmentation, channels_last=flag).epoch(0))[0] for flag in (False, True)
        )
        assert last.is_contiguous(memory_format=torch.channels_last)
        assert plain.is_contiguous()
        assert torch.allclose(plain, last, atol=1e-5)


def order(source: Batches, number: int) -> list[int]:
    return [int(label) for _, labels in source.epoch(number) for label in labels]


def test_order_depends_on_seed_and_epoch() -> None:
    one = batches(50, 8, shuffle=True)
    assert sorted(order(one, 0)) == list(range(50))
    assert order(one, 0) == order(batches(50, 8, shuffle=True), 0)
    assert order(one, 0) != order(one, 1)
    assert order(one, 0) != order(batches(50, 8, shuffle=True, seed=1), 0)
    assert order(one, 0) == order(batches(50, 10, shuffle=True), 0)  # the batch size does not change it


def test_order_is_fixed_for_good() -> None:
    """Numbers that a resumed run relies on; another generator would change them."""
    assert order(batches(8, 8, shuffle=True, seed=3), 2) == [6, 1, 4, 5, 2, 0, 3, 7]


def test_changes_depend_on_seed_epoch_and_batch() -> None:
    data = Split(split(1).images.expand(12, -1, -1, -1), torch.zeros(12, dtype=torch.int64))
    augmentation = Augmentation(crop_padding=3)

    def seen(seed: int, number: int, index: int) -> Tensor:
        source = Batches(data, MEAN, STD, 6, augmentation=augmentation, seed=seed)
        return list(source.epoch(number))[index][0]

    first = seen(0, 0, 0)
    assert torch.equal(first, seen(0, 0, 0))
    for other in (seen(1, 0, 0), seen(0, 1, 0), seen(0, 0, 1)):
        assert not torch.equal(first, other)


# ---- several processes, and the middle of an epoch


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    samples=st.integers(4, 30),
    batch_size=st.integers(4, 12),
    world=st.integers(1, 4),
    number=st.integers(0, 3),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    augmentation=st.sampled_from([None, EXACT, Augmentation(crop_padding=1, crop_fill="reflect")]),
)
def test_processes_together_see_what_one_sees(
    samples: int,
    batch_size: int,
    world: int,
    number: int,
    drop_last: bool,
    shuffle: bool,
    augmentation: Augmentation | None,
) -> None:
    options: dict[str, Any] = {"drop_last": drop_last, "shuffle": shuffle, "augmentation": augmentation}
    if samples < batch_size and drop_last:
        return
    alone = batches(samples, batch_size, **options)
    if alone.global_size(len(alone) - 1) < world:
        with pytest.raises(ValueError, match="too few for"):
            batches(samples, batch_size, **options, world=world)
        return
    parts = [batches(samples, batch_size, **options, rank=rank, world=world) for rank in range(world)]
    assert {len(part) for part in parts} == {len(alone)}
    shares = zip(*(part.epoch(number) for part in parts), strict=True)
    for index, ((images, labels), pieces) in enumerate(zip(alone.epoch(number), shares, strict=True)):
        assert torch.equal(torch.cat([piece[0] for piece in pieces]), images)
        assert torch.equal(torch.cat([piece[1] for piece in pieces]), labels)
        sizes = [len(piece[0]) for piece in pieces]
        assert max(sizes) - min(sizes) <= 1
        assert [len(part.share(index)) for part in parts] == sizes
        # A mean over processes of weighted means is the mean over the batch.
        means = [float(images.double().mean()) for images, _ in pieces]
        mean = sum(part.weight(index) * value for part, value in zip(parts, means, strict=True)) / world
        assert mean == pytest.approx(float(images.double().mean()), abs=1e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_see_the_same_colours(world: int) -> None:
    alone = list(batches(14, 7, augmentation=ALL, shuffle=True).epoch(1))
    parts = [
        list(batches(14, 7, augmentation=ALL, shuffle=True, rank=rank, world=world).epoch(1)) for rank in range(world)
    ]
    for index, (images, labels) in enumerate(alone):
        together = torch.cat([part[index][0] for part in parts])
        assert torch.allclose(together, images, atol=1e-5)
        assert torch.equal(torch.cat([part[index][1] for part in parts]), labels)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    samples=st.integers(1, 30),
    batch_size=st.integers(1, 12),
    skip=st.integers(0, 30),
    keep=st.sampled_from(["device", "host"]),
    augmentation=st.sampled_from([None, EXACT, ALL]),
)
def test_an_epoch_entered_in_the_middle(
    samples: int, batch_size: int, skip: int, keep: Any, augmentation: Augmentation | None
) -> None:
    source = batches(samples, batch_size, shuffle=True, augmentation=augmentation, keep=keep)
    if skip > len(source):
        with pytest.raises(ValueError, match=f"skip should be at most {len(source)}"):
            source.epoch(2, skip=skip)
        return
    whole = list(source.epoch(2))[skip:]
    rest = list(source.epoch(2, skip=skip))
    assert len(whole) == len(rest)
    for (images, labels), (others, their_labels) in zip(whole, rest, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, their_labels)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("augmentation", [None, EXACT, ALL], ids=["none", "exact", "all"])
def test_host_and_device_give_the_same(augmentation: Augmentation | None, world: int) -> None:
    device, host = (
        batches(23, 5, shuffle=True, augmentation=augmentation, keep=keep, world=world, rank=world - 1)
        for keep in ("device", "host")
    )
    assert device.kept_on_device
    assert not host.kept_on_device
    for (images, labels), (others, their_labels) in zip(device.epoch(1), host.epoch(1), strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, their_labels)


def test_an_abandoned_epoch_ends_its_thread() -> None:
    import threading

    before = threading.active_count()
    epoch = batches(23, 5, keep="host").epoch(0)
    next(epoch)
    assert threading.active_count() > before
    epoch.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_auto_asks_for_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    images, cuda = torch.zeros(10, 1, 10, 10, dtype=torch.uint8), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2500, 10_000))
    assert prefetch_module.fits_on_device(images, cuda, "auto")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2499, 10_000))
    assert not prefetch_module.fits_on_device(images, cuda, "auto")
    assert prefetch_module.fits_on_device(images, cuda, "device")
    assert prefetch_module.fits_on_device(images, torch.device("cpu"), "auto")
    assert not prefetch_module.fits_on_device(images, torch.device("mps"), "auto")


# ---- what is refused


def test_a_share_may_be_empty_where_nobody_waits() -> None:
    parts = [batches(7, 3, rank=rank, world=2, empty_shares=True) for rank in range(2)]
    assert [[len(images) for images, _ in part.epoch(0)] for part in parts] == [[1, 1, 0], [2, 2, 1]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size should be at least 1; got 0"),
        ({"batch_size": 2.5}, TypeError, "batch_size should be an integer; got 2.5"),
        ({"seed": -1}, ValueError, "seed should be at least 0; got -1"),
        ({"world": 0}, ValueError, "world should be at least 1"),
        ({"rank": 2, "world": 2}, ValueError, "rank should be below world = 2; got 2"),
        ({"keep": "gpu"}, ValueError, "keep should be 'auto', 'device' or 'host'; got 'gpu'"),
        ({"mean": (0.5,)}, ValueError, "one value for each of 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, ValueError, "std above 0"),
        ({"batch_size": 11, "drop_last": True}, ValueError, "take a batch_size of at most 10"),
        ({"batch_size": 3, "world": 2}, ValueError, r"has 1 samples, too few for 2 .*take batch_size 2 or drop_last"),
        ({"batch_size": 2, "world": 3}, ValueError, "too few for 3 processes .*take batch_size 5$"),
        ({"batch_size": 20, "world": 11}, ValueError, "use at most 10 processes"),
        ({"num_classes": 9}, ValueError, "num_classes should be at least 10, the largest label plus one; got 9"),
        ({"shufle": True}, TypeError, "no option 'shufle'; did you mean 'shuffle'"),
        (
            {"augmentation": Augmentation(crop_padding=5)},
            ValueError,
            "crop_padding should be less than the 5 pixels of an image; got 5",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"mean": MEAN, "std": STD, "batch_size": 4} | options
    with pytest.raises(error, match=message):
        Batches(split(10), **given)


def test_an_empty_split() -> None:
    with pytest.raises(ValueError, match="the split has no images"):
        Batches(Split(torch.zeros(0, 3, 4, 4, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)), MEAN, STD, 4)


@pytest.mark.parametrize(("number", "skip"), [(-1, 0), (0, -1)])
def test_wrong_epochs(number: int, skip: int) -> None:
    with pytest.raises(ValueError, match="should be at least 0; got -1"):
        batches(4, 2).epoch(number, skip)
    with pytest.raises(TypeError, match="should be an integer"):
        batches(4, 2).epoch(0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), "images should be uint8"),
        (torch.zeros(2, 3, 4, dtype=torch.uint8), torch.zeros(2).long(), "images should be uint8 of shape"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2), "labels should be int64"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3).long(), "2 images and 3 labels"),
    ],
)
def test_wrong_splits(images: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Split(images, labels)


# ---- on a GPU


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("augmentation", [None, EXACT, ALL], ids=["none", "exact", "all"])
@pytest.mark.parametrize("keep", ["device", "host"])
@pytest.mark.parametrize("world", [1, 2])
def test_on_a_gpu_nothing_waits_and_all_is_as_on_the_cpu(
    augmentation: Augmentation | None, keep: Any, world: int
) -> None:
    if augmentation is ALL:
        pytest.importorskip("kornia")
    options: dict[str, Any] = {"augmentation": augmentation, "shuffle": True, "world": world}
    source = batches(23, 8, device="cuda", keep=keep, **options)
    list(source.epoch(0))  # the first time, libraries are loaded
    with no_waiting():
        seen = list(source.epoch(1))
    for (images, labels), (others, their_labels) in zip(seen, batches(23, 8, **options).epoch(1), strict=True):
        assert images.is_cuda
        assert labels.is_cuda
        apart = (images.cpu() - others).abs()
        # Equalize jumps by a level where rounding differs, and mixing spreads that over the images of a batch.
        assert apart.max() < (0.02 if augmentation is ALL else 1e-4)
        assert torch.allclose(labels.cpu(), their_labels)

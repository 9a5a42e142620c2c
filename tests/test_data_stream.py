"""Images decoded on the way: the same pixels and the same order as from the cache, after a kill as well."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from opteq import data
from opteq.common.errors import UserError
from opteq.data import streaming
from opteq.data.readers.decode import Decoder
from opteq.data.readers.files import Names
from opteq.training import load_recipe, train
from training_cases import in_process, read_stream, start

SIDE, TRAIN, TEST = 8, 7, 2
CLASSES = ("ant", "bee", "cow")


def picture(number: int) -> bytes:
    """A PNG whose first pixel is its number."""
    pixels = np.random.default_rng(number).integers(0, 256, size=(SIDE, SIDE, 3), dtype=np.uint8)
    pixels[0, 0, 0] = number
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def content() -> dict[str, bytes]:
    """The path of every image, and its bytes."""
    numbers = iter(range(256))
    return {
        f"{split}/{name}/{place}.png": picture(next(numbers))
        for split, count in (("train", TRAIN), ("val", TEST))
        for name in CLASSES
        for place in range(count)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, image in content().items():
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(image)
    return tmp_path / "images"


def shards(place: Path, layout: str) -> Path:
    """The same images in tar archives: class folders inside, names in .cls files, or an archive per class."""
    for number, (path, image) in enumerate(content().items()):
        split, name, file = path.split("/")
        members = {"folders": {f"./{name}/{file}": image}, "names": {file: image}}
        members["cls"] = {f"{number:04}.png": image, f"{number:04}.cls": name.encode(), f"{number:04}.json": b"{}"}
        archive = place / split / (f"{name}.tar" if layout == "names" else f"{number % 2}.tar")
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "a") as tar:
            for member, inside in members[layout].items():
                entry = tarfile.TarInfo(member)
                entry.size = len(inside)
                tar.addfile(entry, io.BytesIO(inside))
    return place


def epoch(dataset: data.Dataset, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    skip = options.pop("skip", 0)
    batches = data.Batches(dataset.train, dataset.mean, dataset.std, 4, shuffle=True, seed=3, **options)
    return list(batches.epoch(1, skip=skip))


def same(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True)
    )


# ---- what comes out


@pytest.mark.parametrize("layout", ["files", "folders", "cls", "names"])
def test_streams_and_caches_of_files_and_archives_give_the_same_batches(
    folder: Path, tmp_path: Path, layout: str
) -> None:
    cached = data.load("folder", folder, cache=tmp_path / "cache")
    augmentation = data.Augmentation(crop_padding=1, flip=True)
    expected = epoch(cached, augmentation=augmentation)
    root = folder if layout == "files" else shards(tmp_path / layout, layout)
    found = [data.load("folder", root, stream=True, workers=2 if layout == "files" else 0)]
    if layout != "files":
        found.append(data.load("folder", root, cache=tmp_path / "cache"))
    for dataset in found:
        assert dataset.classes == cached.classes
        assert (dataset.mean, dataset.std) == (cached.mean, cached.std)
        assert torch.equal(dataset.train.labels, cached.train.labels)
        assert same(epoch(dataset, augmentation=augmentation), expected)
        assert torch.equal(dataset.test.images[torch.arange(len(dataset.test))], cached.test.images)


def test_streamed_images_are_no_pixels(folder: Path) -> None:
    images = data.load("folder", folder, stream=True, image_size=6, workers=0).train.images
    assert isinstance(images, data.StreamedImages)
    assert (images.shape, len(images)) == ((21, 3, 6, 6), 21)
    assert images[torch.tensor([[1, 2]])].shape == (1, 2, 3, 6, 6)


def test_numbers_as_classes_are_ordered_as_numbers(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        with tarfile.open(tmp_path / split / "a.tar", "w") as tar:
            for number in (10, 9, 2):
                for name, inside in ((f"{number}.png", picture(number)), (f"{number}.cls", str(number).encode())):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(inside)
                    tar.addfile(entry, io.BytesIO(inside))
    dataset = data.load("folder", tmp_path, stream=True, workers=0)
    assert dataset.classes == ("2", "9", "10")
    assert [int(dataset.train.images[torch.tensor(row)][0, 0, 0]) for row in range(3)] == [2, 9, 10]


def test_unseen_classes_stream_as_well(folder: Path, tmp_path: Path) -> None:
    (folder / "superclasses.csv").write_text("class,superclass\nant,x\nbee,x\ncow,y\n")
    with pytest.raises(UserError, match="the super-class 'y' has the class 'cow' alone"):
        data.load("folder-superclasses", folder, stream=True)
    (folder / "superclasses.csv").write_text("class,superclass\nant,x\nbee,x\ncow,x\n")
    found = data.load("folder-superclasses", folder, stream=True, workers=0)
    cached = data.load("folder-superclasses", folder, cache=tmp_path / "cache")
    assert found.unseen is not None
    assert cached.unseen is not None
    assert torch.equal(found.unseen.images[torch.arange(TEST)], cached.unseen.images)
    assert same(epoch(found), epoch(cached))


def test_many_names_take_few_bytes() -> None:
    names = [f"train/n{number:08}/käse_{number}.jpg" for number in range(1000)]
    packed = Names(names)
    assert [packed[row] for row in range(len(packed))] == names
    assert packed.letters.nbytes + packed.ends.nbytes < 50 * len(names)


# ---- parts of it


@pytest.mark.parametrize("workers", [0, 2])
def test_processes_read_disjoint_parts_and_an_epoch_continues_in_the_middle(folder: Path, workers: int) -> None:
    dataset = data.load("folder", folder, stream=True, workers=workers)
    whole = epoch(dataset)
    assert same(epoch(dataset, skip=3), whole[3:])
    parts = [epoch(dataset, rank=rank, world=3, empty_shares=True) for rank in range(3)]
    joined = [tuple(torch.cat(pieces) for pieces in zip(*batch, strict=True)) for batch in zip(*parts, strict=True)]
    assert same(joined, whole)


def test_a_killed_process_continues_with_the_samples_that_it_would_have_seen(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples"
    out.touch()

    dataset = data.load("folder", folder, stream=True, workers=0)
    batches = data.Batches(dataset.train, (0,) * 3, (1,) * 3, 2, shuffle=True, seed=5).epoch(4)
    expected = [images[:, 0, 0, 0].mul(255).round().int().tolist() for images, _ in batches]
    assert sorted(number for batch in expected for number in batch) == list(range(3 * TRAIN))
    reader = start(read_stream, str(folder), 0, str(out), 4)
    until = time.monotonic() + 120
    while time.monotonic() < until and out.read_text().count("\n") < 4:
        time.sleep(0.05)
    reader.kill()
    reader.join()
    assert len(out.read_text().splitlines()) == 4
    assert in_process(read_stream, str(folder), 4, str(out), timeout=120) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == expected


def test_training_from_a_stream_is_training_from_the_cache(folder: Path, tmp_path: Path) -> None:
    small = ["train.epochs=1", "train.batch_size=7", "data.name=folder", f"data.root={folder}", "train.device=cpu"]
    small += ["model.options.hidden=[4]", "model.options.channels=4", "train.threads=1"]
    streaming = load_recipe("digits", [*small, "data.stream=true", "data.workers=1"])
    runs = {
        "cached": load_recipe("digits", [*small, f"data.cache={tmp_path / 'cache'}"]),
        "streamed": streaming,
    }
    weights = [(train(recipe, tmp_path / name) / "model.safetensors").read_bytes() for name, recipe in runs.items()]
    assert weights[0] == weights[1]


# ---- what can be wrong


def test_a_broken_image_is_named_by_its_path(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "bee" / "3.png").write_bytes(b"no image")
    dataset_files = folder / "train" / "bee" / "3.png"
    with pytest.raises(UserError, match=r"train/bee/3\.png: cannot read this image"):
        data.load("folder", folder, stream=True)
    dataset_files.write_bytes(picture(0))
    dataset = data.load("folder", folder, stream=True, workers=1)
    dataset_files.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"^[^\n]*train/bee/3\.png: cannot read this image [^\n]*$"):
        epoch(dataset)
    place = shards(tmp_path / "shards", "folders")
    dataset = data.load("folder", place, stream=True, workers=0)
    os.truncate(place / "train" / "0.tar", 600)
    with pytest.raises(UserError, match=r"train/0\.tar, \./\w+/\d\.png: the archive ends before it does"):
        epoch(dataset)
    (place / "train" / "0.tar").unlink()
    with pytest.raises(UserError, match=r"train/0\.tar, .*: cannot be read \(No such file"):
        epoch(dataset)


def negative_size(archive: bytes, header: int) -> bytes:
    """The member at byte ``header`` with a size of -1024, and a checksum that is right."""
    changed = bytearray(archive)
    changed[header + 124 : header + 136] = (-1024).to_bytes(12, "big", signed=True)
    changed[header + 148 : header + 156] = b" " * 8
    changed[header + 148 : header + 156] = b"%06o\0 " % sum(changed[header : header + 512])
    return bytes(changed)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tar, header: tar[:header] + b"!" + tar[header + 1 :], r"a damaged member, at byte \d+\)"),
        (lambda tar, header: tar[:header], r"its end is missing"),
        (lambda tar, header: tar + tar, r"there is more after its end"),
        (negative_size, r"(has -1024 bytes|a damaged member, at byte \d+\))"),  # newer tarfiles read no such header
    ],
    ids=["header", "cut", "joined", "size"],
)
def test_a_shard_that_would_lose_images_is_refused(
    damage: Callable[[bytes, int], bytes], message: str, tmp_path: Path
) -> None:
    """Python's tarfile ends in silence at each of these; at a negative size it may never end."""
    path = shards(tmp_path / "shards", "folders") / "train" / "0.tar"
    archive = path.read_bytes()
    header = archive.rfind(b"ustar") - 257
    path.write_bytes(damage(archive, header))
    whole = rf"^[^\n]*train/0\.tar: not a whole tar archive [^\n]*{message}[^\n]*fetch it again$"
    with pytest.raises(UserError, match=whole):
        data.load("folder", path.parent.parent, stream=True)


def test_an_image_without_its_class_file_is_named(tmp_path: Path) -> None:
    """Its class would be the name of the archive, beside those that the other files name."""
    place = shards(tmp_path / "shards", "cls")
    with tarfile.open(place / "train" / "1.tar", "a") as tar:
        member = tarfile.TarInfo("9999.png")
        member.size = len(picture(7))
        tar.addfile(member, io.BytesIO(picture(7)))
    message = r"^[^\n]*train/1\.tar, 9999\.png: has no file 9999\.cls beside it that names its class, [^\n]*add it"
    with pytest.raises(UserError, match=message):
        data.load("folder", place, stream=True)


def test_a_class_of_many_digits_is_a_name(tmp_path: Path) -> None:
    """Python reads no number of more than 4300 digits."""
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        with tarfile.open(tmp_path / split / "0.tar", "w") as tar:
            for number, category in enumerate(("9" * 5000, "1")):
                member = tarfile.TarInfo(f"{category}/{number}.png")
                member.size = len(picture(number))
                tar.addfile(member, io.BytesIO(picture(number)))
    assert data.load("folder", tmp_path, stream=True).classes == ("1", "9" * 5000)


def test_a_killed_worker_is_reported_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data.load("folder", folder, stream=True, workers=1)
    here = os.getpid()

    def dies(decoder: Decoder, files: Any, row: int) -> Any:
        assert os.getpid() != here
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Decoder, "__call__", dies)
    with pytest.raises(UserError, match=r"^a process that decodes images was killed, [^\n]*take fewer than 1 [^\n]*$"):
        epoch(dataset)


def test_signals_to_all_processes_leave_workers_to_the_one_that_trains(folder: Path) -> None:
    dataset = data.load("folder", folder, stream=True, workers=1)
    batches = data.Batches(dataset.train, (0,) * 3, (1,) * 3, 2, shuffle=True, seed=5)
    others = multiprocessing.active_children()
    arriving = iter(batches.epoch(4))
    found = [next(arriving)]
    (worker,) = set(multiprocessing.active_children()) - set(others)
    assert worker.pid is not None
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(worker.pid, number)
    found += arriving
    assert same(found, list(batches.epoch(4)))
    assert not worker.is_alive()


def test_a_worker_ends_a_while_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PATIENCE", 0.05)

    def work() -> None:
        streaming._init_worker(0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join(20)
    assert worker.exitcode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"stream": True}, "stream = true is for folders of images; 'digits' is small"),
        ("folder", {"workers": 2}, "workers = 2 has no effect without stream = true"),
        ("folder", {"stream": True, "cache": "x"}, "cache = 'x' has no effect with stream = true"),
        ("folder", {"stream": True, "workers": -1}, "workers should be a number of processes, 0 for none; got -1"),
    ],
)
def test_options_without_effect(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        data.load(name, **options)


def test_archives_that_are_wrong(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "a.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"train/a\.tar: an archive beside class folders; keep either"):
        data.load("folder", folder, stream=True)
    place = tmp_path / "packed"
    for split in ("train", "test"):
        (place / split).mkdir(parents=True)
        with tarfile.open(place / split / "a.tar.gz", "w:gz") as tar:
            tar.addfile(tarfile.TarInfo("cat/1.png"))
    with pytest.raises(UserError, match=r"a\.tar\.gz: not an uncompressed tar archive .*repack it without compression"):
        data.load("folder", place, stream=True)
    for split in ("train", "test"):
        (place / split / "a.tar.gz").unlink()
        with tarfile.open(place / split / "a.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo("notes.txt"))
    with pytest.raises(UserError, match=r"test/a\.tar: no images in it"):
        data.load("folder", place, stream=True)
    with tarfile.open(place / "test" / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("1.png"))
        tar.addfile(tarfile.TarInfo("1.cls"))
    with pytest.raises(UserError, match=r"a\.tar: 1\.cls in it names no class"):
        data.load("folder", place, stream=True)

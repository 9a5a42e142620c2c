"""Folders of images, and the cache: decoded once, shared, whole or not there."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from opteq import data
from opteq.common.errors import UserError
from opteq.data import cache as cache_module
from opteq.data import loading
from opteq.data.paths import cache_folder
from opteq.data.readers import decode
from opteq.data.readers import folder as folder_module
from training_cases import decode_beside_another, start

RANDOM = np.random.default_rng(1)


def image(width: int = 8, height: int = 8) -> Image.Image:
    return Image.fromarray(RANDOM.integers(0, 256, size=(height, width, 3), dtype=np.uint8))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes; 3 and 2 images to train on, 1 each to test, lossless."""
    for split, counts in (("train", (3, 2)), ("test", (1, 1))):
        for name, count in zip(("cat", "dog"), counts, strict=True):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                image().save(folder / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture
def load(root: Path, tmp_path: Path) -> Callable[..., data.Dataset]:
    return lambda **options: data.load("folder", root, cache=tmp_path / "cache", **options)


def read(path: Path) -> torch.Tensor:
    with Image.open(path) as file:
        return torch.tensor(np.asarray(file.convert("RGB"))).permute(2, 0, 1)


def test_a_folder_is_read(root: Path, load: Callable[..., data.Dataset]) -> None:
    (root / "train" / "cat" / ".DS_Store").write_bytes(b"noise")
    (root / "train" / "cat" / "notes.txt").write_text("not an image")
    dataset = load()
    assert dataset.classes == ("cat", "dog")
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert dataset.test.labels.tolist() == [0, 1]
    files = sorted((root / "train").glob("*/*.png"))
    assert torch.equal(dataset.train.images, torch.stack([read(path) for path in files]))
    assert torch.equal(dataset.test.images[1], read(root / "test" / "dog" / "0.png"))
    values = dataset.train.images.double() / 255
    assert dataset.mean == pytest.approx(values.mean((0, 2, 3)).tolist())
    assert dataset.std == pytest.approx(values.std((0, 2, 3), correction=0).tolist())


def test_val_stands_for_test(root: Path, load: Callable[..., data.Dataset]) -> None:
    (root / "test").rename(root / "val")
    assert len(load().test) == 2


@pytest.mark.parametrize("ending", ["jpg", "JPEG", "png", "webp", "bmp", "gif", "tif"])
def test_formats(root: Path, load: Callable[..., data.Dataset], ending: str) -> None:
    path = root / "train" / "cat" / f"0.{ending}"
    path.with_name("0.png").unlink()
    image().save(path)
    assert torch.equal(load().train.images[0], read(path))


def test_grey_palette_and_transparent_images_become_rgb(root: Path, load: Callable[..., data.Dataset]) -> None:
    folder = root / "train" / "cat"
    grey = RANDOM.integers(0, 256, size=(8, 8), dtype=np.uint8)
    Image.fromarray(grey).save(folder / "0.png")
    transparent = np.dstack((np.asarray(image()), grey))
    Image.fromarray(transparent).save(folder / "1.png")
    colours = image()
    colours.quantize(16).save(folder / "2.png", transparency=bytes(range(16)))
    deep = RANDOM.integers(0, 65536, size=(8, 8), dtype=np.uint16)
    Image.fromarray(deep).save(root / "train" / "dog" / "0.png")
    images = load().train.images
    assert torch.equal(images[0], torch.tensor(grey).expand(3, 8, 8))
    over_white = 255 - (255.0 - transparent[..., :3]) * transparent[..., 3:] / 255
    torch.testing.assert_close(images[1].double(), torch.tensor(over_white).permute(2, 0, 1), rtol=0, atol=1)
    indices = np.asarray(colours.quantize(16))[..., None]
    opaque = np.asarray(colours.quantize(16).convert("RGB")).astype(float)
    palette = torch.tensor(255 - (255 - opaque) * indices / 255).permute(2, 0, 1)  # color i has alpha i
    torch.testing.assert_close(images[2].double(), palette, rtol=0, atol=1)
    assert torch.equal(images[3], torch.tensor((deep >> 8).astype(np.uint8)).expand(3, 8, 8))


def test_floating_point_images_are_refused(root: Path, load: Callable[..., data.Dataset]) -> None:
    Image.fromarray(np.ones((8, 8), dtype=np.float32)).save(root / "train" / "cat" / "9.tiff")
    with pytest.raises(UserError, match=r"9\.tiff: cannot read this image .*floating-point"):
        load()


def test_a_camera_that_was_held_sideways(root: Path, load: Callable[..., data.Dataset]) -> None:
    turned = image()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    turned.save(root / "train" / "cat" / "0.png", exif=exif)
    expected = torch.tensor(np.rot90(np.asarray(turned), k=-1).copy()).permute(2, 0, 1)
    assert torch.equal(load().train.images[0], expected)


def test_image_size_resizes_the_shorter_side_and_keeps_the_middle(
    root: Path, load: Callable[..., data.Dataset]
) -> None:
    for number, size in enumerate([(30, 20), (20, 33), (8, 8)]):
        image(*size).save(root / "train" / "cat" / f"{number}.png")
    images = load(image_size=10).train.images
    assert images.shape == (5, 3, 10, 10)
    wide = Image.open(root / "train" / "cat" / "0.png").resize((15, 10), Image.Resampling.BILINEAR)
    assert torch.equal(images[0], torch.tensor(np.asarray(wide)[:, 2:12]).permute(2, 0, 1))
    tall = Image.open(root / "train" / "cat" / "1.png").resize((10, 16), Image.Resampling.BILINEAR)
    assert torch.equal(images[1], torch.tensor(np.asarray(tall)[3:13]).permute(2, 0, 1))


def test_sizes_are_cached_apart(load: Callable[..., data.Dataset]) -> None:
    assert load(image_size=4).train.images.shape[-1] == 4
    assert load().train.images.shape[-1] == 8
    assert load(image_size=4).train.images.shape[-1] == 4


def test_pieces_come_in_order(root: Path, load: Callable[..., data.Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    together = load().train.images.clone()
    monkeypatch.setattr(decode, "PIECE", 1)
    monkeypatch.setattr(decode, "SMALL", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    os.utime(root / "train" / "cat" / "0.png", ns=(1, 1))
    assert torch.equal(load().train.images, together)


# ---- what can be wrong


def test_different_sizes_name_both_files(root: Path, load: Callable[..., data.Dataset]) -> None:
    image(9, 8).save(root / "test" / "dog" / "0.png")
    first = root / "train" / "cat" / "0.png"
    with pytest.raises(UserError, match=rf"test/dog/0\.png is 9x8 pixels but {first} is 8x8; give image_size"):
        load()


def test_corrupt_and_truncated_images(root: Path, load: Callable[..., data.Dataset]) -> None:
    path = root / "train" / "dog" / "1.png"
    good = path.read_bytes()
    memory = io.BytesIO()
    image(40, 40).resize((8, 8)).save(memory, "JPEG")
    photo = memory.getvalue()
    for content in (b"", b"<html>", good[: len(good) // 2], photo[:-40], photo[:30]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path}: cannot read this image .*; replace or delete it"):
            load()
    path.write_bytes(good)
    assert len(load().train) == 5  # a failure leaves nothing behind that is in the way


def test_a_failure_leaves_no_entry(root: Path, load: Callable[..., data.Dataset], tmp_path: Path) -> None:
    (root / "test" / "dog" / "0.png").write_bytes(b"")
    with pytest.raises(UserError):
        load()
    assert [path.suffix for path in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


def test_what_a_folder_lacks(root: Path, load: Callable[..., data.Dataset], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs root"):
        data.load("folder")
    with pytest.raises(UserError, match="nowhere: no such folder; expected train/<class>/<image>"):
        data.load("folder", tmp_path / "nowhere")
    with pytest.raises(UserError, match="train: has no folder train; expected"):
        data.load("folder", root / "train")
    (root / "test").rename(root / "held-out")
    with pytest.raises(UserError, match="has neither a folder test nor val"):
        load()
    (root / "test").mkdir()
    with pytest.raises(UserError, match="test: has no class folders"):
        load()


def test_empty_and_unequal_classes(root: Path, load: Callable[..., data.Dataset]) -> None:
    (root / "train" / "eel").mkdir()
    with pytest.raises(UserError, match=r"train/eel: no images in it \(jpg, .*fill or remove"):
        load()
    image().save(root / "train" / "eel" / "0.png")
    with pytest.raises(UserError, match="train/eel: test has no class 'eel'; both need the same"):
        load()
    (root / "train" / "eel").rename(root / "test" / "eel")
    with pytest.raises(UserError, match="test/eel: train has no class 'eel'"):
        load()


# ---- the cache


def test_the_second_time_nothing_is_decoded(load: Callable[..., data.Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    first = load()
    monkeypatch.setattr(cache_module, "write_entry", lambda *_: pytest.fail("decoded again"))
    second = load()
    assert torch.equal(first.train.images, second.train.images)
    assert (first.classes, first.mean, first.std) == (second.classes, second.mean, second.std)


def test_a_changed_folder_is_decoded_anew(root: Path, load: Callable[..., data.Dataset]) -> None:
    load()
    image().save(root / "test" / "cat" / "0.png")
    os.utime(root / "test" / "cat" / "0.png", ns=(5, 5))
    assert torch.equal(load().test.images[0], read(root / "test" / "cat" / "0.png"))
    image().save(root / "test" / "cat" / "1.png")
    assert len(load().test) == 3


def test_writing_to_the_images_changes_no_file(load: Callable[..., data.Dataset]) -> None:
    mine = load().train.images
    before = mine.clone()
    mine.zero_()
    assert torch.equal(load().train.images, before)


def entry(tmp_path: Path) -> Path:
    return next(path for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir())


@pytest.mark.parametrize("victim", ["train-images.npy", "test-labels.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "a pickle"])
def test_a_damaged_entry_is_made_again(
    load: Callable[..., data.Dataset], tmp_path: Path, victim: str, damage: str
) -> None:
    good = load().train.images.clone()
    path = entry(tmp_path) / victim
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-3])
    elif damage == "a pickle":
        with path.open("wb") as file:
            np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    assert torch.equal(load().train.images, good)
    assert path.read_bytes() == content


def test_leftovers_of_a_killed_process_are_cleared(load: Callable[..., data.Dataset], tmp_path: Path) -> None:
    load()
    whole = entry(tmp_path)
    whole.rename(whole.with_name(f"{whole.name}.unfinished"))
    (whole.with_name(f"{whole.name}.unfinished") / "meta.json").unlink()
    assert len(load().train) == 5
    assert [path for path in whole.parent.iterdir() if path.is_dir()] == [whole]


def test_two_processes_at_once_decode_once(root: Path, tmp_path: Path) -> None:
    """Both have looked into the empty cache before either takes the lock."""
    (tmp_path / "cache").mkdir()
    processes = [start(decode_beside_another, str(root), str(tmp_path / "cache")) for _ in range(2)]
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0]
    results = [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("result-*")]
    assert sorted(count for count, _ in results) == [0, 1]
    assert results[0][1] == results[1][1] > 0


def test_a_file_larger_than_memory_is_mapped_read_only(
    load: Callable[..., data.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load().train.images.clone()
    plain = np.load

    def stingy(path: Path, mmap_mode: Any = None, allow_pickle: bool = True) -> Any:
        if mmap_mode == "c":
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return plain(path, mmap_mode=mmap_mode, allow_pickle=allow_pickle)

    monkeypatch.setattr(np, "load", stingy)
    monkeypatch.setattr(cache_module, "write_entry", lambda *_: pytest.fail("decoded again"))
    assert torch.equal(load().train.images, before)


def test_a_file_that_goes_away(load: Callable[..., data.Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    listed = folder_module.find_folder

    def lists_what_goes_away(root: Path, *rest: Any) -> Any:
        found = listed(root, *rest)
        (root / "train" / "cat" / "0.png").unlink()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(loading, "find_folder", lists_what_goes_away)
        with pytest.raises(UserError, match=r"train/cat/0\.png: cannot be read \(No such file"):
            load()


def test_a_cache_that_cannot_be_written(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UserError, match=r"writing the cache .* in .*file/data failed: Not a directory.*cache=.*OPTEQ_CACHE"
    ):
        data.load("folder", root, cache=tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache(root: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(UserError, match=r"writing the cache .*Permission denied.*mend its permissions"):
        data.load("folder", root, cache=tmp_path / "cache")


def test_a_full_disk(load: Callable[..., data.Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"writing the cache .*No space left on device; make room"):
            load()
    assert not [path for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir()]
    assert len(load().train) == 5


def test_a_really_full_device(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux has a device that is always full: what is written through it is refused by the kernel itself."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        cache_module._write_array(Path("/dev/full"), (1, 3, 100, 100), iter([np.zeros((1, 3, 100, 100), np.uint8)]))


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("OPTEQ_CACHE", "/y")
    assert cache_folder() == Path("/y")
    monkeypatch.delenv("OPTEQ_CACHE")
    assert cache_folder() == Path("/x/opteq")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == Path("/home/somebody/.cache/opteq")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path("/home/somebody/Library/Caches/opteq")


def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from opteq.data.progress import progress

    with progress("decoding images", 10_000) as advance:
        advance(10_000)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("decoding images", 10_000) as advance:
        advance(10_000)
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "decoding images" in seen.err


# ---- super-classes


def kinds(tmp_path: Path, table: str) -> Path:
    for split, count in (("train", 3), ("test", 2)):
        for name in ("bee", "ant", "oak", "fir", "elm"):
            (tmp_path / "kinds" / split / name).mkdir(parents=True)
            for number in range(count):
                image(4, 4).save(tmp_path / "kinds" / split / name / f"{number}.png")
    (tmp_path / "kinds" / "superclasses.csv").write_text(table, encoding="utf-8-sig")
    return tmp_path / "kinds"


TABLE = "class,superclass,note\noak,tree,\nant,insect,small\nfir,tree\nbee, insect\nelm,tree\n"


def test_the_last_class_of_every_super_class_is_unseen(tmp_path: Path) -> None:
    place = kinds(tmp_path, TABLE)

    def load() -> data.Dataset:
        return data.load("folder-superclasses", place, cache=tmp_path / "cache")

    dataset = load()
    assert dataset.classes == ("insect", "tree")
    unseen = dataset.unseen
    assert unseen is not None
    for split, folder, held_in, each in (
        (dataset.train, "train", ("ant", "elm", "fir"), 3),
        (dataset.test, "test", ("ant", "elm", "fir"), 2),
        (unseen, "test", ("bee", "oak"), 2),
    ):
        files = [place / folder / name / f"{number}.png" for name in held_in for number in range(each)]
        assert torch.equal(split.images, torch.stack([read(path) for path in files]))
        expected = [0 if name in ("ant", "bee") else 1 for name in held_in for _ in range(each)]
        assert split.labels.tolist() == expected
    # Another table is another data set, although the images are the same.
    (place / "superclasses.csv").write_text(TABLE.replace("elm,tree", "elm,insect"))
    again = load()
    assert again.unseen is not None
    assert again.unseen.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(again.unseen.images[0], read(place / "test" / "elm" / "0.png"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", r"its first line is empty; expected a first line class,superclass"),
        ("name,kind\nant,insect\n", r"its first line is name,kind; expected"),
        (TABLE.replace("elm,tree\n", ""), r"has no line for the class 'elm'; add one"),
        (TABLE + "cow,mammal\n", r"there are no images of the class 'cow'; add them or remove its line"),
        (TABLE + "ant,tree\n", r"line 7 names the class 'ant' again; give it one line"),
        (TABLE.replace("fir,tree", "fir,"), r"line 4 has no class or no super-class"),
        (TABLE.replace("bee, insect", "bee,flower"), r"the super-class 'flower' has the class 'bee' alone"),
    ],
)
def test_tables_that_are_wrong(tmp_path: Path, table: str, message: str) -> None:
    place = kinds(tmp_path, table)
    with pytest.raises(UserError, match=rf"superclasses\.csv: {message}") as caught:
        data.load("folder-superclasses", place, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_tables_that_cannot_be_read(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"superclasses\.csv: no such file, the table of super-classes; expected"):
        data.load("folder-superclasses", root, cache=tmp_path / "cache")
    (root / "superclasses.csv").write_bytes(b"class,superclass\n\xff\xfe,x\n")
    with pytest.raises(UserError, match=r"superclasses\.csv: cannot be read as a table .*utf-8"):
        data.load("folder-superclasses", root, cache=tmp_path / "cache")
    with pytest.raises(UserError, match=r"data set 'folder-superclasses' needs root"):
        data.load("folder-superclasses")

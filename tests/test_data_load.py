"""Digits, Fashion-MNIST and CIFAR: what is read, what is refused, and that nothing in a pickle runs."""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opteq import data
from opteq.common.errors import UserError
from opteq.data.readers.cifar import VERSIONS
from opteq.data.readers.idx import CLASSES, STEMS
from opteq.data.readers.safe_pickle import pixels, read_pickle

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's cache nor the user's data are touched."""
    monkeypatch.setenv("OPTEQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OPTEQ_DATA", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def make_images(*shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return RANDOM.integers(0, 256, size=shape, dtype=np.uint8)


# ---- digits


def test_digits_are_split_by_class_and_always_the_same() -> None:
    digits = data.load("digits")
    assert digits.classes == tuple("0123456789")
    assert len(digits.train) + len(digits.test) == 1797
    assert abs(len(digits.test) - 1797 / 5) < 10
    whole = torch.bincount(torch.cat((digits.train.labels, digits.test.labels)))
    assert ((torch.bincount(digits.test.labels) - whole / 5).abs() < 1).all()
    # The sums of the labels and pixels held out: another split would not have them.
    assert (int(digits.test.labels.sum()), int(digits.test.images.sum())) == (1595, 1771793)


def test_digits_are_those_of_scikit_learn() -> None:
    folder = importlib.util.find_spec("sklearn").submodule_search_locations[0]  # to import it takes a second
    with gzip.open(f"{folder}/datasets/data/digits.csv.gz") as file:
        theirs = np.loadtxt(file, delimiter=",")[:, :-1]
    digits = data.load("digits")
    ours = torch.cat((digits.train.images, digits.test.images)).flatten(1).numpy()
    assert sorted(map(bytes, ours)) == sorted(map(bytes, np.rint(theirs * 255 / 16).astype(np.uint8)))


def test_statistics_are_those_of_the_training_pixels() -> None:
    digits = data.load("digits")
    values = digits.train.images.double() / 255
    assert digits.mean == pytest.approx([float(values.mean())], rel=1e-12)
    assert digits.std == pytest.approx([float(values.std(correction=0))], rel=1e-12)


def test_digits_can_be_larger() -> None:
    digits = data.load("digits", image_size=16)
    assert digits.test.images.shape == (355, 1, 16, 16)
    small = data.load("digits").test.images.float()
    assert torch.allclose(digits.test.images.float().mean((1, 2, 3)), small.mean((1, 2, 3)), atol=6)


def test_names_and_wrong_names() -> None:
    arrays = ["fashion-mnist", "cifar10", "cifar100", "cifar100-superclasses"]
    assert data.names() == ["digits", *arrays, "folder", "folder-superclasses", "cityscapes"]
    with pytest.raises(UserError, match="unknown data set 'cifar-10'; did you mean 'cifar10'"):
        data.load("cifar-10")


def test_digits_take_no_root(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes no root"):
        data.load("digits", root=tmp_path)


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "8"])
def test_image_size_is_a_positive_integer(size: Any) -> None:
    with pytest.raises(UserError, match="image_size should be a positive integer"):
        data.load("digits", image_size=size)


# ---- Fashion-MNIST


def idx(array: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def fashion(folder: Path, packed: bool = True) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [
        make_images(20, 28, 28),
        np.arange(20, dtype=np.uint8) % 10,
        make_images(10, 28, 28),
        np.arange(10, dtype=np.uint8),
    ]
    for stem, array in zip(STEMS, arrays, strict=True):
        if packed:
            (folder / f"{stem}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / stem).write_bytes(idx(array))
    return arrays


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_is_read(tmp_path: Path, packed: bool) -> None:
    arrays = fashion(tmp_path / "f", packed)
    for _ in range(2):  # decoded, then from the cache
        dataset = data.load("fashion-mnist", tmp_path / "f")
        assert dataset.classes == CLASSES
        assert np.array_equal(dataset.train.images[:, 0].numpy(), arrays[0])
        assert np.array_equal(dataset.train.labels.numpy(), arrays[1])
        assert np.array_equal(dataset.test.images[:, 0].numpy(), arrays[2])
        assert np.array_equal(dataset.test.labels.numpy(), arrays[3])
        assert dataset.mean == pytest.approx([arrays[0].mean() / 255])
        assert dataset.std == pytest.approx([arrays[0].std() / 255])


def test_fashion_mnist_is_found_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEQ_DATA", str(tmp_path / "all"))
    fashion(tmp_path / "all" / "fashion-mnist")
    assert len(data.load("fashion-mnist").train) == 20


def test_debians_folder_is_among_the_usual_places() -> None:
    from opteq.data.paths import data_folders

    assert Path("/usr/share/datasets/fashion-mnist") in data_folders("fashion-mnist")


@pytest.mark.skipif(not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="needs dataset-fashion-mnist")
def test_debians_package_is_read() -> None:
    dataset = data.load("fashion-mnist")
    assert (len(dataset.train), len(dataset.test)) == (60000, 10000)
    assert dataset.mean == pytest.approx([0.2860], abs=1e-4)


def test_fashion_mnist_resized(tmp_path: Path) -> None:
    fashion(tmp_path)
    assert data.load("fashion-mnist", tmp_path, image_size=32).train.images.shape == (20, 1, 32, 32)


def test_fashion_mnist_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"{STEMS[0]}: missing.*dataset-fashion-mnist"):
        data.load("fashion-mnist", tmp_path / "none")
    from opteq.data.readers import idx as module

    monkeypatch.setattr(module, "data_folders", lambda name: [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match=r"in none of .*/a, .*/b; install"):
        data.load("fashion-mnist")


def test_fashion_mnist_in_part(tmp_path: Path) -> None:
    fashion(tmp_path)
    (tmp_path / f"{STEMS[3]}.gz").unlink()
    with pytest.raises(UserError, match=f"{STEMS[3]}: missing"):
        data.load("fashion-mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda good: gzip.compress(good)[:-200], "cannot be read"),
        (lambda good: b"<html>not found</html>", "cannot be read"),
        (lambda good: gzip.compress(good[:-5]), "truncated or wrong"),
        (lambda good: gzip.compress(b"PK" + good), "not an idx file"),
        (lambda good: gzip.compress(b""), "not an idx file"),
    ],
    ids=["cut gzip", "a web page", "cut data", "another file", "empty"],
)
def test_fashion_mnist_damaged(tmp_path: Path, content: Any, message: str) -> None:
    arrays = fashion(tmp_path)
    path = tmp_path / f"{STEMS[0]}.gz"
    path.write_bytes(content(idx(arrays[0])))
    with pytest.raises(UserError, match=f"{path}: {message}.*dataset-fashion-mnist"):
        data.load("fashion-mnist", tmp_path)


def test_fashion_mnist_with_other_labels(tmp_path: Path) -> None:
    fashion(tmp_path, packed=False)
    (tmp_path / STEMS[1]).write_bytes(idx(np.full(20, 10, dtype=np.uint8)))
    with pytest.raises(UserError, match="labels go from 10 to 10, but there are 10 classes"):
        data.load("fashion-mnist", tmp_path)
    (tmp_path / STEMS[1]).write_bytes(idx(np.zeros(19, dtype=np.uint8)))
    with pytest.raises(UserError, match="20 images and 19 labels"):
        data.load("fashion-mnist", tmp_path)


# ---- CIFAR


def python2_pickle(rows: np.ndarray[Any, np.dtype[np.uint8]], key: bytes, labels: list[int]) -> bytes:
    """A batch as the official files have it: written by Python 2, protocol 2, opcode by opcode."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    content = rows.tobytes()
    shape = b"M" + struct.pack("<H", rows.shape[0]) + b"M" + struct.pack("<H", rows.shape[1]) + b"\x86"
    kind = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|")
    kind += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
    array += b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<I", len(content)) + content + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(key) + numbers + b"u."


def cifar(name: str, version: int, modern: bool = False) -> tuple[dict[str, bytes], Any, Any]:
    """The files of a small CIFAR in one of the layouts, with its training images and labels."""
    layout = VERSIONS[name][version]
    classes = 10 if name == "cifar10" else 100
    names = [f"class {number}" for number in range(classes)]
    files: dict[str, bytes] = {}
    images, labels = [], []
    for file in (*layout.train, *layout.test):
        rows = make_images(6, 3072)
        numbers = RANDOM.integers(0, classes, size=6)
        if layout.label_bytes:
            coarse = RANDOM.integers(0, 20, size=(6, layout.label_bytes - 1), dtype=np.uint8)
            files[file] = np.concatenate((coarse, numbers[:, None].astype(np.uint8), rows), axis=1).tobytes()
        elif modern:
            files[file] = pickle.dumps({b"data": rows, layout.key + b"s": numbers.tolist()}, protocol=2)
        else:
            files[file] = python2_pickle(rows, layout.key + b"s", numbers.tolist())
        if file in layout.train:
            images.append(rows.reshape(-1, 3, 32, 32))
            labels.append(numbers)
    if layout.label_bytes:
        files[layout.names] = "\n".join([*names, ""]).encode()
    else:
        files[layout.names] = pickle.dumps({layout.key + b"_names": [name.encode() for name in names]}, protocol=2)
    return files, np.concatenate(images), np.concatenate(labels)


def pack(path: Path, folder: str, files: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    path.write_bytes(memory.getvalue())
    return memory.getvalue()


def unpack(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("place", ["archive", "beside the archive", "folder", "above the folder"])
@pytest.mark.parametrize("version", [0, 1], ids=["python", "binary"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read(tmp_path: Path, name: str, version: int, place: str) -> None:
    layout = VERSIONS[name][version]
    files, images, labels = cifar(name, version)
    root = tmp_path / "data"
    if "archive" in place:
        root.mkdir()
        pack(root / layout.archive, layout.folder, files)
        root = root / layout.archive if place == "archive" else root
    else:
        unpack(root / layout.folder, files)
        root = root / layout.folder if place == "folder" else root
    dataset = data.load(name, root)
    assert len(dataset.classes) == (10 if name == "cifar10" else 100)
    assert dataset.classes[3] == "class 3"
    assert np.array_equal(dataset.train.images.numpy(), images)
    assert np.array_equal(dataset.train.labels.numpy(), labels)
    assert len(dataset.test) == 6
    assert dataset.mean == pytest.approx(images.mean((0, 2, 3)) / 255)
    assert dataset.std == pytest.approx(images.std((0, 2, 3)) / 255)


def test_cifar_written_again_by_a_new_python(tmp_path: Path) -> None:
    files, images, _ = cifar("cifar10", 0, modern=True)
    unpack(tmp_path / "cifar-10-batches-py", files)
    assert np.array_equal(data.load("cifar10", tmp_path).train.images.numpy(), images)


def superclasses(version: int, owners: Any = None) -> tuple[dict[str, bytes], dict[str, Any], Any, Any]:
    """A CIFAR-100 of two images a class, with both kinds of labels: files, images by split, coarse, fine labels.

    An image's first byte is its class, so that it can be told where it went.
    """
    layout = VERSIONS["cifar100-superclasses"][version]
    fine = RANDOM.permutation(np.repeat(np.arange(100), 2))
    owners = RANDOM.permutation(np.repeat(np.arange(20), 5)) if owners is None else owners
    coarse = owners[fine]
    names = {b"coarse": [f"super {n}" for n in range(20)], b"fine": [f"class {n}" for n in range(100)]}
    files: dict[str, bytes] = {}
    images = {}
    for file in (*layout.train, *layout.test):
        rows = make_images(200, 3072)
        rows[:, 0] = fine
        images[file.removesuffix(".bin")] = rows.reshape(-1, 3, 32, 32)
        if layout.label_bytes:
            files[file] = np.concatenate((np.stack((coarse, fine), axis=1).astype(np.uint8), rows), axis=1).tobytes()
        else:
            labels = {b"coarse_labels": coarse.tolist(), b"fine_labels": fine.tolist()}
            files[file] = pickle.dumps({b"data": rows, **labels}, protocol=2)
    if layout.label_bytes:
        files |= {f"{kind.decode()}_label_names.txt": "\n".join(words).encode() for kind, words in names.items()}
    else:
        files["meta"] = pickle.dumps({kind + b"_label_names": words for kind, words in names.items()}, protocol=2)
    return files, images, coarse, fine


@pytest.mark.parametrize("place", ["archive", "folder"])
@pytest.mark.parametrize("version", [0, 1], ids=["python", "binary"])
def test_the_last_class_of_every_super_class_is_unseen(tmp_path: Path, version: int, place: str) -> None:
    layout = VERSIONS["cifar100-superclasses"][version]
    files, images, coarse, fine = superclasses(version)
    if place == "archive":
        pack(tmp_path / layout.archive, layout.folder, files)
    else:
        unpack(tmp_path / layout.folder, files)
    dataset = data.load("cifar100-superclasses", tmp_path)
    assert dataset.classes == tuple(f"super {number}" for number in range(20))
    last = [max(fine[coarse == number]) for number in range(20)]
    known = ~np.isin(fine, last)
    assert dataset.unseen is not None
    for split, file, wanted in (
        (dataset.train, "train", known),
        (dataset.test, "test", known),
        (dataset.unseen, "test", ~known),
    ):
        assert np.array_equal(split.images.numpy(), images[file][wanted])
        assert np.array_equal(split.labels.numpy(), coarse[wanted])
    assert (len(dataset.train), len(dataset.unseen)) == (160, 40)
    assert set(dataset.train.images[:, 0, 0, 0].tolist()).isdisjoint(dataset.unseen.images[:, 0, 0, 0].tolist())
    assert dataset.mean == pytest.approx(images["train"][known].mean((0, 2, 3)) / 255)
    again = data.load("cifar100-superclasses", tmp_path, image_size=16)
    assert again.unseen is not None
    assert again.unseen.images.shape == (40, 3, 16, 16)
    assert data.load("cifar100", tmp_path).unseen is None


def test_super_classes_that_are_not_those_of_cifar100(tmp_path: Path) -> None:
    owners = np.repeat(np.arange(20), 5)
    owners[7] = 0
    unpack(tmp_path / "uneven/cifar-100-python", superclasses(0, owners)[0])
    with pytest.raises(UserError, match=r"'super 0' has 6 classes where CIFAR-100 has 5; this is another data set"):
        data.load("cifar100-superclasses", tmp_path / "uneven")
    files, _, coarse, fine = superclasses(1)
    content = bytearray(files["train.bin"])
    content[0] = (coarse[0] + 1) % 20
    unpack(tmp_path / "torn/cifar-100-binary", files | {"train.bin": bytes(content)})
    with pytest.raises(UserError, match=rf"the class {fine[0]} belongs to the super-classes \d+ and \d+; this is"):
        data.load("cifar100-superclasses", tmp_path / "torn")
    with pytest.raises(
        UserError, match=r"no archive and no unpacked folder of cifar100-superclasses there; fetch .*100"
    ):
        data.load("cifar100-superclasses", tmp_path)


class Poison:
    """Creates a file when it is unpickled the ordinary way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("victim", ["data_batch_2", "batches.meta"])
def test_a_poisoned_pickle_runs_nothing(tmp_path: Path, victim: str, packed: bool) -> None:
    files, _, _ = cifar("cifar10", 0)
    trace = tmp_path / "trace"
    files[victim] = pickle.dumps({b"data": Poison(trace), b"labels": [], b"label_names": []}, protocol=2)
    if packed:
        pack(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", files)
    else:
        unpack(tmp_path / "cifar-10-batches-py", files)
    with pytest.raises(UserError, match=rf"{victim}: refused, it would run (posix|nt)\.system"):
        data.load("cifar10", tmp_path)
    assert not trace.exists()
    pickle.loads(files[victim])  # the poison is real
    assert trace.exists()


@pytest.mark.parametrize("name", ["builtins eval", "numpy load", "numpy.core.multiarray scalar", "copyreg __newobj__"])
def test_other_names_are_refused_too(name: str) -> None:
    module, function = name.split()
    with pytest.raises(UserError, match=f"batch: refused, it would run {module}.{function}"):
        read_pickle(f"c{module}\n{function}\n.".encode(), "batch")


@pytest.mark.parametrize(
    "value",
    [np.zeros((2, 3072), np.float32), np.zeros((2, 3072), np.int64), [1, 2], np.array([{}], dtype=object)],
    ids=["floats", "integers", "a list", "objects"],
)
def test_only_arrays_of_bytes_are_made(value: Any) -> None:
    note = read_pickle(pickle.dumps({b"data": value}, protocol=2), "batch")[b"data"]
    with pytest.raises(UserError, match="batch: its images are not an array of bytes"):
        pixels(note, "batch")


def test_bytes_can_only_be_written_in_the_usual_way() -> None:
    strange = b"c_codecs\nencode\n(U\x03abcU\x05rot13tR."
    with pytest.raises(UserError, match="an unusual way to store bytes"):
        read_pickle(strange, "batch")


def test_a_cifar_file_that_is_something_else(tmp_path: Path) -> None:
    for content, message in (
        (b"<html>", "not a CIFAR file, or damaged"),
        (pickle.dumps([1]), "holds a list"),
        (pickle.dumps({b"labels": [1]}), "has no data or no labels"),
        (python2_pickle(make_images(6, 3071), b"labels", [0] * 6), "expected \\w+ of 3072 bytes"),
        (python2_pickle(make_images(6, 3072), b"labels", [0] * 5), "expected \\w+ of 3072 bytes"),
        (python2_pickle(make_images(6, 3072), b"labels", [0] * 6)[:-90], "not a CIFAR file, or damaged"),
    ):
        files, _, _ = cifar("cifar10", 0)
        files["data_batch_3"] = content
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "cifar-10-batches-py"
        unpack(folder, files)
        with pytest.raises(UserError, match=f"{folder / 'data_batch_3'}: {message}.*fetch"):
            data.load("cifar10", folder)


def test_cifar_without_class_names(tmp_path: Path) -> None:
    files, _, _ = cifar("cifar10", 0)
    unpack(tmp_path / "cifar-10-batches-py", files | {"batches.meta": pickle.dumps({})})
    with pytest.raises(UserError, match=r"batches.meta: has no list of class names"):
        data.load("cifar10", tmp_path)


def test_cifar_damaged_binary(tmp_path: Path) -> None:
    files, _, _ = cifar("cifar10", 1)
    unpack(tmp_path / "cifar-10-batches-bin", files | {"data_batch_1.bin": files["data_batch_1.bin"][:-1]})
    with pytest.raises(UserError, match=r"data_batch_1.bin: truncated or wrong, .* records of 3073"):
        data.load("cifar10", tmp_path)


def test_cifar_archive_truncated_or_of_something_else(tmp_path: Path) -> None:
    files, _, _ = cifar("cifar10", 0)
    path = tmp_path / "cifar-10-python.tar.gz"
    whole = pack(path, "cifar-10-batches-py", files)
    remedy = "fetch https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    for content in (whole[: len(whole) // 2], whole[:100], b"", b"<html>"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path}: not a whole archive .*{remedy}"):
            data.load("cifar10", tmp_path)
    path.write_bytes(whole)
    with pytest.raises(UserError, match="an archive, but without the files of cifar100"):
        data.load("cifar100", path)
    del files["data_batch_4"]
    pack(path, "cifar-10-batches-py", files)
    with pytest.raises(UserError, match="has no cifar-10-batches-py/data_batch_4"):
        data.load("cifar10", tmp_path)


def test_cifar_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: no archive and no unpacked folder of cifar100 there; fetch"):
        data.load("cifar100", tmp_path)
    with pytest.raises(UserError, match="no archive and no unpacked folder of cifar10 there; fetch"):
        data.load("cifar10")
    files, _, _ = cifar("cifar10", 0)
    del files["test_batch"]
    unpack(tmp_path / "cifar-10-batches-py", files)
    with pytest.raises(UserError, match=r"cifar-10-batches-py/test_batch: missing"):
        data.load("cifar10", tmp_path)

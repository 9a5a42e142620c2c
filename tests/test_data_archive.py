"""Archives of pictures: one flipped bit is noticed, links and bombs are refused, each in one line."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest

from opteq import data
from opteq.common.errors import UserError
from opteq.data.readers import archive, cifar, idx
from test_data_load import cifar as small_cifar
from test_data_load import pack, unpack

FOLDER = "cifar-10-batches-py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEQ_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, bytes]:
    path = tmp_path / "cifar-10-python.tar.gz"
    return path, pack(path, FOLDER, small_cifar("cifar10", 0)[0])


def refused(path: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        cifar._read_archive("cifar10", path)
    assert "\n" not in str(caught.value)


def tarred(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode=mode) as tar:  # type: ignore[call-overload]
        for member, content in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))


def test_one_flipped_bit_is_noticed(packed: tuple[Path, bytes]) -> None:
    path, whole = packed
    before = cifar._read_archive("cifar10", path)
    generator = random.Random(0)
    for _ in range(120):
        spoilt = bytearray(whole)
        spoilt[generator.randrange(10, len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(spoilt)
        try:
            found = cifar._read_archive("cifar10", path)
        except UserError:
            continue
        # Bytes of the end that no format reads may change; pictures may not.
        for old, new in ((before.train, found.train), (before.test, found.test)):
            assert np.array_equal(next(old.pieces()), next(new.pieces()))
            assert np.array_equal(old.labels, new.labels)


def test_a_damaged_file_of_the_published_size_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, images, _ = small_cifar("cifar10", 0)
    content = files["data_batch_2"]
    known = {f"{FOLDER}/data_batch_2": (len(content), hashlib.md5(content).hexdigest())}
    monkeypatch.setattr(cifar, "_PUBLISHED", known)
    unpack(tmp_path / "good" / FOLDER, files)
    assert np.array_equal(data.load("cifar10", tmp_path / "good").train.images.numpy(), images)
    spoilt = content[:900] + bytes([content[900] ^ 4]) + content[901:]
    unpack(tmp_path / "bad" / FOLDER, files | {"data_batch_2": spoilt})
    with pytest.raises(UserError, match=r"data_batch_2: damaged, its bytes are not those that were published"):
        data.load("cifar10", tmp_path / "bad")


def test_the_published_digests_are_whole() -> None:
    names = {f"{v.folder}/{file}" for versions in cifar.VERSIONS.values() for v in versions for file in v.files}
    for name, (size, digest) in cifar._PUBLISHED.items():
        assert name in names
        assert size > 0
        assert len(bytes.fromhex(digest)) == 16


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["symbolic", "hard"])
@pytest.mark.parametrize("target", ["data_batch_1", f"{FOLDER}/data_batch_1", "/etc/passwd", "missing"])
def test_links_are_refused(tmp_path: Path, kind: bytes, target: str) -> None:
    link = tarfile.TarInfo(f"{FOLDER}/data_batch_1")
    link.type, link.linkname = kind, target
    tarred(tmp_path / "a.tar.gz", (link, b""))
    refused(tmp_path / "a.tar.gz", r"data_batch_1 in it is a link; fetch")


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "w"])
def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(archive, "LARGEST", 2**20)
    monkeypatch.setattr(archive, "TOTAL", 2**22)
    path, zeros = tmp_path / "bomb.tar", bytes(2**21)
    tarred(path, (tarfile.TarInfo(f"{FOLDER}/data_batch_1"), zeros), mode=mode)
    refused(path, "data_batch_1 in it has 2097152 bytes, over 1048576; fetch")
    many = [(tarfile.TarInfo(f"{number}"), bytes(2**20)) for number in range(8)]
    tarred(path, *many, mode=mode)
    refused(path, "unpacks to more than 4194304 bytes")
    few = [(tarfile.TarInfo(f"{number}"), b"") for number in range(archive.MEMBERS + 1)]
    tarred(path, *few, mode=mode)
    refused(path, "has more than 1000 members")


def test_a_head_that_asks_for_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of its own block may be as long as it says: tar reads it before anything can be checked."""
    monkeypatch.setattr(archive, "LARGEST", 2**16)
    tarred(tmp_path / "a.tar.gz", (tarfile.TarInfo("x" * 2**17), b""))
    refused(tmp_path / "a.tar.gz", "not a whole archive .* at once, over 65536")


def test_a_gzipped_idx_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "LARGEST", 2**16)
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(bytes(2**17)))
    with pytest.raises(UserError, match="unpacks to more than 65536 bytes"):
        idx.read_idx(path, 3)

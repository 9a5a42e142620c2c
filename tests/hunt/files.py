"""Damaged files that are used, and errors that are no clear line."""

from __future__ import annotations

import functools
import io
import json
import tarfile
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import opteq.models
from hunt.damage import damaged, mutated, refused_in_a_line
from hunt.drawing import Draw, require
from hunt.exports import exported
from opteq.models.classifier import Classifier
from opteq.models.denoiser import Denoiser, DenoiserConfig

_MODELS = {
    "opteq-digits": {"channels": 3, "hidden": [4]},
    "opteq-162k": {"channels": 3, "hidden": [4, 2], "injected": [1]},
    "mopteq-193k": {"channels": 4, "hidden": [3, 2, 2]},
    "geq-5m": {"channels": 8, "hidden": [8, 8], "scales": [1, 2], "projection": 4},
    "resnet18-cifar": {"width": 2, "blocks": [1, 1]},
}


def hunt(draw: Draw) -> str:
    """One damaged file, and what becomes of it."""
    kind = draw.one_of(
        [hunt_weights, hunt_weights, hunt_config, hunt_checkpoint, hunt_archive, hunt_denoiser, hunt_image]
    )
    if draw.chance(0.01):  # one takes some ten seconds
        kind = hunt_export
    with tempfile.TemporaryDirectory() as folder:
        kind(draw, Path(folder))
    return kind.__name__.removeprefix("hunt_")


def hunt_weights(draw: Draw, folder: Path) -> None:
    """A model's weights: refused, or the same model."""
    name = draw.one_of(list(_MODELS))
    config, weights, x, expected = _saved(name)
    changed, what = _with_another_header(draw, weights) if draw.chance(0.3) else damaged(draw, weights)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(changed)
    with refused_in_a_line(f"{name}, weights with {what}"):
        found = opteq.models.from_pretrained(folder)
        with torch.no_grad():
            require(torch.equal(found(x), expected), f"{name} loaded with other outputs: {what}")


def hunt_config(draw: Draw, folder: Path) -> None:
    """A model's configuration: refused, or a model of that configuration; no error but a line, and no hang."""
    name = draw.one_of(list(_MODELS))
    config, weights, _, _ = _saved(name)
    if draw.chance(0.3):
        changed, what = damaged(draw, config)
    else:
        value = mutated(draw, json.loads(config))
        changed = json.dumps(value, default=str).encode()  # as Python writes it: with its NaN, numbers of any length
        what = f"config {str(value)[:500]}" if len(changed) < 4000 else "a long config"
    (folder / "config.json").write_bytes(changed)
    (folder / "model.safetensors").write_bytes(weights)
    with refused_in_a_line(f"{name}, {what}"):
        found = opteq.models.from_pretrained(folder)
        if isinstance(found, Classifier):  # its preprocessing is in the configuration, too
            confidence = found.predict(np.zeros((8, 8, 3), dtype=np.uint8)).confidence
            require(0 <= confidence <= 1, f"a confidence of {confidence}: {name}, {what}")


def hunt_checkpoint(draw: Draw, folder: Path) -> None:
    """The newest of two checkpoints: passed over for the one before it, or read as it was written."""
    import opteq.training  # noqa: F401  # says in one line what is missing
    from opteq.training.run.checkpoints import Checkpoint, Checkpoints

    def drawn(step: int) -> Checkpoint:
        tensors = {"model.weight": draw.normal(3, 4).float(), "optimizer.count": torch.tensor(step)}
        return Checkpoint(step, tensors, {"epoch": step, "best": draw.number(0, 1), "history": [1.0, 0.5]})

    store = Checkpoints(folder)
    older, newer = drawn(1), drawn(2)
    store.save(older)
    path = store.save(newer)
    changed, what = damaged(draw, path.read_bytes())
    path.write_bytes(changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = store.latest()
    require(found is not None and found.step in (1, 2), f"no checkpoint was found: {what}")
    assert found is not None
    wanted = newer if found.step == 2 else older
    require(found.values == wanted.values, f"a checkpoint with other values was used: {what}")
    same = found.tensors.keys() == wanted.tensors.keys() and all(
        torch.equal(found.tensors[name], tensor) for name, tensor in wanted.tensors.items()
    )
    require(same, f"a checkpoint with other tensors was used: {what}")


def hunt_archive(draw: Draw, folder: Path) -> None:
    """A CIFAR archive: refused, or the same images."""
    from opteq.data.readers import cifar

    whole, images, labels = _archive()
    changed, what = damaged(draw, whole)
    path = folder / "cifar-10-binary.tar.gz"
    path.write_bytes(changed)
    with refused_in_a_line(f"archive with {what}"):
        source = cifar.find_cifar("cifar10", path).read()
        found = next(source.train.pieces())
        same = np.array_equal(found, images) and np.array_equal(source.train.labels, labels)
        require(same, f"other images: {what}")


def hunt_denoiser(draw: Draw, folder: Path) -> None:
    """A denoiser's weights or configuration: refused, or the same denoiser where the configuration is the same."""
    config, weights, expected = _saved_denoiser(draw.one_of([0, 3]))
    changed, what = config, ""
    if draw.chance(0.5):
        if draw.chance(0.3):
            changed, what = damaged(draw, config)
        else:
            value = mutated(draw, json.loads(config))
            changed, what = json.dumps(value, default=str).encode(), f"config {str(value)[:500]}"
    else:
        weights, what = _with_another_header(draw, weights) if draw.chance(0.3) else damaged(draw, weights)
    (folder / "config.json").write_bytes(changed)
    (folder / "model.safetensors").write_bytes(weights)
    with refused_in_a_line(f"a denoiser, {what}"):
        found = Denoiser.load(folder)
        if changed is config:
            require(torch.equal(_denoised(found), expected), f"a denoiser loaded with other outputs: {what}")


def hunt_image(draw: Draw, folder: Path) -> None:
    """A damaged image: predictions and restorations are refused in a line, or made of what it still holds."""
    from opteq.inference.predict import find_images, predict_files
    from opteq.inference.restore import read_image

    name = draw.one_of(["opteq-digits", "mopteq-193k"])
    config, weights, _, _ = _saved(name)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)
    model = opteq.models.from_pretrained(folder)
    kind = draw.one_of(["png", "jpg", "bmp", "webp", "gif", "tiff"])
    changed, what = damaged(draw, _image(kind))
    path = folder / f"image.{kind}"
    path.write_bytes(changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own
        with refused_in_a_line(f"a {kind} image with {what}, to be classified"):
            for _, prediction in predict_files(model, find_images([path])):
                require(0 <= prediction.confidence <= 1, f"a confidence of {prediction.confidence}: {what}")
        with refused_in_a_line(f"a {kind} image with {what}, to be restored"):
            require(bool(read_image(path).isfinite().all()), f"pixels that are not finite: {what}")


def hunt_export(draw: Draw, folder: Path) -> None:
    """An exported model."""
    from opteq.inference.export import ENDINGS

    name = draw.one_of(list(_MODELS))
    for file, content in zip(("config.json", "model.safetensors"), _saved(name), strict=False):
        (folder / file).write_bytes(content)
    exported(draw, opteq.models.from_pretrained(folder), folder, draw.one_of(list(ENDINGS)))


@functools.cache
def _saved_denoiser(guide: int) -> tuple[bytes, bytes, Tensor]:
    """A denoiser on disk, and its answer."""
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder, opteq.engine.off():
        torch.manual_seed(0)
        model = Denoiser(DenoiserConfig((1, 2, 3), 3, knots=4, guide=guide, **({"depth": 1} if guide else {})))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        model.save(folder)
        config, weights = ((Path(folder) / file).read_bytes() for file in ("config.json", "model.safetensors"))
        return config, weights, _denoised(model)


def _denoised(model: Denoiser) -> Tensor:
    ramp = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)
    with torch.no_grad():
        answer: Tensor = model(torch.sin(9 * ramp), torch.tensor([0.1]))
    return answer


@functools.cache
def _image(kind: str) -> bytes:
    from PIL import Image

    memory = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(memory, {"jpg": "JPEG"}.get(kind, kind.upper()))
    return memory.getvalue()


@functools.cache
def _saved(name: str) -> tuple[bytes, bytes, Tensor, Tensor]:
    """A model on disk, with an input and its outputs."""
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder, opteq.engine.off():
        torch.manual_seed(0)
        model = opteq.models.create(name, num_classes=3, **_MODELS[name]).eval()
        x = torch.randn(2, 3, 8, 8)
        model.config["extra"] = {
            "image_shape": [3, 8, 8], "mean": [0.5] * 3, "std": [0.2, 0.3, 0.4], "classes": ["a", "b", "c"]
        }  # fmt: skip
        model.save_pretrained(folder)
        config, weights = ((Path(folder) / file).read_bytes() for file in ("config.json", "model.safetensors"))
        with torch.no_grad():
            return config, weights, x, model(x)


def _with_another_header(draw: Draw, weights: bytes) -> tuple[bytes, str]:
    """The header of a safetensors file with one thing changed: a dtype, a shape, an offset, a name."""
    size = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + size])
    name = draw.one_of([key for key in header if key != "__metadata__"])
    what = draw.one_of(["dtype", "shape", "data_offsets", "name", "metadata"])
    if what == "dtype":
        header[name]["dtype"] = draw.one_of(["I32", "F32", "F64", "BF16", "F16", "U8", "BOOL", "F8_E4M3", "x"])
    elif what == "name":
        header[draw.one_of([name + "x", "", "a" * 1000])] = header.pop(name)
    elif what == "metadata":
        header["__metadata__"] = draw.one_of([{}, {"sha256": "0" * 64}, {"sha256": ""}, {"format": "np"}])
    else:
        old = header[name][what]
        header[name][what] = draw.one_of([[], [0], [10**18, 10**18], [-1], [3, 1], [2**63], old[::-1]])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + weights[8 + size :], f"{what} of {name} changed in its header"


@functools.cache
def _archive() -> tuple[bytes, np.ndarray, np.ndarray]:
    """A small CIFAR-10 in its binary form."""
    from opteq.data.readers import cifar

    version = cifar.VERSIONS["cifar10"][1]
    random = np.random.default_rng(0)
    contents: dict[str, bytes] = {version.names: "\n".join(f"class {index}" for index in range(10)).encode()}
    images, labels = [], []
    for file in (*version.train, *version.test):
        pixels = random.integers(0, 255, (2, 3072), dtype=np.uint8)
        numbers = random.integers(0, 10, (2, 1), dtype=np.uint8)
        contents[file] = np.concatenate((numbers, pixels), axis=1).tobytes()
        if file in version.train:
            images.append(pixels.reshape(-1, 3, 32, 32))
            labels.append(numbers[:, 0].astype(np.int64))
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{version.folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return memory.getvalue(), np.concatenate(images), np.concatenate(labels)

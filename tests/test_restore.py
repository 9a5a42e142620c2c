"""``opteq restore``: any size, colour by channel, tiles, and what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from cli_cases import call, refused
from opteq.common.errors import UserError
from opteq.inference.restore import Damage, read_image, restore
from opteq.models.denoiser import Denoiser, DenoiserConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    made = Denoiser(DenoiserConfig(channels=(1, 2, 6), kernel_size=3, rho=0.0, mu=2.0))
    return made.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def photo(tmp_path):
    generator = np.random.default_rng(0)
    smooth = np.kron(generator.integers(60, 200, (6, 5, 3)), np.ones((8, 8, 1)))
    noisy = (smooth + generator.normal(0, 15, smooth.shape)).clip(0, 255)
    Image.fromarray(noisy.astype("uint8")).save(tmp_path / "in.png")
    Image.fromarray(((generator.random(smooth.shape[:2]) > 0.3) * 255).astype("uint8")).save(tmp_path / "mask.png")
    return tmp_path


@pytest.mark.parametrize("options", [(), ("--blur", "1.0"), ("--mask", "MASK"), ("--scale", "2")])
def test_images_are_restored(model, photo, options):
    options = [str(photo / "mask.png") if word == "MASK" else word for word in options]
    out = photo / "out.png"
    for name in ("in.png", "mask.png"):
        with Image.open(photo / name) as whole:
            part = whole.crop((0, 0, 20, 24))
        part.save(photo / name)
    result = call("restore", photo / "in.png", out, "--model", model, "--sigma", "15", "--tol", "1e-4", *options)
    assert result.exit_code == 0, result.output
    assert "the energy was minimised" in " ".join(result.output.split())
    factor = 2 if "--scale" in options else 1
    with Image.open(out) as written:
        assert written.size == (20 * factor, 24 * factor)
        assert written.mode == "RGB"


def test_no_more_than_rounding_allows_is_claimed(model, photo):
    result = call("restore", photo / "in.png", photo / "out.png", "--model", model, "--tol", "1e-12")
    assert "estimate to 1e-12" not in " ".join(result.output.split())
    assert "by this estimate to" in " ".join(result.output.split())


def test_noise_falls_and_tiles_change_little(model, photo):
    trained = Denoiser.load(model)
    image = read_image(photo / "in.png")[:1]
    whole = restore(image, trained, Damage(sigma=15))
    seen = []
    parts = restore(image, trained, Damage(sigma=15), tile=32, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (4, 4)
    assert (whole.image - parts.image).abs().max() < 0.02
    assert whole.image.diff(dim=2).abs().mean() < image.diff(dim=2).abs().mean()


def test_tiles_see_as_far_as_a_guide_does():
    torch.manual_seed(0)
    trained = Denoiser(DenoiserConfig(channels=(1, 2, 4), kernel_size=3, rho=0.0, mu=2.0, guide=3, depth=3, repeats=4))
    guide = trained.prior.guide
    for weight in guide.parameters():
        weight.data = 0.3 * torch.randn(weight.shape)
    image = torch.rand(1, 1, 121, 121, requires_grad=True)
    _, expected = guide(image, torch.tensor([0.1]))
    (slope,) = torch.autograd.grad(expected[..., 60, 60].sum(), image)
    seen = slope[0, 0].nonzero()
    far = int((seen - 60).abs().max())
    assert far <= guide.reach < far + 3
    whole, parts = (restore(image[0].detach(), trained, Damage(sigma=15), tile=tile) for tile in (512, 64))
    assert (whole.image - parts.image).abs().max() < 2e-3
    with pytest.raises(UserError, match="need a prior that is the same everywhere, such as denoiser-convex"):
        restore(image[0].detach(), trained, Damage(sigma=15, blur=1.0))


def test_refusals_name_what_is_wrong(model, photo):
    refused(call("restore", photo / "none.png", "x.png", "--model", model), "no image")
    refused(call("restore", photo / "in.png", "x.png", "--model", photo), "no denoiser")
    refused(call("restore", photo / "in.png", "x.png", "--model", model, "--scale", "3"), "--scale")
    refused(call("restore", photo / "in.png", "x.png", "--model", model, "--blur", "1", "--scale", "2"), "at a time")
    refused(call("restore", photo / "in.png", "x.png", "--model", model, "--strength", "0"), "--strength")
    refused(
        call("restore", photo / "in.png", "x.png", "--model", model, "--tol", "0"), "--tol should lie between 0 and"
    )
    refused(
        call("restore", photo / "in.png", "x.png", "--model", model, "--blur", "1e9"), "--blur should lie in [0, 20]"
    )
    refused(call("restore", photo / "in.png", "x.xyz", "--model", model), "the ending should be", "got '.xyz'")
    refused(call("restore", photo / "in.png", photo / "no" / "x.png", "--model", model), "there is no folder")
    refused(call("restore", photo / "in.png", photo, "--model", model), "is a folder")
    with pytest.raises(UserError, match="mask"):
        restore(torch.zeros(1, 8, 8), Denoiser.load(model), Damage(10, mask=torch.ones(4, 4)))


def test_pixels_that_are_not_finite_are_no_image():
    model = Denoiser(DenoiserConfig((1, 2, 3), 3, knots=4))
    for weight in model.parameters():
        weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="pixels that are not finite"):
        restore(torch.rand(1, 16, 16), model, Damage(25))


def test_noise_outside_of_what_was_trained_for_is_said(photo, model):
    found = call("restore", photo / "in.png", photo / "faint.png", "--model", model, "--sigma", "1", "--tol", "1e-3")
    assert "and 1 is outside; 5 is used" in found.output
    assert (
        "is outside" not in call("restore", photo / "in.png", photo / "o.png", "--model", model, "--tol", "1e-3").output
    )


def test_the_usual_noise_is_what_the_model_was_trained_for(photo):
    torch.manual_seed(0)
    faint = Denoiser(DenoiserConfig((1, 2, 3), 3, knots=4, most=20 / 255)).save(photo / "faint")
    for name, options in (("a.png", ()), ("b.png", ("--sigma", "20")), ("c.png", ("--sigma", "10"))):
        result = call("restore", photo / "in.png", photo / name, "--model", faint, *options)
        assert result.exit_code == 0, result.output
        assert "outside" not in result.output
    a, b, c = ((photo / name).read_bytes() for name in ("a.png", "b.png", "c.png"))
    assert a == b != c


@pytest.mark.parametrize("damage", ["noise", "blur", "mask", "scale"])
def test_borders_are_not_darkened(damage: str) -> None:
    """A prior that met zeros beyond the image made its border up to 40 % darker."""
    model = Denoiser.load("denoiser-convex").eval()
    seen = (torch.rand(20, 24, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    given = {"noise": {}, "blur": {"blur": 1.0}, "mask": {"mask": seen}, "scale": {"scale": 2}}[damage]
    answer = restore(torch.full((1, 20, 24), 0.5), model, Damage(15.0, **given), tol=1e-3).image
    assert answer.shape == (1, *((40, 48) if damage == "scale" else (20, 24)))
    torch.testing.assert_close(answer, torch.full_like(answer, 0.5), rtol=0, atol=0.01)


@pytest.mark.parametrize("size", [(1, 1), (1, 12), (3, 2)])
def test_tiny_images_are_not_darkened(size: tuple[int, int]) -> None:
    model = Denoiser.load("denoiser-convex").eval()
    answer = restore(torch.full((1, *size), 0.5), model, Damage(25.0), tol=1e-3).image
    torch.testing.assert_close(answer, torch.full_like(answer, 0.5), rtol=0, atol=0.01)


def test_a_mask_that_hides_everything_is_refused() -> None:
    model = Denoiser.load("denoiser-convex").eval()
    with pytest.raises(UserError, match="black everywhere"):
        restore(torch.full((1, 8, 8), 0.5), model, Damage(25.0, mask=torch.zeros(8, 8)))

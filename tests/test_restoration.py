"""Restoration: closed forms against autograd, certificates against dense Hessians, data and models of denoising."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import opteq
from opteq import operators as op
from opteq import potentials
from opteq.common.errors import UserError
from opteq.data.grey import Crops, read_grey
from opteq.models.denoiser import Denoiser, DenoiserConfig
from opteq.models.restoration import FilterPrior, Restoration
from opteq.models.restoration.minimise import minimise
from opteq.models.restoration.noise_levels import NoiseLevels
from oracles import assert_slopes

ROOT = Path(__file__).parent.parent


def prior(kind: str = "spline", margin: float | None = 0.05, seed: int = 0) -> FilterPrior:
    torch.manual_seed(seed)
    filters = op.ConvChain((1, 2, 4), kernel_size=3)
    potential = {
        "spline": lambda: potentials.Spline(4, knots=8, rho=1.0, mu=6.0),
        "convex": lambda: potentials.Spline(4, knots=8, rho=0.0, mu=6.0),
        "student": lambda: potentials.Student(),
        "huber": lambda: potentials.Huber(),
    }[kind]()
    made = FilterPrior(filters, potential, NoiseLevels(4), margin)
    with torch.no_grad():
        made.levels.log_weight.normal_(std=1.0)
        made.levels.log_scale.normal_(std=0.3)
    return made


MEASUREMENTS = {
    "none": lambda: None,
    "blur": lambda: op.Blur(1.0),
    "mask": lambda: op.Mask((torch.rand(8, 6, generator=torch.Generator().manual_seed(0)) > 0.3).float()),
    "half": lambda: op.Downsample(2),
}


def inputs(measurement, count=2):
    torch.manual_seed(1)
    y = torch.rand(count, 1, 8, 6, dtype=torch.float64)
    x = y if measurement is None else measurement(y)
    return y, (x, torch.linspace(0.05, 0.2, count, dtype=torch.float64))


def dense_hessian(hidden, y):
    product = hidden.hessian_at(y)
    basis = torch.eye(y[0].numel(), dtype=y.dtype)
    columns = [product(column.reshape(1, *y.shape[1:]).expand_as(y).contiguous()).flatten(1) for column in basis]
    return torch.stack(columns, dim=2)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_closed_forms_are_those_of_autograd(name):
    measurement = MEASUREMENTS[name]()
    problem = Restoration(prior(), measurement, strength=0.8).double()
    y, x = inputs(problem.measurement)
    hidden = problem(x)
    slope = torch.func.grad(lambda y: hidden.value(y).sum())(y)
    assert torch.allclose(slope, hidden.gradient(y), atol=1e-12)
    v = torch.randn_like(y)
    assert torch.allclose(torch.func.vjp(hidden.gradient, y)[1](v)[0], hidden.hessian_at(y)(v), atol=1e-12)
    assert list(hidden.terms(y)) == ["data", "prior"]
    assert torch.allclose(hidden.objective(y), sum(problem.terms(y, x).values()))


@pytest.mark.parametrize("kind", ["spline", "convex", "student", "huber"])
def test_curvature_is_bounded_by_the_certificate(kind):
    for seed in range(3):
        made = prior(kind, seed=seed)
        problem = Restoration(made).double()
        y, x = inputs(None)
        hidden = problem(x)
        with torch.no_grad():
            for scale in (0.0, 0.3, 1.0):  # responses near zero, where potentials bend, and beyond
                values = torch.linalg.eigvalsh(dense_hessian(hidden, scale * y))
                assert (values[:, -1] <= 1 / hidden.length + 1e-9).all()
                assert (values[:, 0] >= 1 - hidden.prior.concavity - 1e-9).all()
                assert (values[:, 0] >= 0.05 - 1e-9).all()
        certificate = problem.certificate()
        assert certificate.exists
        assert certificate.unique
        assert certificate.lipschitz <= 1 / 0.05 + 1e-6


def test_the_answer_moves_no_further_than_the_lipschitz_constant():
    problem = Restoration(prior("student")).double()
    layer = opteq.Equilibrium(problem, opteq.FISTA(tol=1e-10, max_steps=5000))
    _, (x, sigma) = inputs(None)
    with torch.no_grad():
        moved = layer((x + 0.01 * torch.randn_like(x), sigma)) - layer((x, sigma))
    assert moved.norm() <= problem.certificate().lipschitz * 0.011 * x.numel() ** 0.5


def test_hidden_pixels_give_no_certificate_but_a_convex_prior_may():
    mask = MEASUREMENTS["mask"]()
    assert Restoration(prior("spline"), mask).certificate().unique is None
    assert "a prior that is not convex" in Restoration(prior("spline"), mask).certificate().reasons["unique"]
    assert "the energy is convex, and not known" in Restoration(prior("convex"), mask).certificate().reasons["unique"]
    weighted = op.Mask(torch.full((8, 6), 0.5))
    certificate = Restoration(prior("convex"), weighted, strength=2.0).certificate()
    assert certificate.unique
    assert certificate.lipschitz == pytest.approx(0.5 / 0.25)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_images_are_restored_with_every_measurement(name):
    problem = Restoration(prior("convex"), MEASUREMENTS[name](), strength=0.1).double()
    _, x = inputs(problem.measurement)
    solution = opteq.Equilibrium(problem, opteq.FISTA(tol=1e-8, max_steps=20000)).solve(x)
    assert solution.converged.all()
    gradient = problem(x).gradient(solution.state)
    assert gradient.norm() < 1e-5 * x[0].norm()


class Physics:
    def A(self, y):
        return 2 * y

    def A_adjoint(self, u):
        return 2 * u


def test_energies_with_flat_directions_are_minimised():
    # At a residual of 1e-4 the energy still curves downwards along directions that the measurement does not see.
    torch.manual_seed(2)
    coarse = torch.nn.functional.interpolate(torch.rand(1, 1, 4, 4), size=16, mode="bicubic")
    x = op.Downsample(2).prepare()(coarse + 0.3 * (torch.rand(1, 1, 16, 16) > 0.5))
    problem = Restoration(Denoiser.load("denoiser-weak").prior, op.Downsample(2), strength=0.03, sigma=10 / 255)
    with torch.no_grad():
        early = opteq.Equilibrium(problem, opteq.FISTA(tol=1e-4), on_failure="ignore").solve(x)
        assert set(early.status) == {opteq.Status.NOT_A_MINIMUM}
        state, report = minimise(problem, x, x.new_full((1,), 10 / 255))
        assert bool(report.converged.all())
        hidden = problem(x)
        assert (hidden.objective(state) < hidden.objective(early.state)).all()
        basis = torch.eye(256).reshape(256, 1, 16, 16)
        for y, row in zip(state, x, strict=True):  # dense; the saddle on the way has -9e-4, and the largest is 0.45
            product = problem(row.expand(256, -1, -1, -1)).hessian_at(y.expand(256, -1, -1, -1))
            assert float(torch.linalg.eigvalsh(product(basis).flatten(1).double()).min()) > -2e-4
    assert problem.default_solver().measure == "error"
    assert Restoration(problem.prior).default_solver().measure == "residual"


def test_objects_of_other_libraries_measure():
    made = prior("convex").double()
    _, (x, sigma) = inputs(None)
    solver = opteq.FISTA(tol=1e-9, max_steps=5000)
    foreign = opteq.Equilibrium(Restoration(made, Physics()), solver)((x, sigma))
    own = opteq.Equilibrium(Restoration(made, op.Mask(torch.tensor(2.0))).double(), solver)((x, sigma))
    assert torch.allclose(foreign, own, atol=1e-6)


def assert_gradients_are_right(model: Denoiser, size: tuple[int, int]) -> None:
    """Of all parameters, for one random image."""
    x = torch.rand(1, 1, *size, dtype=torch.float64)
    sigma = torch.tensor([0.1], dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]

    def restored(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x, sigma))

    assert_slopes(restored, list(model.parameters()))


def test_gradients_of_every_parameter_are_those_of_finite_differences():
    model = Denoiser(
        DenoiserConfig(channels=(1, 2, 3), kernel_size=3, knots=5),
        opteq.FISTA(tol=1e-13, max_steps=5000),
        opteq.Implicit(tol=1e-12, max_steps=500),
    ).double()
    torch.manual_seed(0)
    for parameter in model.prior.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    assert_gradients_are_right(model, (6, 6))


def test_denoisers_are_saved_and_loaded(tmp_path):
    config = DenoiserConfig(channels=(1, 2, 6), kernel_size=3, rho=0.0)
    model = Denoiser(config)
    again = Denoiser.load(model.save(tmp_path / "model"))
    x, sigma = torch.rand(1, 1, 12, 12), torch.tensor([0.1])
    assert again.config == config
    assert torch.equal(model(x, sigma), again(x, sigma))
    with pytest.raises(UserError, match=r"no denoiser.*denoiser-convex"):
        Denoiser.load(tmp_path)
    written = tmp_path / "model" / "config.json"
    written.write_text(written.read_text().replace('"guide"', '"hidden"'))
    with pytest.raises(UserError, match="unknown option 'hidden'"):
        Denoiser.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("channels", [1, 10**18], "channels should be at most"),
        ("channels", [2, 3], "one input channel"),
        ("depth", 10**7, "depth should be at most"),
        ("knots", 6, "the two files do not belong together"),
        ("least", "x", "least should be a finite number"),
        ("least", 1.0, "0 < least < most"),
    ],
)
def test_damaged_configurations_of_denoisers_are_refused(tmp_path, option, value, message):
    folder = Denoiser(DenoiserConfig((1, 2, 3), 3, knots=4)).save(tmp_path)
    written = json.loads((folder / "config.json").read_text())
    written["denoiser"][option] = value
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match=message):
        Denoiser.load(folder)


def test_damaged_weights_of_denoisers_are_refused(tmp_path):
    folder = Denoiser(DenoiserConfig((1, 2, 3), 3, knots=4)).save(tmp_path)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-3] ^= 4
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="SHA-256 differs"):
        Denoiser.load(folder)
    (folder / "model.safetensors").write_bytes(data[:-9])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        Denoiser.load(folder)


def test_the_default_denoiser_has_at_most_14k_parameters_and_a_convex_energy():
    model = Denoiser()
    assert model.size <= 14_000
    assert model.layer.problem.certificate().unique


def test_answers_scale_with_image_and_noise():
    model = Denoiser(DenoiserConfig(channels=(1, 2, 6), kernel_size=3)).double()
    x = torch.rand(1, 1, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        once = model(x, torch.tensor([0.1]).double())
        twice = model(2 * x, torch.tensor([0.2]).double())
    assert torch.allclose(2 * once, twice, atol=1e-3)


@pytest.fixture
def folders(tmp_path):
    generator = np.random.default_rng(0)
    for name, count, size in (("train", 3, 48), ("set12", 1, 32), ("bsd68", 1, 30)):
        (tmp_path / name).mkdir()
        for number in range(count):
            smooth = np.kron(generator.integers(0, 255, (size // 6, size // 6)), np.ones((6, 6)))
            Image.fromarray(smooth.astype("uint8")).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_folders_are_read_and_cropped(folders):
    images = read_grey(folders / "train")
    assert len(images) == 3
    assert images[0].shape == (1, 48, 48)
    crops = Crops(torch.stack([image[0] for image in images]).float(), 16).draw(5)
    assert crops.shape == (5, 1, 16, 16)
    with pytest.raises(UserError, match="no folder"):
        read_grey(folders / "nowhere")
    with pytest.raises(UserError, match="at least that"):
        Crops(torch.zeros(2, 8, 8), 16)


def guided(**options) -> Denoiser:
    torch.manual_seed(0)
    model = Denoiser(
        DenoiserConfig(channels=(1, 2, 6), kernel_size=3, margin=0.05, guide=4, depth=2, repeats=2, **options)
    )
    for parameter in model.prior.guide.parameters():
        parameter.data.normal_(std=0.5)
    return model.double()


def test_a_guide_keeps_the_energy_convex():
    model = guided()
    y, x = inputs(None)
    hidden = model.layer.problem(x)
    with torch.no_grad():
        values = torch.linalg.eigvalsh(dense_hessian(hidden, 0.3 * y))
    assert (values[:, 0] >= 0.05 - 1e-9).all()
    assert (values[:, -1] <= 1 / hidden.length + 1e-9).all()
    certificate = model.layer.problem.certificate()
    assert certificate.unique
    assert certificate.lipschitz is None


@pytest.mark.parametrize("size", [(8, 6), (7, 5)], ids=["even", "odd"])
def test_gradients_of_a_guide_are_those_of_finite_differences(size):
    model = guided(rho=0.0)
    model.layer.solver = opteq.FISTA(tol=1e-13, max_steps=5000)
    model.layer.gradient = opteq.Implicit(tol=1e-12, max_steps=500)
    assert_gradients_are_right(model, size)


def test_a_guided_energy_is_least_where_responses_are_as_expected():
    """With x the image d and responses expected that are those of d, both terms vanish at d."""
    model = guided()
    clean = torch.rand(1, 1, 10, 10, dtype=torch.float64)
    sigma = torch.tensor([0.1], dtype=torch.float64)
    bound = model.prior.bind(sigma)

    class Oracle(torch.nn.Module):
        def forward(self, image, sigma):
            expected = bound.filters(clean) / bound.scale
            return torch.ones_like(expected), expected

    model.prior.guide = Oracle()
    solution = model.layer.solve((clean, sigma))
    energy = model.layer.problem((clean, sigma)).value(clean).detach()
    assert float(energy) == pytest.approx(0, abs=1e-12)
    assert torch.allclose(solution.state, clean, atol=1e-9)
    noisy = clean + 0.1 * torch.randn_like(clean)
    error = model.layer.solve((noisy, sigma)).state - clean
    assert error.norm() < 0.9 * (noisy - clean).norm()  # noise is taken off, whatever structure the image has


def test_the_curvature_of_a_prior_can_be_limited() -> None:
    torch.manual_seed(0)
    filters, potential = op.ConvChain((1, 3, 4), 3), potentials.Spline(4, knots=4, rho=1.0, mu=30.0)
    levels = NoiseLevels(4)
    sigma = torch.tensor([0.05, 0.2])
    free = FilterPrior(filters, potential, levels).bind(sigma)
    limited = FilterPrior(filters, potential, levels, steepest=2.0).bind(sigma)
    assert bool((free.curvature > 2.1).all())
    torch.testing.assert_close(limited.curvature, torch.full((2,), 2.0))
    assert bool((limited.concavity < free.concavity).all())
    product = limited.hessian_at(torch.randn(2, 1, 12, 12))
    units = torch.eye(144).reshape(144, 1, 1, 12, 12).expand(-1, 2, -1, -1, -1)
    dense = torch.stack([product(unit).flatten(1) for unit in units])
    for sample in range(2):
        eigenvalues = torch.linalg.eigvalsh(dense[:, sample].double())
        assert -limited.concavity[sample] - 1e-4 < eigenvalues[0]
        assert eigenvalues[-1] < 2.0001
    with pytest.raises(ValueError, match="steepest should be positive"):
        FilterPrior(filters, potential, levels, steepest=-1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Bounds are computed in float32, and the weights that they scale stay in the dtype of the filters."""
    problem = Restoration(prior("student"), sigma=0.1)
    x = torch.rand(2, 1, 8, 6)
    expected = opteq.Equilibrium(problem)(x)
    low = opteq.Equilibrium(problem.to(dtype), on_failure="ignore")(x.to(dtype))
    assert low.dtype == dtype
    assert (low.float() - expected).norm() < 20 * torch.finfo(dtype).eps * expected.norm()


def test_nothing_is_certified_of_weights_that_are_not_finite() -> None:
    problem = Restoration(prior("student"))
    problem.prior.filters.weights[0].data[0, 0, 0, 0] = torch.nan
    found = problem.certificate()
    assert (found.exists, found.unique, found.contraction, found.lipschitz) == (None,) * 4

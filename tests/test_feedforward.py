"""Feed-forward networks written as Deep OptEq: the same outputs, by both constructions, whatever solves them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq.problems.deep.deep_opteq import BoundDeepOptEq

SIZES = {1: [3, 6, 2], 2: [3, 6, 4, 2], 3: [3, 4, 7, 5, 1], 4: [2, 5, 3, 6, 4, 3]}
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "softplus": nn.Softplus}

by_depth = pytest.mark.parametrize("depth", SIZES)
by_activation = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def mlp(depth: int, activation: type[nn.Module] = nn.ReLU, gain: float = 1.0, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(depth)
    modules: list[nn.Module] = []
    for a, b in pairwise(SIZES[depth]):
        linear = nn.Linear(a, b, bias=bias)
        linear.weight.data.mul_(gain)
        modules += [linear, activation()]
    return nn.Sequential(*modules[:-1]).double()


def inputs(depth: int) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(5, SIZES[depth][0], generator=generator, dtype=torch.float64)


def assert_same(problem: opteq.DeepOptEq, network: nn.Sequential, x: Tensor, solver: opteq.solvers.Solver) -> Tensor:
    with torch.no_grad():
        solution = opteq.Equilibrium(problem, solver, on_failure="raise").solve(x)
        torch.testing.assert_close(solution.features, network(x), rtol=0, atol=1e-9)
    return solution.steps


def hidden_values(network: nn.Sequential, x: Tensor) -> list[Tensor]:
    values = []
    for linear, activation in zip(network[:-1:2], network[1::2], strict=True):
        x = activation(linear(x))
        values.append(x)
    return values


# ------------------------------------------------------------------------------------------------- without the skip


@by_activation
@by_depth
def test_chain_gives_the_same_outputs_after_one_sweep(depth: int, activation: type[nn.Module]) -> None:
    network, x = mlp(depth, activation, gain=2.0), inputs(depth)
    problem = opteq.DeepOptEq.from_feedforward(network)
    assert len(problem.layers) == depth + 1
    steps = assert_same(problem, network, x, opteq.Picard(tol=1e-12, max_steps=3))
    assert (steps <= 1).all()  # the map is constant: its first image is the answer
    far = 100 * torch.randn_like(problem(x).start())
    torch.testing.assert_close(problem(x).step(far), problem(x).step(problem(x).start()), rtol=0, atol=0)
    certificate = problem.certificate()
    assert certificate.contraction == 0
    assert certificate.unique


@by_depth
def test_nonexpansive_chain_is_made_of_proxes(depth: int) -> None:
    for activation in (nn.ReLU, lambda: nn.LeakyReLU(0.2), nn.Identity):
        network, x = mlp(depth, activation, gain=2.0), inputs(depth)
        problem = opteq.DeepOptEq.from_feedforward(network, nonexpansive=True)
        norms = [float(torch.linalg.matrix_norm(branch.W.weight.detach(), 2)) for branch in problem.branches]
        assert max(norms) <= 1 + 1e-12
        assert_same(problem, network, x, opteq.Anderson(tol=1e-12))
    plain = opteq.DeepOptEq.from_feedforward(mlp(depth, gain=2.0))
    assert depth == 1 or max(float(branch.W.norm()) for branch in plain.branches) > 1


# ---------------------------------------------------------------------------------------------------- with the skip


@pytest.mark.parametrize("alpha", [0.9, 0.5, 0.25])
@by_activation
@by_depth
def test_equilibrium_with_skip_connections_is_the_predicted_one(
    depth: int, activation: type[nn.Module], alpha: float
) -> None:
    """``z* = alpha / (1 - q^K) sum q^(K-1-i) W_i'h_i`` over the K layers, with the h of the network itself."""
    network, x = mlp(depth, activation), inputs(depth)
    problem = opteq.DeepOptEq.from_feedforward(network, alpha=alpha)
    count, q = len(problem.layers), 1 - alpha
    active = [i for i, branch in enumerate(problem.branches) if branch.U is not None]
    assert len(active) == 2 * depth
    with torch.no_grad():
        values = 2 * hidden_values(network, x)
        parts = [q ** (count - 1 - i) * h @ problem.branches[i].W.weight for i, h in zip(active, values, strict=True)]
        z = alpha / (1 - q**count) * torch.stack(parts).sum(dim=0)
        torch.testing.assert_close(problem(x).step(z), z, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(problem(x).features(z), network(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "solver",
    [opteq.Picard(tol=1e-12), opteq.Anderson(tol=1e-12), opteq.Broyden(tol=1e-12)],
    ids=["picard", "anderson", "broyden"],
)
# Any alpha with any activation is above, by one solver.
@pytest.mark.parametrize(("activation", "alpha"), [(nn.ReLU, 0.9), (nn.Tanh, 0.25), (nn.Softplus, 0.9)])
def test_every_solver_finds_it_from_its_own_start(
    activation: type[nn.Module], alpha: float, solver: opteq.solvers.Solver
) -> None:
    for depth in SIZES:
        network, x = mlp(depth, activation), inputs(depth)
        problem = opteq.DeepOptEq.from_feedforward(network, alpha=alpha)
        assert_same(problem, network, x, solver)


@by_depth
def test_large_weights_and_a_start_far_away(depth: int) -> None:
    network, x = mlp(depth, nn.Tanh, gain=8.0), inputs(depth)
    problem = opteq.DeepOptEq.from_feedforward(network, alpha=0.4)
    certificate = problem.certificate()
    assert certificate.unique
    assert certificate.contraction is not None
    assert certificate.contraction <= 0.26  # half for each copy, and what the norm's own bound adds
    far = 1e3 * torch.randn_like(problem(x).start())
    with torch.no_grad():
        layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13), on_failure="raise")
        torch.testing.assert_close(layer(x, start=far), network(x), rtol=0, atol=1e-9)


def test_without_idle_layers_there_are_other_equilibria() -> None:
    """Why the idle layers are there: without them the predicted point is a fixed point that plain iteration leaves."""
    network, x = mlp(2, nn.Tanh, gain=3.0), inputs(2)
    problem = opteq.DeepOptEq.from_feedforward(network, alpha=0.3)
    hidden = problem(x)
    active = [i for i, branch in enumerate(problem.branches) if branch.U is not None]
    assert len(active) < len(problem.layers)
    # The construction with the same Gram blocks and no idle layers: the echo is q^N instead of q^(N + idle).
    width, echo = hidden.layers[-1].W.weight.shape[1] // 2, 0.7**2
    layers = [hidden.layers[i] for i in active]
    roots = [layer.W.weight[:, :width] for layer in layers[:2]]
    for copy, factors in enumerate(((1.0, 0.0), (-echo, (1 - echo**2) ** 0.5))):
        for layer, root in zip(layers[2 * copy : 2 * copy + 2], roots, strict=True):
            layer.W.weight = torch.cat([factor * root for factor in factors], dim=1)
    short = BoundDeepOptEq(layers, [0.3] * 4)
    with torch.no_grad():
        values = 2 * hidden_values(network, x)
        parts = [0.7 ** (3 - i) * h @ layers[i].W.weight for i, h in enumerate(values)]
        predicted = 0.3 / (1 - 0.7**4) * torch.stack(parts).sum(dim=0)
        torch.testing.assert_close(short.step(predicted), predicted, rtol=1e-11, atol=1e-12)
        outcome = opteq.Picard(tol=1e-10, max_steps=5000).solve(short.step, short.start())
        assert bool((outcome.codes == 0).any())
        away = (outcome.state - predicted).norm(dim=1) / predicted.norm(dim=1)
        assert float(away[outcome.codes == 0].max()) > 0.1


def test_gradients_flow_as_through_the_network() -> None:
    for alpha in (1.0, 0.5):
        network, x = mlp(2, nn.Tanh), inputs(2).requires_grad_()
        problem = opteq.DeepOptEq.from_feedforward(network, alpha=alpha)
        layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13))
        weights = torch.linspace(-1, 1, 10, dtype=torch.float64).view(5, 2)
        (found,) = torch.autograd.grad((weights * layer(x)).sum(), x)
        (wanted,) = torch.autograd.grad((weights * network(x)).sum(), x)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


# ----------------------------------------------------------------------------------------- what goes in, and errors


@pytest.mark.parametrize("alpha", [1.0, 0.6])
@pytest.mark.parametrize(
    "activation",
    [
        nn.Sigmoid(),
        nn.Softsign(),
        nn.Hardtanh(),
        nn.Identity(),
        nn.LeakyReLU(0.3),
        nn.ELU(1.7),
        nn.Softshrink(0.2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_activations(activation: nn.Module, alpha: float) -> None:
    network, x = mlp(2, lambda: activation), inputs(2)
    assert_same(opteq.DeepOptEq.from_feedforward(network, alpha), network, x, opteq.Anderson(tol=1e-12))


@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_layers_without_bias_and_single_precision(alpha: float) -> None:
    network, x = mlp(3, nn.Tanh, bias=False), inputs(3)
    assert_same(opteq.DeepOptEq.from_feedforward(network, alpha), network, x, opteq.Anderson(tol=1e-12))
    network, x = network.float(), x.float()
    problem = opteq.DeepOptEq.from_feedforward(network, alpha)
    assert {p.dtype for p in problem.parameters()} == {torch.float32}
    with torch.no_grad():
        features = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6), on_failure="raise")(x)
        torch.testing.assert_close(features, network(x), rtol=0, atol=1e-5)


def test_the_original_is_not_changed() -> None:
    network = mlp(2)
    before = [p.detach().clone() for p in network.parameters()]
    problem = opteq.DeepOptEq.from_feedforward(network, 0.5)
    for parameter in problem.parameters():
        parameter.data.add_(1)
    for parameter, was in zip(network.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), was, rtol=0, atol=0)


L = nn.Linear


@pytest.mark.parametrize(
    ("network", "error", "message"),
    [
        (L(2, 2), TypeError, "takes an nn.Sequential; got Linear"),
        (nn.Sequential(L(2, 2)), ValueError, "takes Linear, activation, ..., Linear; got Linear"),
        (nn.Sequential(nn.ReLU(), L(2, 2), nn.ReLU()), ValueError, "got ReLU, Linear, ReLU"),
        (nn.Sequential(L(2, 2), nn.ReLU()), ValueError, "got Linear, ReLU"),
        (nn.Sequential(L(2, 2), nn.ReLU(), nn.Flatten()), ValueError, "got Linear, ReLU, Flatten"),
        (nn.Sequential(L(2, 2), L(2, 2), L(2, 2)), ValueError, "no penalty belongs to Linear; known: identity, relu"),
        (nn.Sequential(L(2, 2), nn.GELU(), L(2, 2)), ValueError, "'gelu' is not monotone, so it is the prox of no"),
        (nn.Sequential(L(2, 2), nn.SiLU(), L(2, 2)), ValueError, "'silu' is not monotone"),
        (nn.Sequential(L(2, 2), nn.Hardswish(), L(2, 2)), ValueError, "'hardswish' is not monotone"),
        (
            nn.Sequential(L(2, 2), nn.ReLU(), L(2, 2), nn.Tanh(), L(2, 2)),
            ValueError,
            r"should be the same; got \['ReLU\(\)', 'Tanh\(\)'\]",
        ),
        (
            nn.Sequential(L(2, 2), nn.LeakyReLU(0.1), L(2, 2), nn.LeakyReLU(0.2), L(2, 2)),
            ValueError,
            "should be the same",
        ),
        (nn.Sequential(L(2, 2), nn.Softplus(beta=2), L(2, 2)), ValueError, "Softplus is known with beta=1; got beta=2"),
        (nn.Sequential(L(2, 2), nn.Softplus(1, 5), L(2, 2)), ValueError, "known with threshold=20; got threshold=5"),
        (nn.Sequential(L(2, 2), nn.Hardtanh(-2, 1), L(2, 2)), ValueError, "known with min_val=-1; got min_val=-2"),
        (nn.Sequential(L(2, 2), nn.ReLU6(), L(2, 2)), ValueError, "Hardtanh is known with min_val=-1; got min_val=0"),
    ],
)
def test_networks_that_are_refused(network: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opteq.DeepOptEq.from_feedforward(network)


def test_options_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha should lie in \(0, 1\]; got 2"):
        opteq.DeepOptEq.from_feedforward(mlp(1), alpha=2)
    with pytest.raises(ValueError, match=r"nonexpansive=True needs alpha=1; got alpha=0\.5"):
        opteq.DeepOptEq.from_feedforward(mlp(1), alpha=0.5, nonexpansive=True)
    with pytest.raises(ValueError, match="which Tanh does not allow; ReLU, LeakyReLU and Identity do"):
        opteq.DeepOptEq.from_feedforward(mlp(1, nn.Tanh), nonexpansive=True)


def test_a_solver_on_features_cannot_look_through_the_read_out() -> None:
    problem = opteq.DeepOptEq.from_feedforward(mlp(1))
    with pytest.raises(ValueError, match="whose features do not determine its state"):
        opteq.Equilibrium(problem, opteq.SAM(regularizer=opteq.regularizers.Ridge()))(inputs(1))


def conv_network(activation: nn.Module, *kernels: int) -> nn.Sequential:
    torch.manual_seed(0)
    channels, parts = [2, 3, 5, 4, 3][: len(kernels)], []
    for index, (size, kernel) in enumerate(zip([*channels[1:], 2], kernels, strict=True)):
        parts += [nn.Conv2d(channels[index], size, kernel, padding=kernel // 2, bias=index != 1), activation]
    return nn.Sequential(*parts[:-1]).double()


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Sigmoid()], ids=lambda module: type(module).__name__)
@pytest.mark.parametrize("kernels", [(3, 3), (3, 1, 5), (1, 3, 3, 3)], ids=str)
def test_convolutional_networks_are_deep_opteqs(kernels: tuple[int, ...], activation: nn.Module) -> None:
    """Lemma 1 and 2 with convolutions: equal at the borders, too, and reached in one sweep."""
    network = conv_network(activation, *kernels)
    problem = opteq.DeepOptEq.from_feedforward(network)
    x = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    layer = opteq.Equilibrium(problem, opteq.Picard(tol=1e-12, max_steps=3))
    solution = layer.solve(x)
    assert bool(solution.converged.all())
    torch.testing.assert_close(solution.features, network(x), rtol=1e-9, atol=1e-9)
    assert int(solution.steps.max()) <= 2


def test_convolutions_can_be_scaled_to_proxes() -> None:
    network = conv_network(nn.ReLU(), 3, 3, 3)
    problem = opteq.DeepOptEq.from_feedforward(network, nonexpansive=True)
    assert all(float(branch.W.norm()) <= 1 + 1e-6 for branch in problem.branches)
    x = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    found = opteq.Equilibrium(problem, opteq.Picard(tol=1e-13, max_steps=3))(x)
    torch.testing.assert_close(found, network(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (lambda: conv_network(nn.ReLU(), 3, 3), {"alpha": 0.5}, "with alpha=1; got alpha=0.5"),
        (lambda: conv_network(nn.Tanh(), 3, 3), {"nonexpansive": True}, "ReLU, LeakyReLU and Identity do"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 1, 3)), {}, "keeps the size of images"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Linear(2, 1)), {}, "Conv2d, activation"),
    ],
)
def test_convolutions_that_have_no_such_form_are_refused(network, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opteq.DeepOptEq.from_feedforward(network(), **options)

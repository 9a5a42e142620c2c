"""APGD against a plain writing of the algorithm, one image at a time, and against what is known of easy models."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.analysis import APGD, PGD
from opteq.analysis.apgd import dlr


def network(classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(54, 24), nn.ReLU(), nn.Linear(24, classes))
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        model[-1].weight *= 6
    return model.requires_grad_(False)


def plain(model: nn.Module, image: Tensor, label: Tensor, epsilon: float, steps: int, kind: str) -> Tensor:
    """The algorithm of the paper for one image, in plain Python."""

    def loss(x: Tensor) -> Tensor:
        logits = model(x)
        return F.cross_entropy(logits, label) if kind == "cross-entropy" else dlr(logits, label)[0]

    def slope(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(loss(x), x)[0]

    def inside(x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, image - epsilon), image + epsilon).clamp(0, 1)

    shares = [0.0, 0.22]
    while shares[-1] < 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    checks = [math.ceil(share * steps - 1e-9) for share in shares if share <= 1]
    eta, points, values = 2 * epsilon, [image], [float(loss(image))]
    best, top = (image, values[0]), values[0]
    etas, tops, rises = {0: eta}, {0: top}, 0
    seen = [image]
    for k in range(steps):
        x = points[-1]
        z = inside(x + eta * slope(x).sign())
        new = z if k == 0 else inside(x + 0.75 * (z - x) + 0.25 * (x - points[-2]))
        seen.append(new)
        value = float(loss(new))
        rises += value > values[-1]
        if value > best[1]:
            best = (new, value)
        points.append(new)
        values.append(value)
        if k + 1 in checks[1:]:
            last = checks[checks.index(k + 1) - 1]
            etas[k + 1], tops[k + 1] = eta, best[1]
            if rises < 0.75 * (k + 1 - last) or (etas[last] == eta and tops[last] == best[1]):
                eta /= 2
                points[-1], values[-1] = best
            rises = 0
    wrong = [x for x in seen if int(model(x).argmax()) != int(label)]
    return max(wrong or seen, key=lambda x: float(loss(x))).detach()


@pytest.mark.parametrize("kind", ["cross-entropy", "dlr"])
def test_against_a_plain_writing(kind: str) -> None:
    model, images = network(), torch.rand(5, 1, 5, 5, dtype=torch.float64)
    labels = model(images).argmax(dim=1)
    made = APGD(0.08, steps=25, loss=kind, random_start=False)(model, images, labels)
    for place in range(5):
        one = slice(place, place + 1)
        wanted = plain(model, images[one], labels[one], 0.08, 25, kind)
        torch.testing.assert_close(made[one], wanted, atol=1e-9, rtol=0)


def test_it_beats_pgd_with_as_many_steps() -> None:
    model, images = network(), torch.rand(40, 1, 5, 5, dtype=torch.float64)
    labels = model(images).argmax(dim=1)

    def mean(attack: APGD | PGD) -> float:
        moved = attack(model, images, labels, noise=torch.zeros_like(images))
        assert float((moved - images).abs().max()) <= attack.epsilon + 1e-12
        return float(F.cross_entropy(model(moved), labels))

    assert mean(APGD(0.1, 30)) > mean(PGD(0.1, 30)) - 1e-3
    assert mean(APGD(0.1, 30)) > mean(PGD(0.1, 30, step_size=0.1))


def test_dlr_does_not_care_how_sure_a_network_is() -> None:
    """Logits a thousand times as large: the gradient of the cross-entropy underflows, that of DLR does not."""
    model, images = network().float(), torch.rand(20, 1, 5, 5)
    labels = model(images).argmax(dim=1)
    noise, sure = torch.zeros_like(images), nn.Sequential(model, Scaled(1000.0))
    moved, same = (APGD(0.1, 10, loss="dlr")(net, images, labels, noise=noise) for net in (model, sure))
    assert torch.equal(model(moved).argmax(dim=1), model(same).argmax(dim=1))
    assert bool((model(moved).argmax(dim=1) != labels).any())


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_dlr_by_hand() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0], [1.0, 4.0, 2.0, 3.0]])
    torch.testing.assert_close(dlr(logits, torch.tensor([1, 0])), torch.tensor([-0.5, 1.5]))


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match=r"unknown APGD.loss 'hinge'\. Known: cross-entropy, dlr"):
        APGD(0.1, loss="hinge")
    with pytest.raises(ValueError, match="needs three classes or more; got 2"):
        APGD(0.1, 2, loss="dlr")(network(2), torch.rand(2, 1, 5, 5).double(), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"one class per image as labels, \(B,\); got \(2, 3\)"):
        APGD(0.1, 2)(network(3), torch.rand(2, 1, 5, 5).double(), torch.rand(2, 3))

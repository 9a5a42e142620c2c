"""The cases: layers of four shapes and the equilibria of two models, each with its input bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq import engine, models
from opteq import operators as op
from opteq.common.errors import UserError, unknown_name
from opteq.engine.flatten import flatten
from opteq.operators.conv import ConvMap
from opteq.problems import OptEq
from opteq.problems.hidden import BoundMap
from opteq.states import State, blocks, single
from opteq_bench.floor import Floor, layer_map

MODELS = ("mopteq-0.48m", "geq-5m")
PRECISIONS = ("float32", "tf32", "bf16")
IMAGE = (3, 32, 32)
TOL = 1e-4


@dataclass(frozen=True)
class Shape:
    """A layer: channels of the features z, of the state y, and the side of the image."""

    channels: int
    hidden: int
    side: int

    def __str__(self) -> str:
        return f"{self.channels},{self.hidden},{self.side}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From ``"channels,hidden,side"``.

        >>> Shape.parse("32,64,32")
        Shape(channels=32, hidden=64, side=32)
        """
        try:
            channels, hidden, side = (int(part) for part in text.split(","))
        except ValueError:
            raise UserError(f"a shape should be channels,hidden,side such as 32,64,32; got {text!r}") from None
        if min(channels, hidden, side) < 1:
            raise UserError(f"the numbers of a shape should be at least 1; got {text!r}")
        return cls(channels, hidden, side)


SHAPES = (Shape(32, 64, 32), Shape(64, 128, 32), Shape(256, 256, 16), Shape(256, 256, 8))


@dataclass(frozen=True)
class Precision:
    """How the map is computed: ``float32``, ``tf32`` (float32 with TensorFloat-32 products) or ``bf16`` (autocast)."""

    name: str
    device: torch.device

    def __post_init__(self) -> None:
        if self.name not in PRECISIONS:
            raise unknown_name("precision", self.name, PRECISIONS)
        if self.name == "tf32" and self.device.type != "cuda":
            raise UserError("precision tf32 needs a GPU; on a CPU use float32 or bf16")

    @property
    def dtype(self) -> torch.dtype:
        """Of states and of the plain map's weights."""
        return torch.bfloat16 if self.name == "bf16" else torch.float32

    @property
    def width(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def tol(self) -> float:
        """The tolerance that a solver applies for :data:`TOL`: at least the rounding error of its map."""
        return max(TOL, torch.finfo(self.dtype).eps)

    def autocast(self) -> torch.autocast:
        """The region in which the map is computed."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.name == "bf16")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set TensorFloat-32 for this precision inside the block."""
        before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.name != "float32"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@dataclass(frozen=True)
class Case:
    """A map with its input bound, in one precision.

    Attributes:
        name: of the shape or the model.
        precision: how the map is computed.
        hidden: the bound problem, for our solvers.
        step: the same map as plain PyTorch, without autocast regions to enter, for the map itself and for rivals.
        start: where ``step`` begins.
        state: the state of ``hidden`` that belongs to a point of ``step``.
        entries: number of elements of a point.
        floor: lower bound of the cost of the map.
        asked: the tolerance of the solvers; for a model its own.
    """

    name: str
    precision: Precision
    hidden: BoundMap
    step: Callable[[State], State]
    start: State
    state: Callable[[State], State]
    entries: int
    floor: Floor
    asked: float = TOL

    @property
    def tol(self) -> float:
        """The tolerance that is applied: at least the rounding error of the map."""
        return max(self.asked, torch.finfo(self.precision.dtype).eps)

    def residual(self, state: State) -> float:
        """The worst relative residual ``|T(y) - y| / |T(y)|`` of a batch of states, by the plain path."""
        with torch.no_grad(), self.precision.autocast(), engine.off():
            images = [part.double() for part in blocks(self.hidden.step(state))]
        change = _squares([new - old for new, old in zip(images, blocks(state), strict=True)])
        return float((change / _squares(images).clamp(min=1e-300)).sqrt().max())


def layer_problem(shape: Shape, device: torch.device) -> OptEq:
    """The problem of a shape, with the same weights at every call."""
    torch.manual_seed(0)
    W = op.Conv2d(shape.channels, shape.hidden, 3, bound=0.95)
    problem = OptEq(W, U=nn.Conv2d(shape.channels, shape.hidden, 3, padding=1))
    return problem.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def bounded_weight(problem: OptEq) -> Tensor:
    """The weight of W with its bound applied, on the tape if there is one."""
    linear = problem.W.prepare()
    assert isinstance(linear, ConvMap)
    return linear.weight


def random_images(batch: int, size: Sequence[int], device: torch.device) -> Tensor:
    """Random images ``(batch, *size)``, channels last, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(batch, *size, generator=generator)
    return made.to(device).contiguous(memory_format=torch.channels_last)


def plain_map(weight: Tensor, c: Tensor) -> Callable[[State], State]:
    """``z -> W' relu(W z + c)``, one PyTorch operation after the other."""

    def step(z: State) -> Tensor:
        y = torch.relu(F.conv2d(single(z), weight, padding=1) + c)
        return F.conv_transpose2d(y, weight, padding=1)

    return step


@torch.no_grad()
def layer_case(shape: Shape, batch: int, precision: Precision) -> Case:
    """A layer of a shape with random images bound."""
    problem = layer_problem(shape, precision.device)
    x = random_images(batch, (shape.channels, shape.side, shape.side), precision.device)
    with precision.autocast():
        hidden = problem(x)
    weight = bounded_weight(problem).to(precision.dtype).contiguous(memory_format=torch.channels_last)
    c = hidden.block.c.to(precision.dtype)
    return Case(
        name=str(shape),
        precision=precision,
        hidden=hidden,
        step=plain_map(weight, c),
        start=torch.zeros_like(x, dtype=precision.dtype),
        state=lambda z: torch.relu(F.conv2d(single(z).to(weight.dtype), weight, padding=1) + c),
        entries=x.numel(),
        floor=layer_map(shape.channels, shape.hidden, shape.side, batch, precision.width),
    )


@torch.no_grad()
def model_case(name: str, batch: int, precision: Precision) -> Case:
    """The equilibrium of a model, freshly initialised, with random images of 32x32 bound."""
    torch.manual_seed(0)
    model = models.create(name).to(precision.device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    layer = models.equilibria(model)[0][1]
    with precision.autocast():
        hidden = layer.problem(model.stem(random_images(batch, IMAGE, precision.device)))

    def step(y: State) -> State:
        with precision.autocast(), engine.off():
            image: State = hidden.step(y)
        return image

    start = hidden.start()
    return Case(
        name=name,
        precision=precision,
        hidden=hidden,
        step=step,
        start=start,
        state=lambda y: y,
        entries=sum(part.numel() for part in blocks(start)),
        floor=_counted(hidden, step, start),
        asked=layer.solver.tol,
    )


def _counted(hidden: BoundMap, step: Callable[[State], State], start: State) -> Floor:
    """State in and out and every tensor that the map holds, once; products as PyTorch's own counter sees them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        image = step(start)
    held = flatten(hidden).tensors
    moved = [*blocks(start), *blocks(image), *held]
    return Floor(sum(part.numel() * part.element_size() for part in moved), counter.get_total_flops())


def _squares(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double().square().flatten(1).sum(dim=1) for part in parts]).sum(dim=0)

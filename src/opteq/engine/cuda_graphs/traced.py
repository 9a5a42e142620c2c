"""Steps and products of problems that a user has written, traced before they are captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from opteq.engine.cuda_graphs.operations import FastOperations
from opteq.engine.flatten import Flattened
from opteq.engine.trace import Traced
from opteq.gradients.adjoint import adjoint_product
from opteq.problems.hidden import BoundMap, Product
from opteq.problems.written import BoundModule
from opteq.states import State, blocks, like


class Traces:
    """The traced functions of one problem: a capture opens its solve several times, and traces it once.

    Args:
        flat: the problem, taken apart.
        compile_functions: whether traced functions are compiled.
    """

    def __init__(self, flat: Flattened, compile_functions: bool) -> None:
        self.flat = flat
        self.compile_functions = compile_functions
        self._known: dict[str, Traced] = {}

    def problem(self, tensors: list[Tensor]) -> BoundMap:
        """The problem with ``tensors``; its step, and its merit, are traced ones where a user has written it."""
        hidden = self.flat.with_tensors(tensors)
        if not self._worth_tracing(hidden):
            return hidden
        start = hidden.start()

        def step(fixed: list[Tensor], varying: list[Tensor]) -> Sequence[Tensor]:
            return blocks(self.flat.with_tensors(fixed).step(like(start, tuple(varying))))

        def step_and_merit(fixed: list[Tensor], varying: list[Tensor]) -> Sequence[Tensor]:
            image, merit = self.flat.with_tensors(fixed)._step_and_merit(like(start, tuple(varying)))
            return [*blocks(image), merit]

        stepped = self._traced("step", step, tensors, blocks(start))
        hidden.step = lambda y: like(y, tuple(stepped(blocks(y))))  # type: ignore[method-assign]
        if hidden.step_and_merit is not None and not hidden.contracts:
            both = self._traced("step_and_merit", step_and_merit, tensors, blocks(start))

            def with_merit(y: State) -> tuple[State, Tensor]:
                *image, merit = both(blocks(y))
                return like(y, tuple(image)), merit

            hidden._step_and_merit = with_merit  # type: ignore[method-assign]
        return hidden

    def product(self, tensors: list[Tensor], state: State, product: Product, v: State) -> Product:
        """The product of the adjoint system at ``state`` with vectors like ``v``, traced for a user's problem."""
        if not self._worth_tracing(self.flat.with_tensors(tensors)):
            return product
        count = len(tensors)

        def apply(fixed: list[Tensor], varying: list[Tensor]) -> Sequence[Tensor]:
            local = self.flat.with_tensors(fixed[:count]).linearise(like(state, tuple(fixed[count:])))
            return blocks(adjoint_product(local)(like(v, tuple(varying))))

        applied = self._traced("product", apply, [*tensors, *blocks(state)], blocks(v))
        return lambda u: like(u, tuple(applied(blocks(u))))

    def _worth_tracing(self, hidden: BoundMap) -> bool:
        """Whether a user has written it, or its closed forms are to be compiled."""
        return self.compile_functions or any(isinstance(value, BoundModule) for value in vars(hidden).values())

    def _traced(
        self,
        name: str,
        function: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]],
        fixed: Sequence[Tensor],
        varying: Sequence[Tensor],
    ) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        if name not in self._known:
            with FastOperations(kernels=False):
                self._known[name] = Traced(function, fixed, varying, self.compile_functions)
        return self._known[name].bind(fixed)

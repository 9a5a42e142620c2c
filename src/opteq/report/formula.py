"""The objective of a problem as a formula: every term with its meaning and its color in the charts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch

import torch

from opteq import kernels, penalties
from opteq.penalties import HardTanh, Identity, Penalty, ReLU, SoftThreshold
from opteq.problems import (
    GEQ,
    AffineOptEq,
    DeepOptEq,
    Inhibited,
    Inhibition,
    MOptEq,
    Objective,
    OptEq,
    Parallel,
    POptEq,
    Problem,
    Splitting,
)
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.typeset import typeset


@dataclass(frozen=True)
class Term:
    """A term: its name in the problem, its sign and formula, and its effect."""

    name: str
    sign: str
    body: Html
    meaning: str


@dataclass(frozen=True)
class Formula:
    """An objective.

    Attributes:
        over: the variable, with its constraint.
        terms: the terms; empty where nothing is minimised.
        step: one step of the fixed-point map.
        symbols: the meaning of the symbols.
        remark: a sentence below, or None.
        before: a sum over branches in front of all terms.
    """

    over: Html
    terms: tuple[Term, ...]
    step: Html
    symbols: tuple[tuple[Html, str], ...] = ()
    remark: str | None = None
    before: Html | None = None


def formulas(problem: Problem) -> list[Formula]:
    """The formulas of a problem: one, or one per part where parts of several kinds are in parallel."""
    parts = problem.parts() if isinstance(problem, Parallel) else []
    found = [formula(part) for part, _scale in parts]
    if len({one.terms for one in found}) <= 1:
        return [formula(problem)]
    return [
        replace(one, remark=f"Part {index}: a {type(part).__name__} on the image at 1/{scale} of its size.")
        for index, (one, (part, scale)) in enumerate(zip(found, parts, strict=True))
    ]


@singledispatch
def formula(problem: Problem) -> Formula:
    """The formula of a problem; a general one for types without their own."""
    given = getattr(problem, "penalty", None)
    over, term, act = _penalty(penalties.get(given) if isinstance(given, str | Penalty) else None)
    rest = Term("smooth", "+", typeset("g(y; x)"), "couples the state to the input")
    return Formula(
        over,
        (*term, _quadratic(), rest),
        join(typeset("y ← "), act, typeset("(−∇g(y; x))")),
        (
            (typeset("x"), "the layer's input"),
            (typeset("y"), "the state"),
            (typeset("g"), f"the smooth part of {type(problem).__name__}"),
        ),
    )


@formula.register
def _(problem: Objective) -> Formula:
    given = getattr(problem, "penalty", None)
    over, _, act = _penalty(penalties.get(given) if given is not None else None)
    return Formula(
        over,
        (),
        join(typeset("y ← "), act, typeset("(y − t∇F(y; x))")),
        (
            (typeset("x"), "the layer's input"),
            (typeset("y"), "the state"),
            (typeset("F"), f"the sum of the terms of {type(problem).__name__}, which have names of their own"),
            (typeset("t"), "the step length, one over the curvature of F"),
        ),
    )


@formula.register
def _(problem: OptEq) -> Formula:
    over, term, act = _penalty(problem.penalty)
    mu = "" if problem.mu == 1 else f" / {_short(problem.mu)}"
    terms = [
        *term,
        _quadratic(),
        Term("coupling", "−", typeset(f"½‖W'y‖^2{mu}"), "features should be strong"),
        Term("input", "−", typeset("⟨Ux + b, y⟩"), "the state should follow the image"),
    ]
    if problem.regularizer is not None:
        weight = _short(problem.mu * problem.gamma)
        terms.append(Term("regularizer", "+", typeset(f"{weight} R(z)"), f"{type(problem.regularizer).__name__} prior"))
    prior = "" if problem.regularizer is None else f" − {_short(problem.gamma)}∇R(z)"
    step = join(typeset("y ← "), act, typeset(f"(W(z{prior}) + Ux + b)" if prior else "(Wz + Ux + b)"))
    symbols = (
        (typeset("x"), "the output of the stem"),
        (typeset("y"), "the state"),
        (typeset(f"z = W'y{mu}"), "the features that the head reads"),
        (typeset("W"), f"couples features and state: {problem.W!r}"),
        (typeset("Ux + b"), "the input term"),
    )
    return Formula(over, tuple(terms), step, symbols)


@formula.register
def _(problem: Inhibition) -> Formula:
    over, term, act = _penalty(problem.penalty)
    several = len(problem.operators()) > 1
    terms = (
        *term,
        _small(),
        _inhibition(several),
        Term("input", "−", typeset("⟨Ux + b, y⟩"), "the state should follow the image"),
    )
    step = join(typeset("y ← "), act, typeset("(y − t(my + AA'y − Ux − b))"))
    symbols = (
        (typeset("x"), "the output of the stem"),
        (typeset("y"), "the state, which is what the head reads" + (", all branches together" if several else "")),
        (typeset("A"), "units that share a filter of A inhibit each other"),
        (typeset("Ux + b"), "the input term"),
        (typeset("m"), f"{_short(problem.m)}: how strongly convex the objective is, whatever A is"),
        (typeset("t"), "the step length, one over the curvature"),
    )
    return Formula(over, terms, step, symbols)


@formula.register
def _(problem: Inhibited) -> Formula:
    inner = formula(problem.problem)
    terms = [_small() if one.name == "quadratic" else one for one in inner.terms]
    symbols = [
        *inner.symbols,
        (typeset("A"), "units that share a filter of A inhibit each other"),
        (typeset("m"), f"{_short(problem.m)}: the weight of small states"),
    ]
    if not any("<i>y</i>" in symbol and "sub" not in symbol for symbol, _ in inner.symbols):
        symbols.append((typeset("y"), "the states of all branches"))
    step = typeset("y ← prox(y − t∇F(y; x))")
    remark = "F is the smooth part, t one over its curvature, and prox belongs to the penalty."
    return replace(inner, terms=(*terms, _inhibition(False)), symbols=tuple(symbols), step=step, remark=remark)


@formula.register
def _(problem: GEQ) -> Formula:
    over, term, act = _penalty(problem.penalty)
    kernel = problem.kernel
    symbols = [
        (typeset("x"), "the output of the stem"),
        (typeset("y"), "the state, which is what the head reads"),
        (typeset("W"), f"carries the state to where it is compared: {problem.W!r}"),
        (typeset("Ux + b"), "what it is compared with: the view of the image"),
    ]
    if isinstance(kernel, kernels.Gaussian):
        body = typeset("Σ_p e_p / 2γ")
        parts = [Term("gaussian", "−", body, "the state should explain the image, patch by patch")]
        step = join(typeset("y ← "), act, typeset("(W'Σ_p e_p q_p)"))
        whole = "the whole of" if kernel.patches is None else "patch p of"
        shown = "projected" if kernel.projection is not None else "as it is"
        gamma = kernel.gamma
        how = (
            "chosen for each image, then fixed"
            if isinstance(gamma, str)
            else _short(float(torch.as_tensor(gamma).detach()))
        )
        symbols += [
            (typeset("q_p"), f"{whole} Ux + b − Wy, {shown}"),
            (typeset("e_p = exp(−γ‖q_p‖^2)"), "the weight of a patch, from 0 (ignored) to 1 (explained)"),
            (typeset("γ"), how),
        ]
    else:
        name = type(kernel).__name__.lower()
        parts = [
            Term("coupling", "−", typeset("½‖Wy‖^2"), "the state should be strong"),
            Term("input", "−", typeset("k(⟨Ux + b, y⟩)"), "the state should resemble the image"),
        ]
        step = join(typeset("y ← "), act, typeset("(∇s(y))"))
        symbols.append((typeset("k"), f"the {name} kernel; s is minus the two last terms"))
    return Formula(over, (*term, _quadratic(), *parts), step, tuple(symbols))


@formula.register
def _(problem: MOptEq) -> Formula:
    over, term, act = _penalty(problem.penalty)
    coupling = problem.coupling
    terms = [
        *(replace(one, body=typeset("Σf(y_i)")) if "f" in one.body else one for one in term),
        Term("quadratic", "+", typeset("½‖y_i‖^2"), "states should be small"),
        Term("input", "−", typeset("⟨U_i x_i + b_i, y_i⟩"), "each should follow the image"),
    ]
    if coupling.heritage:
        terms.append(Term("heritage", "−", typeset("½⟨z_i, z_i+1⟩"), "neighbours should agree"))
    else:
        terms.append(Term("self", "−", typeset("½‖z_i‖^2"), "features should be strong"))
    if coupling.diversity:
        weight = _short(coupling.diversity / 2)
        terms.append(Term("diversity", "+", typeset(f"{weight} D(z_i, z_i+1)"), "different channels should differ"))
    symbols = [
        (typeset("x_i"), "what the stem makes of the image, at the scale of branch i"),
        (typeset("y_i"), "the state of branch i"),
        (typeset("U_i x_i + b_i"), "what the image asks of it"),
        (typeset("z_i = W_i'y_i"), "features of branch i; the last branch is beside the first"),
        (typeset("h_i"), "minus the slope of the terms that tie branches, in branch i"),
    ]
    if coupling.diversity:
        symbols.append((typeset("D"), "the sizes of all products of different channels, added up"))
    over_all = Html(over.replace("<i>y</i>", "<i>y</i><sub><i>i</i></sub>"))
    step = join(typeset("y_i ← "), act, typeset("(W_i h_i + U_i x_i + b_i)"))
    return Formula(over_all, tuple(terms), step, tuple(symbols), before=_sum(len(problem.branch_list())))


@formula.register
def _(problem: POptEq) -> Formula:
    (first, _scale), *others = problem.parts()
    note = f"Every one of the {1 + len(others)} branches solves this problem by itself, with its own weights and scale."
    return replace(formula(first), before=_sum(1 + len(others)), remark=note)


@formula.register
def _(problem: Parallel) -> Formula:
    parts = [part for part, _scale in problem.parts()]
    note = f"Every one of the {len(parts)} branches solves this problem by itself, with its own weights and scale."
    return replace(formula(parts[0]), before=_sum(len(parts)), remark=note)


@formula.register
def _(problem: DeepOptEq) -> Formula:
    count, (_, _, act) = len(problem.layers), _penalty(problem.penalty)
    step = join(
        typeset("z ← (1 − α)z + αW'"), act, typeset("(Wz + Ux + b)"), f", {count} times with weights of their own"
    )
    if problem.regularizer is not None:
        prior = typeset(f"z ← z − {_short(problem.gamma)} ∇R(z)")
        note = (
            f"R is a {type(problem.regularizer).__name__} prior, whose step comes before those of the layers. With it "
            "the layers have no objective in common that could be shown here."
        )
        return Formula(typeset("z"), (), join(prior, ", then ", step), remark=note)
    if count > 2:
        note = (
            f"{count} layers in a row: every layer minimises something, but together they minimise nothing in general."
        )
        return Formula(typeset("z"), (), step, remark=note)
    body = typeset("αM_1(z_1) + αM_2(z_0) + ½‖z_1 − z_0‖^2") if count == 2 else typeset("αM(z)")
    note = "M is the Moreau envelope of a layer's own objective (Corollary 1 of OptEq)."
    return Formula(typeset("z"), (Term("objective", "", body, "the joint objective"),), step, remark=note)


@formula.register
def _(problem: AffineOptEq) -> Formula:
    return replace(formula(problem.problem), remark="The features are seen through an invertible affine map.")


@formula.register
def _(problem: Splitting) -> Formula:
    inner = formula(problem.problem)
    name = type(problem.regularizer).__name__
    prior = Term("regularizer", "+", typeset(f"{_short(problem.gamma)} R(z)"), f"{name} prior")
    return replace(
        inner, terms=(*inner.terms, prior), step=typeset("u ← u + T(2p − u) − p"), remark="p = prox of R at u."
    )


def _short(value: float) -> str:
    return f"{value:.3g}"


def _quadratic() -> Term:
    return Term("quadratic", "+", typeset("½‖y‖^2"), "the state should be small")


def _small() -> Term:
    return Term("quadratic", "+", typeset("½m‖y‖^2"), "the state should be small")


def _inhibition(several: bool) -> Term:
    whom = "units of all branches" if several else "units"
    return Term("inhibition", "+", typeset("½‖A'y‖^2"), f"{whom} should not say the same twice")


def _sum(count: int) -> Html:
    return join(typeset("Σ"), tag("sub", tag("i", "i"), f" ≤ {count}"))


def _penalty(penalty: Penalty | None) -> tuple[Html, tuple[Term, ...], Html]:
    """The constraint of the state, the penalty's term, and the activation's name."""
    if isinstance(penalty, ReLU):
        return typeset("y ≥ 0"), (), join("relu")
    if isinstance(penalty, HardTanh):
        return typeset("|y| ≤ 1"), (), join("hardtanh")
    if isinstance(penalty, Identity):
        return typeset("y"), (), Html("")
    if isinstance(penalty, SoftThreshold):
        return (
            typeset("y"),
            (Term("penalty", "", typeset(f"{_short(penalty.threshold)}‖y‖_1"), "few units"),),
            join("shrink"),
        )
    name = "σ" if penalty is None else getattr(penalty, "name", "σ")
    return typeset("y"), (Term("penalty", "", typeset("Σf(y)"), f"the penalty whose prox is {name}"),), join(name)

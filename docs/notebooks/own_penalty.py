# %% [markdown]
# # A penalty of your own
#
# The penalty of a hidden problem is its activation: `sigma = prox of f`. Any non-decreasing function is the prox of
# some penalty, so a network can use any of them, and still has an objective. The example is `asinh`.

# %%
import torch
from matplotlib import pyplot

import opteq

asinh = opteq.penalties.FromActivation(
    torch.asinh, lipschitz=1.0, name="asinh", value=lambda y: y.cosh() - y.square() / 2
)
relu, shrink = opteq.penalties.ReLU(), opteq.penalties.SoftThreshold(0.5)

# %% [markdown]
# The activations are on the left, their penalties on the right. ReLU forbids negative values. Soft thresholding
# penalises the distance from zero. `asinh` penalises large values, and hardly those close to zero.

# %%
figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
a = torch.linspace(-3, 3, 301)
for penalty, name in ((relu, "relu"), (shrink, "soft threshold"), (asinh, "asinh")):
    left.plot(a, penalty.prox(a), label=name)
    right.plot(a, penalty.value(a), label=name)
left.set(title="activation", xlabel="pre-activation")
right.set(title="penalty", xlabel="value of the state", ylim=(-0.2, 4))
legend = left.legend(frameon=False)

# %% [markdown]
# The same OptEq with each of them. The equilibrium is a minimiser of the objective with that penalty: no other state
# that is tried does better.

# %%
W = opteq.operators.Dense(6, 12, bound=0.9)
U = torch.nn.Linear(4, 12)
x = torch.randn(3, 4)
for penalty in (relu, shrink, asinh):
    problem = opteq.OptEq(W, U, activation=penalty)
    solution = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6)).solve(x)
    hidden = problem(x)
    with torch.no_grad():
        least = hidden.objective(solution.state)
        nearby = [hidden.objective(penalty.prox(solution.state + 0.1 * torch.randn(3, 12))) for _ in range(50)]
    assert all((least <= other + 1e-6).all() for other in nearby)
    zeros = (solution.state == 0).float().mean()
    rate = problem.certificate().contraction
    print(f"{penalty.name:>15}: {zeros:.0%} of the state is exactly 0, contraction {rate:.2f}")

# %% [markdown]
# A function that decreases somewhere is not the prox of a penalty. The error says where it decreases.

# %%
try:
    opteq.penalties.FromActivation(torch.sin, lipschitz=1.0, name="sin")
except ValueError as error:
    print(error)

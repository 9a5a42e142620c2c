# %% [markdown]
# # Certificates
#
# Is there an equilibrium, is it the only one, and how far does it move with the input? If the weights are small enough,
# they answer this alone. Otherwise a certificate at the computed equilibrium does.

# %%
import torch
from matplotlib import pyplot

import opteq
from opteq.analysis import local_certificate

U = torch.nn.Linear(4, 24)
W = opteq.operators.Dense(12, 24, bound=0.9)
problem = opteq.OptEq(W, U)
print(problem.certificate())

# %% [markdown]
# The Lipschitz constant holds for every pair of inputs. The largest ratio of a thousand pairs stays below it.

# %%
layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6, max_steps=200))
with torch.no_grad():
    x = torch.randn(1000, 4)
    step = 0.1 * torch.randn(1000, 4)
    ratios = (layer(x + step) - layer(x)).norm(dim=1) / step.norm(dim=1)
    norm = torch.linalg.matrix_norm(U.weight, 2)
figure, panel = pyplot.subplots(figsize=(6, 2.6), layout="constrained")
panel.hist(ratios, bins=40)
panel.axvline(problem.certificate().lipschitz, color="black", linestyle=":")
panel.set(xlabel="change of the features over change of the input; dotted: the certificate", yticks=[])
assert ratios.max() <= problem.certificate().lipschitz

# %% [markdown]
# Beyond the bound the weights prove nothing. A certificate at the point checks the curvature of the objective where
# the solver ended, per sample: whether it is a strict minimum, how fast plain steps approach it, and within which
# radius of the input the equilibrium is an affine function of it.

# %%
loose = opteq.Equilibrium(
    opteq.OptEq(opteq.operators.Dense(12, 24, bound=1.15), U), opteq.Anderson(tol=1e-6, max_steps=300)
)
print(loose.problem.certificate())
found = local_certificate(loose, x[:5])
print("strict minimum ", found.strict_minimum.tolist())
print("rate           ", [round(float(rate), 2) for rate in found.contraction])
print("radius         ", [f"{float(radius):.1e}" for radius in found.radius])
print("probability    ", found.probability)

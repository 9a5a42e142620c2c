# %% [markdown]
# # A denoiser in ten lines
#
# The image y should be close to the noisy image x, and neighbouring pixels should be alike except at edges. That is
# the whole model: a data term, and a Huber potential of the differences of neighbours.

# %%
import torch
from matplotlib import pyplot

import opteq


class Denoiser(opteq.Objective):
    def __init__(self):
        super().__init__()
        self.strength = torch.nn.Parameter(torch.tensor(1.0))
        self.edges = opteq.potentials.Huber(scale=0.02)

    def terms(self, y, x):  # one number per sample each
        rough = self.edges(y.diff(dim=-1)).flatten(1).sum(1) + self.edges(y.diff(dim=-2)).flatten(1).sum(1)
        return {"data": 0.5 * (y - x).square().flatten(1).sum(1), "prior": self.strength * rough}


layer = opteq.Equilibrium(Denoiser())

# %% [markdown]
# An image of flat regions with noise, and the minimiser for the initial strength.

# %%
down, across = torch.meshgrid(torch.linspace(-1, 1, 48), torch.linspace(-1, 1, 48), indexing="ij")
clean = 0.2 + 0.6 * (down**2 + across**2 < 0.5) - 0.3 * ((down.abs() < 0.25) & (across.abs() < 0.25))
clean = clean[None, None]
noisy = clean + 0.1 * torch.randn(clean.shape)


def psnr(image):
    return float(-10 * (image - clean).square().mean().log10())


with torch.no_grad():
    guessed = layer(noisy)
print(f"PSNR {psnr(noisy):.1f} dB before, {psnr(guessed):.1f} dB after")

# %% [markdown]
# The strength is a parameter. Its gradient comes from the implicit function theorem, at a cost that does not grow with
# the number of solver steps; eight steps of Adam find a better one.

# %%
optimizer = torch.optim.Adam(layer.parameters(), lr=0.5)
for _ in range(8):
    optimizer.zero_grad()
    (layer(noisy) - clean).square().mean().backward()
    optimizer.step()
solution = layer.solve(noisy, trace_objective=True)
print(f"strength {layer.problem.strength.item():.3f}: PSNR {psnr(solution.features.detach()):.1f} dB")
print(solution)

# %%
figure, panels = pyplot.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
for panel, image, title in zip(panels, (noisy, solution.features.detach(), clean), ("noisy", "minimiser", "clean")):
    panel.imshow(image[0, 0].numpy(), cmap="gray", vmin=0, vmax=1)
    panel.set(title=title, xticks=[], yticks=[])

# %% [markdown]
# Why does it look like that? Every term has its value, and falls or rises step by step.

# %%
print({name: round(value.item(), 3) for name, value in layer.problem(noisy).terms(solution.state).items()})
opteq.plot.convergence(solution)
print(layer.problem.certificate())

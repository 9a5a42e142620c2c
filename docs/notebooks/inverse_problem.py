# %% [markdown]
# # An inverse problem
#
# A camera does not show the image y, but a measurement x = A y with noise. The layer below finds y for any linear A
# that you give it: what was measured should agree, and neighbouring pixels should be alike except at edges.

# %%
import torch
from matplotlib import pyplot

import opteq
from opteq import operators as op


class Restoration(opteq.Objective):
    def __init__(self, A):
        super().__init__()
        self.A = A
        self.strength = torch.nn.Parameter(torch.tensor(-6.0))  # its logarithm
        self.edges = opteq.potentials.Huber(scale=0.02)

    def start(self, x):
        return self.A.adjoint(x)  # of the shape that A takes

    def terms(self, y, x):  # one number per sample each
        rough = self.edges(y.diff(dim=-1)).flatten(1).sum(1) + self.edges(y.diff(dim=-2)).flatten(1).sum(1)
        return {
            "data": 0.5 * (self.A(y) - x).square().flatten(1).sum(1),
            "edges": self.strength.exp() * rough,
            "size": 0.005 * y.square().flatten(1).sum(1),
        }


# %% [markdown]
# Two cameras look at images of rectangles: one is out of focus, the other has a quarter of the pixels.

# %%
torch.manual_seed(0)
down, across = torch.meshgrid(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24), indexing="ij")


def rectangles(count):
    images = torch.full((count, 1, 24, 24), 0.2)
    for image in images[:, 0]:
        for _ in range(4):
            (top, left), (height, width) = 1.6 * torch.rand(2) - 0.8, 0.15 + 0.5 * torch.rand(2)
            image[((down - top).abs() < height) & ((across - left).abs() < width)] = torch.rand(())
    return images


def psnr(images, clean):
    return float(-10 * (images - clean).square().mean(dim=(1, 2, 3)).log10().mean())


cameras = {"out of focus": op.Blur(1.0), "few pixels": op.Downsample(2)}
clean, unseen = rectangles(3), rectangles(1)
measured = {name: A(clean) + 0.01 * torch.randn(A(clean).shape) for name, A in cameras.items()}

# %% [markdown]
# The strength of the prior is learned for each camera, through the minimiser.

# %%
layers = {name: opteq.Equilibrium(Restoration(A)) for name, A in cameras.items()}
for name, layer in layers.items():
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.5)
    scores = []
    for _ in range(4):
        optimizer.zero_grad()
        restored = layer(measured[name])
        (restored - clean).square().mean().backward()
        optimizer.step()
        scores.append(psnr(restored.detach(), clean))
    print(f"{name}: PSNR {scores[0]:.1f} dB at first, {max(scores):.1f} dB at best")

# %%
figure, panels = pyplot.subplots(2, 3, figsize=(8, 5.2), layout="constrained")
for row, (name, layer) in zip(panels, layers.items(), strict=True):
    A = layer.problem.A
    with torch.no_grad():
        x = A(unseen)
        x += 0.01 * torch.randn(x.shape)
        restored = layer(x)
    for panel, image, title in zip(row, (x, restored, unseen), (name, "restored", "true"), strict=True):
        panel.imshow(image[0, 0].numpy(), cmap="gray", vmin=0, vmax=1)
        panel.set(title=title, xticks=[], yticks=[])

# %% [markdown]
# The certificate follows from the terms: there is one minimiser for every measurement, and noise moves it by at most so
# many times its own size.

# %%
layer, x = layers["out of focus"], measured["out of focus"]
certificate = layer.problem.certificate()
print(certificate)
noise = 0.01 * torch.randn(x.shape)
with torch.no_grad():
    moved = layer(x + noise) - layer(x)
print(f"at most {certificate.lipschitz:.0f} times; here {float(moved.norm() / noise.norm()):.2f} times")

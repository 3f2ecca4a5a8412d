"""Train a label-free derived block on a toy task: each token must name the class of the token before it.

A causal self-attention block in the own role, its step learned, looks back; a linear block with a learned oracle
decides; the same θ reads the classes off the final features. Labels enter the training loss and nothing else: at
inference the stack sees tokens only. With shuffled labels it must stay at chance, which is shown beside it.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import xentflow as xf

torch.set_num_threads(1)  # tensors here are small: a second thread costs more than it brings

CLASSES, WIDTH, TOKENS = 8, 32, 16


class PreviousToken(nn.Module):
    """Embedding, derived self-attention, derived decision, read-out through the decision's θ."""

    def __init__(self, generator):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(CLASSES, WIDTH, generator=generator))
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH, generator=generator))
        theta = torch.randn(2, WIDTH, WIDTH, generator=generator) / WIDTH
        self.attend = xf.derive(
            xf.CrossEntropy("classes"),
            xf.Quadratic(theta, roles="own"),
            oracle=xf.Uniform(),
            causal=True,
            step=xf.LearnedStep(1.0),
            target_model=xf.Quadratic(0.1 * theta, roles="own"),
        )
        self.decide = xf.derive(
            xf.CrossEntropy("classes"),
            xf.Linear(torch.randn(CLASSES, WIDTH, generator=generator) / WIDTH**0.5),
            oracle=xf.Learned(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, CLASSES))),
            step=xf.LearnedStep(1.0),
        )

    def forward(self, tokens):
        Z = self.embedding[tokens] + self.position
        return self.decide.model(self.decide(self.attend(Z)))


def accuracy_after_training(shuffled: bool, seed: int = 0, steps: int = 600) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = PreviousToken(generator)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def batch(size):
        tokens = torch.randint(CLASSES, (size, TOKENS), generator=generator)
        return tokens, tokens.roll(1, dims=-1)[:, 1:]

    for _ in range(steps):
        tokens, targets = batch(64)
        if shuffled:
            targets = targets.flatten()[torch.randperm(targets.numel(), generator=generator)].view_as(targets)
        loss = cross_entropy(model(tokens)[:, 1:].flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    tokens, targets = batch(1000)
    with torch.no_grad():
        return float((model(tokens)[:, 1:].argmax(-1) == targets).double().mean())


found, control = accuracy_after_training(shuffled=False), accuracy_after_training(shuffled=True)
print(f"accuracy on fresh sequences, no labels at inference:  {found:.3f}")
print(f"the same, trained on shuffled labels (chance {1 / CLASSES:.3f}):  {control:.3f}")
assert found > 0.9
assert abs(control - 1 / CLASSES) < 0.03

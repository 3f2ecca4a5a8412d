"""Depth: tied and untied stacks, read-outs, checkpointing, and initialisations that leave a deep stack trainable."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES, seeded
from instances import normal

S, F, K = 6, 4, 3


def linear_block(generator, axis="classes", **settings):
    return xf.derive(
        xf.CrossEntropy(axis), xf.Linear(normal((K, F), generator)), **{"oracle": xf.Uniform(), "step": 0.3, **settings}
    )


class TestDepth:
    @pytest.mark.parametrize("axis", AXES)
    def test_tied_is_the_block_again_and_again(self, axis, generator):
        block, Z = linear_block(generator, axis), normal((2, S, F), generator)
        stack, expected = xf.Stack.of(block, 5), Z
        for _ in range(5):
            expected = block(expected)
        assert torch.equal(stack(Z), expected)
        assert stack.depth == 5
        assert stack.blocks[0] is block
        assert len(list(stack.parameters())) == 1
        assert torch.equal(stack.trajectory(Z).passes, block.trajectory(Z, steps=5).passes)

    def test_untied_starts_equal_and_trains_apart(self, generator):
        block, Z = linear_block(generator), normal((2, S, F), generator)
        stack = xf.Stack.of(block, 3, tied=False)
        assert torch.equal(stack(Z), xf.Stack.of(copy.deepcopy(block), 3)(Z))
        assert len(list(stack.parameters())) == 3
        optimiser = torch.optim.SGD(stack.parameters(), lr=0.1)
        stack(Z).pow(4).sum().backward()
        optimiser.step()
        thetas = [layer.model.theta for layer in stack.blocks]
        assert not torch.equal(thetas[0], thetas[1])
        assert not torch.equal(thetas[1], thetas[2])

    def test_the_gradient_of_a_tied_one_is_the_sum_over_depth(self, generator):
        block, Z = linear_block(generator), normal((2, S, F), generator)
        untied = xf.Stack.of(copy.deepcopy(block), 4, tied=False)
        tied = xf.Stack.of(block, 4)
        for stack in (tied, untied):
            stack(Z).pow(3).sum().backward()
        assert_close(block.model.theta.grad, sum(layer.model.theta.grad for layer in untied.blocks))

    def test_blocks_of_other_kinds(self, generator):
        one, other = linear_block(generator), linear_block(generator, "sequence", splitting=xf.Strang())
        stack, Z = xf.Stack([one, other], repeats=2), normal((2, S, F), generator)
        assert stack.depth == 4
        assert torch.equal(stack(Z), other(one(other(one(Z)))))
        assert stack.trajectory(Z).stages == [
            "start", *["attention", "target", "target", "attention", "target"] * 2
        ]  # fmt: skip

    def test_times_and_energies_run_on(self, generator):
        stack, Z = xf.Stack.of(linear_block(generator), 4, tied=False), normal((2, S, F), generator)
        path = stack.trajectory(Z)
        assert_close(path.times[-1], torch.full((2,), 1.2, dtype=torch.float64))
        assert torch.equal(path.passes[-1], stack(Z))
        for layer, start, end in zip(stack.blocks, path.passes[:-1], path.passes[1:], strict=True):
            index = next(i for i, point in enumerate(path.Z) if torch.equal(point, end))
            assert torch.equal(path.energy[index], layer.flow(start).energy(end))

    def test_inputs_reach_every_block(self, generator):
        block, Z = linear_block(generator, oracle=xf.Given()), normal((2, S, F), generator)
        C = torch.softmax(normal((2, S, K), generator), -1)
        padding = torch.tensor([[True] * S, [True] * 4 + [False] * 2])
        stack = xf.Stack.of(block, 3)
        expected = Z
        for _ in range(3):
            expected = block(expected, targets=C, padding=padding)
        assert torch.equal(stack(Z, targets=C, padding=padding), expected)
        bilinear = xf.derive(
            xf.CrossEntropy("classes"), xf.Bilinear(normal((F, 2), generator)), oracle=xf.Uniform(), step=0.3
        )
        Y = normal((2, 4, 2), generator)
        assert torch.equal(xf.Stack.of(bilinear, 2)(Z, context=Y), bilinear(bilinear(Z, context=Y), context=Y))

    def test_a_read_out_is_any_module(self, generator):
        block, Z = linear_block(generator), normal((2, S, F), generator)
        stack = xf.Stack.of(block, 3, readout=block.model)
        assert torch.equal(stack(Z), xf.Stack.of(block, 3)(Z) @ block.model.theta.mT)
        assert len(list(stack.parameters())) == 1  # the same θ

    def test_says_whether_labels_enter(self, generator):
        given, own = linear_block(generator, oracle=xf.Given()), linear_block(generator)
        assert not xf.Stack([own, own]).uses_labels
        assert xf.Stack([own, given]).uses_labels

    def test_shows_its_depth(self, generator):
        block = linear_block(generator)
        assert "depth=5, tied, repeats=5" in repr(xf.Stack.of(block, 5))
        assert "depth=2, untied" in repr(xf.Stack.of(block, 2, tied=False))


@pytest.mark.parametrize("tied", [True, False])
def test_checkpointing_changes_memory_alone(tied, generator):
    Z = normal((2, S, F), generator)
    block = xf.derive(
        xf.CrossEntropy("classes"),
        xf.Quadratic(normal((2, F, F), generator, 0.3)),
        oracle=xf.SelfPrediction(0.5),
        splitting=xf.Strang(),
        step=0.2,
    )
    plain = xf.Stack.of(block, 4, tied=tied)
    twin = copy.deepcopy(plain)
    saving = xf.Stack(list(twin.blocks), repeats=plain.repeats, checkpointing=True)
    inputs = {"padding": torch.tensor([[True] * S, [True] * 4 + [False] * 2])}
    starts = [Z.clone().requires_grad_() for _ in range(2)]
    outputs = [stack(start, **inputs) for stack, start in zip((plain, saving), starts, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(starts[0].grad, starts[1].grad)
    for mine, its in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def models(generator):
    H = 2
    return {
        "linear": xf.Linear(normal((64, 32), generator)),
        "linear-heads": xf.Linear(normal((H, 64, 32), generator), normal((H, 64), generator)),
        "bilinear": xf.Bilinear(normal((32, 16), generator)),
        "quadratic": xf.Quadratic(normal((32, 32), generator)),
        "quadratic-heads": xf.Quadratic(normal((4, 32, 32), generator)),
        "factor": xf.Quadratic.from_factor(normal((32, 8), generator)),
        "factor-heads": xf.Quadratic.from_factor(normal((4, 32, 8), generator), roles="own"),
    }


@pytest.mark.parametrize("kind", models(seeded(0)))
class TestInitialise:
    def test_depth_times_step_times_curvature_is_about_one(self, kind, generator):
        for depth, step, potential in (
            (24, 1.0, xf.LogSumExp("classes")),
            (6, 0.5, xf.Softplus("classes")),
            (1, 1.0, xf.HalfSquare("sequence")),
        ):
            model = models(generator)[kind]
            block = xf.derive(xf.Objective(potential), model, oracle=xf.Uniform(), step=step)
            stack = xf.Stack.of(block, depth, tied=False)
            xf.initialise_(stack, generator)
            for layer in stack.blocks:
                weight = next(p for name, p in layer.model.named_parameters() if name in ("theta", "phi")).detach()
                c = potential.curvature
                if kind.startswith("linear"):
                    L = float(c * torch.linalg.matrix_norm(weight.flatten(0, -2), 2) ** 2)
                elif kind == "bilinear":
                    L = float(c * torch.linalg.matrix_norm(weight, 2) ** 2)
                else:
                    matrices = (weight @ weight.mT if "factor" in kind else weight).reshape(-1, 32, 32)
                    norms = torch.linalg.matrix_norm(matrices, 2)
                    L = float((2 * norms + c * 32 * norms**2).sum())
                assert 0.3 <= depth * step * L <= 2.0, (kind, depth, L)
            biases = [p for name, p in stack.named_parameters() if name.endswith("bias")]
            assert all((bias == 0).all() for bias in biases)

    def test_is_repeatable_and_untied_layers_differ(self, kind, generator):
        block = xf.derive(xf.CrossEntropy("classes"), models(generator)[kind], oracle=xf.Uniform())
        first, second = (xf.Stack.of(copy.deepcopy(block), 3, tied=False) for _ in range(2))
        xf.initialise_(first, seeded(5))
        xf.initialise_(second, seeded(5))
        weights = [[p.detach() for name, p in s.named_parameters() if "bias" not in name] for s in (first, second)]
        assert all(torch.equal(mine, its) for mine, its in zip(*weights, strict=True))
        assert not torch.equal(weights[0][0], weights[0][1])
        assert next(first.parameters()).dtype == torch.float64

    def test_gradients_reach_the_first_of_24(self, kind, generator):
        """They neither vanish nor explode: the first and last block's are of one size."""
        block = xf.derive(xf.CrossEntropy("classes"), models(generator)[kind], oracle=xf.SelfPrediction(0.5))
        stack = xf.Stack.of(block, 24, tied=False)
        xf.initialise_(stack, generator)
        Z = normal((4, 32, 32), generator)
        inputs = {"context": normal((4, 10, 16), generator) / 16**0.5} if kind == "bilinear" else {}
        starting = Z.clone().requires_grad_()
        (stack(starting, **inputs) * normal(Z.shape, generator)).sum().backward()
        gain = float(starting.grad.norm()) / Z.numel() ** 0.5
        assert 0.2 < gain < 5
        norms = [
            float(next(p for name, p in layer.model.named_parameters() if name != "bias").grad.norm())
            for layer in stack.blocks
        ]
        assert max(norms) < 20 * min(norms)


def test_initialising_a_tied_stack_counts_every_pass(generator):
    block = linear_block(generator)
    xf.initialise_(xf.Stack.of(block, 100), seeded(1))
    deep = block.model.theta.norm()
    xf.initialise_(block, seeded(1))
    assert_close(block.model.theta.norm() / deep, torch.tensor(10.0, dtype=torch.float64))


class Copier(nn.Module):
    """Embedding, a deep causal stack, a read-out of the previous token's name."""

    def __init__(self, stack, symbols, length, width):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(symbols, width), nn.Parameter(torch.zeros(length, width))
        self.stack, self.readout = stack, nn.Linear(width, symbols)

    def forward(self, tokens):
        return self.readout(self.stack(self.embedding(tokens) + self.positions))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_stack_24_deep_trains(seed):
    """Naming the previous token, which no token knows of itself: it takes attention, through all of the depth."""
    generator, symbols, length, width = seeded(seed), 4, 8, 16
    block = xf.derive(
        xf.CrossEntropy("classes"),
        xf.Quadratic.from_factor(torch.zeros(2, width, 8), roles="own"),
        target_model=xf.Quadratic.from_factor(torch.zeros(2, width, 8), roles="own"),
        oracle=xf.Shift(-1),
        causal=True,
    )
    stack = xf.Stack.of(block, 24, tied=False)
    xf.initialise_(stack, generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Copier(stack, symbols, length, width)
    optimiser = torch.optim.Adam(net.parameters(), lr=6e-3)
    losses = []
    for _ in range(40):
        tokens = torch.randint(symbols, (32, length), generator=generator)
        logits = net(tokens)[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-1].flatten())
        optimiser.zero_grad()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in net.parameters() if parameter.grad is not None)
        optimiser.step()
        losses.append(loss.item())
    assert max(losses) < 1.5 * losses[0]
    assert sum(losses[-5:]) / 5 < 0.2 * losses[0], losses[::10]

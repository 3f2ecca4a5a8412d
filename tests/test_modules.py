"""A module among modules: saving, copying, casting, compiling, transforming and checkpointing a derived block."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.testing import assert_close

import xentflow as xf
from flow_instances import AXES
from instances import normal, relative_error
from xentflow.configuration import block_config, block_from_config

S, F, K, H = 5, 4, 3, 2


def blocks(generator):
    """One block of each kind with what its call takes beside Z, in float64."""

    def theta(*shape):
        return normal(shape, generator, 0.4)

    loss, rows = xf.CrossEntropy("sequence"), xf.CrossEntropy("classes")
    C = torch.softmax(normal((2, S, K), generator), -1)
    return {
        "linear": (xf.derive(rows, xf.Linear(theta(K, F), theta(K)), step=0.5), {"targets": C}),
        "separate": (
            xf.derive(rows, xf.Linear(theta(H, K, F)), target_model=xf.Linear(theta(H, K, F)), oracle=xf.Uniform()),
            {},
        ),
        "quadratic": (
            xf.derive(loss, xf.Quadratic(theta(H, F, F)), oracle=xf.Band(), splitting=xf.Strang(), step=0.3),
            {"padding": torch.tensor([[True] * S, [True] * (S - 2) + [False] * 2])},
        ),
        "causal": (
            xf.derive(
                rows,
                xf.Quadratic.from_factor(theta(H, F, 2), roles="own"),
                oracle=xf.LearnedTargets(S).double(),
                causal=True,
                step=xf.LearnedStep(0.2, heads=H),
                constraint=xf.Sphere(1.0),
            ).double(),
            {},
        ),
        "bilinear": (
            xf.derive(rows, xf.Bilinear(theta(F, 3)), oracle=xf.SelfPrediction(0.5), splitting=xf.RK4(), step=0.4),
            {"context": normal((2, K, 3), generator)},
        ),
        "functional": (
            xf.derive(
                rows,
                xf.Functional(nn.Sequential(nn.Linear(F, 6), nn.Tanh(), nn.Linear(6, K)).double()),
                oracle=xf.Learned(nn.Linear(F, K).double()),
                step=xf.LearnedStep(0.2, features=F),
            ).double(),
            {},
        ),
        "whitened": (
            xf.derive(xf.Objective(xf.Entmax("classes")), xf.Linear(theta(K, F)), oracle=xf.Uniform(), step=0.3,
                      constraint=xf.Whitened()),
            {},
        ),
        "certified": (xf.derive(rows, xf.Linear(theta(K, F)), oracle=xf.Uniform(), step=xf.CertifiedStep()), {}),
        "searched": (xf.derive(rows, xf.Quadratic(theta(F, F)), oracle=xf.Uniform(), step=xf.LineSearch()), {}),
        "dual": (
            xf.derive(
                rows,
                xf.Linear(theta(H, K, F)),
                oracle=xf.SelfPrediction(0.5),
                step=xf.LearnedStep(0.3, heads=H),
                constraint=xf.Dual(F**0.5),
            ).double(),
            {},
        ),
    }  # fmt: skip


NAMES = tuple(blocks(torch.Generator().manual_seed(0)))
CONFIGURABLE = tuple(name for name in NAMES if name != "functional")


@pytest.fixture
def case(request, generator):
    block, inputs = blocks(generator)[request.param]
    return block, normal((2, S, F), generator), inputs


every = pytest.mark.parametrize("case", NAMES, indirect=True)


@every
def test_copies_are_equal_and_apart(case):
    block, Z, inputs = case
    twin = copy.deepcopy(block)
    assert torch.equal(twin(Z, **inputs), block(Z, **inputs))
    mine, its = (dict(module.named_parameters()) for module in (block, twin))
    assert mine.keys() == its.keys()
    assert all(mine[name] is not its[name] for name in mine)
    before = block(Z, **inputs)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    assert torch.equal(block(Z, **inputs), before)
    assert not torch.equal(twin(Z, **inputs), before)


@every
def test_state_goes_round_through_safetensors(case, tmp_path):
    block, Z, inputs = case
    twin = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    save_file(block.state_dict(), tmp_path / "block.safetensors")
    missing, unexpected = twin.load_state_dict(load_file(tmp_path / "block.safetensors"))
    assert (missing, unexpected) == ([], [])
    assert torch.equal(twin(Z, **inputs), block(Z, **inputs))


@pytest.mark.parametrize("case", CONFIGURABLE, indirect=True)
def test_config_and_state_rebuild_it(case):
    block, Z, inputs = case
    twin = block_from_config(block_config(block)).double()
    twin.load_state_dict(block.state_dict())
    assert torch.equal(twin(Z, **inputs), block(Z, **inputs))
    assert repr(twin) == repr(block)


@every
def test_dtypes(case):
    block, Z, inputs = case
    in_double = block(Z, **inputs)
    block.float()
    single = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    in_single = block(Z.float(), **single)
    assert in_single.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in block.parameters())
    assert relative_error(in_single.double(), in_double) <= 1e-5
    assert relative_error(block.double()(Z, **inputs), in_double) <= 1e-6
    block.to(torch.bfloat16)
    half = {name: value.bfloat16() if value.is_floating_point() else value for name, value in inputs.items()}
    in_half = block(Z.bfloat16(), **half)
    assert in_half.dtype == torch.bfloat16
    assert in_half.isfinite().all()


@pytest.mark.parametrize("case", [name for name in NAMES if name not in ("searched", "functional")], indirect=True)
def test_meta_device_tells_the_shape(case):
    block, Z, inputs = case
    abstract = block.to("meta")
    given = {name: value.to("meta") for name, value in inputs.items()}
    out = abstract(Z.to("meta"), **given)
    assert out.device.type == "meta"
    assert out.shape == Z.shape


@every
def test_autocast_keeps_the_features_precision(case):
    """Products run in half precision, features stay: the answer is near, and gradients flow."""
    block, Z, inputs = case
    block.float()
    single = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    exact = block(Z.float(), **single)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(Z.float(), **single)
    assert out.dtype == torch.float32
    assert relative_error(out, exact) <= 0.02
    out.square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in block.parameters())


@every
def test_gradcheck(case):
    block, Z, inputs = case
    names = [name for name, _ in block.named_parameters()]
    if isinstance(block.step, xf.LineSearch | xf.CertifiedStep):
        names = []  # their h is looked up without a graph: the derivative at fixed h is not that of the whole
        block.step = 0.3
        names = [name for name, _ in block.named_parameters()]

    def of(Z, *values):
        return functional_call(block, dict(zip(names, values, strict=True)), (Z,), inputs)

    values = [parameter.detach().requires_grad_() for parameter in block.parameters()]
    assert torch.autograd.gradcheck(of, (Z.requires_grad_(), *values))


@pytest.mark.parametrize("name", ["linear", "separate", "causal", "whitened", "functional"])
def test_torch_func(name, generator):
    block, inputs = blocks(generator)[name]
    Z = normal((2, S, F), generator)
    state = dict(block.named_parameters())

    def of(state, Z, inputs):
        return functional_call(block, state, (Z,), inputs)

    assert torch.equal(of(state, Z, inputs), block(Z, **inputs))
    by_sample = vmap(of, in_dims=(None, 0, 0))(state, Z, inputs) if inputs else vmap(lambda Z: block(Z))(Z)
    assert_close(by_sample, block(Z, **inputs), rtol=1e-12, atol=1e-12)
    leaves = {key: value.detach() for key, value in state.items()}
    jacobians = jacrev(lambda state: of(state, Z, inputs).square().sum())(leaves)
    block(Z, **inputs).square().sum().backward()
    for key, parameter in block.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(jacobians[key], grad, rtol=1e-10, atol=1e-12)
    one = {key: value[0] for key, value in inputs.items()}
    J = jacrev(lambda Z: block(Z, **one))(Z[0])
    expected = torch.autograd.functional.jacobian(lambda Z: block(Z, **one), Z[0])
    assert_close(J, expected, rtol=1e-10, atol=1e-12)


def test_many_parameter_sets_at_once(generator):
    """vmap over θ: an ensemble of blocks in one call."""
    block, Z = xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal((K, F), generator)), oracle=xf.Uniform()), None
    Z, thetas = normal((S, F), generator), normal((7, K, F), generator)
    found = vmap(lambda theta: functional_call(block, {"model.theta": theta}, (Z,)))(thetas)
    for theta, out in zip(thetas, found, strict=True):
        assert_close(out, Z - torch.softmax(Z @ theta.T, -1) @ theta + theta.mean(0), rtol=1e-12, atol=1e-12)


# The first use of inductor imports a part of torch that says so.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["linear", "quadratic", "causal", "bilinear"])
def test_compiles_to_one_graph(name, generator):
    block, inputs = blocks(generator)[name]
    Z = normal((2, S, F), generator)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="inductor" if name == "linear" else "aot_eager")
    assert relative_error(compiled(Z, **inputs), block(Z, **inputs)) <= 1e-6
    if name != "bilinear":
        mine, its = Z.clone().requires_grad_(), Z.clone().requires_grad_()
        block(mine, **inputs).square().sum().backward()
        compiled(its, **inputs).square().sum().backward()
        assert relative_error(its.grad, mine.grad) <= 1e-6
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["separate", "functional", "whitened", "certified"])
def test_has_no_graph_breaks(name, generator):
    """Traced whole by dynamo; what a backend makes of it is torch's own affair."""
    block, inputs = blocks(generator)[name]
    Z = normal((2, S, F), generator)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert relative_error(compiled(Z, **inputs), block(Z, **inputs)) <= 1e-12
    torch._dynamo.reset()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("potential", [xf.LogSumExp, xf.Softplus, xf.HalfSquare, xf.Entmax])
def test_every_potential_compiles(potential, exact, generator):
    block = xf.derive(
        xf.Objective(potential("classes")),
        xf.Linear(normal((H, K, F), generator)),
        oracle=xf.Uniform(),
        splitting=xf.Strang(exact=exact),
        step=0.2,
    )
    Z = normal((2, S, F), generator)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert relative_error(compiled(Z), block(Z)) <= 1e-12
    torch._dynamo.reset()


def test_a_stack_compiles(generator):
    block, inputs = blocks(generator)["causal"]
    stack, Z = xf.Stack.of(block, 3, tied=False), normal((2, S, F), generator)
    torch._dynamo.reset()
    compiled = torch.compile(stack, fullgraph=True, backend="eager")
    assert relative_error(compiled(Z, **inputs), stack(Z, **inputs)) <= 1e-12
    torch._dynamo.reset()


@every
def test_shows_its_parts(case):
    block, _, _ = case
    shown = repr(block)
    for part in (repr(block.objective), repr(block.splitting), repr(block.constraint), type(block.model).__name__):
        assert part in shown
    assert type(block.oracle).__name__ in shown
    assert (", step=" in shown.replace("\n ", " ").replace("  ", " ")) == (not isinstance(block.step, nn.Module))
    assert ("causal" in shown) == block.causal


@pytest.mark.parametrize("axis", AXES)
class TestParameters:
    def test_tensors_are_copied_and_parameters_shared(self, axis, generator):
        theta = normal((K, F), generator)
        copied = xf.derive(xf.CrossEntropy(axis), xf.Linear(theta), oracle=xf.Uniform())
        assert copied.model.theta.requires_grad
        before = theta.clone()
        with torch.no_grad():
            copied.model.theta.zero_()
        assert torch.equal(theta, before)

        parameter = nn.Parameter(theta)
        first, second = (xf.derive(xf.CrossEntropy(axis), xf.Linear(parameter), oracle=xf.Uniform()) for _ in range(2))
        assert first.model.theta is parameter
        assert second.model.theta is parameter

    def test_the_model_handed_over_stays_as_it_was(self, axis, generator):
        model = xf.Linear(normal((K, F), generator), normal((K,), generator))
        xf.derive(xf.CrossEntropy(axis), model, oracle=xf.Uniform())
        assert list(model.parameters()) == []
        assert set(dict(model.named_buffers())) == {"theta", "bias"}

    def test_train_and_eval_are_the_same_block(self, axis, generator):
        block = xf.derive(xf.CrossEntropy(axis), xf.Linear(normal((K, F), generator)), oracle=xf.Uniform())
        Z = normal((2, S, F), generator)
        assert torch.equal(block.train()(Z), block.eval()(Z))

    def test_one_theta_trains_through_both_half_steps(self, axis, generator):
        """Shared, θ gets the sum of the gradients that two separate ones get."""
        theta, Z = normal((K, F), generator), normal((2, S, F), generator)
        C = torch.softmax(normal((2, S, K), generator), -1 if axis == "classes" else -2)
        shared = xf.derive(xf.CrossEntropy(axis), xf.Linear(theta), step=0.3)
        apart = xf.derive(xf.CrossEntropy(axis), xf.Linear(theta), target_model=xf.Linear(theta), step=0.3)
        for block in (shared, apart):
            block(Z, targets=C).pow(3).sum().backward()
        assert_close(shared.model.theta.grad, apart.model.theta.grad + apart.target_model.theta.grad)


def test_a_memory_goes_with_the_state(generator):
    """A block whose oracle remembers, rebuilt elsewhere from its configuration and state."""
    oracle = xf.NearestNeighbours(2).remember(normal((9, F), generator), torch.eye(K).double().repeat(3, 1))
    block = xf.derive(xf.CrossEntropy("classes"), xf.Linear(normal((K, F), generator)), oracle=oracle)
    twin = block_from_config(block_config(block)).double()
    twin.load_state_dict(block.state_dict())
    Z = normal((2, S, F), generator)
    assert torch.equal(twin(Z), block(Z))


def test_a_memory_loaded_over_another_is_the_one_looked_in(generator):
    """The index of the old memory, built at its first use, is forgotten; sizes need not agree."""

    def remembering(tokens):
        labels = torch.randint(K, (tokens,), generator=generator)
        oracle = xf.NearestNeighbours(1).remember(normal((tokens, F), generator), torch.eye(K).double()[labels])
        return xf.derive(xf.CrossEntropy("classes"), xf.Linear(torch.ones(K, F).double()), oracle=oracle)

    Z = normal((4, S, F), generator)
    for tokens in (300, 80):
        first, second = remembering(300), remembering(tokens)
        first(Z)
        first.load_state_dict(second.state_dict())
        C = [block.oracle(Z, block.model.logits(Z), "classes") for block in (first, second)]
        assert torch.equal(*C)
        assert first.oracle.memory is not second.oracle.memory

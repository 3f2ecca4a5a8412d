import pytest
import torch
from torch.testing import assert_close

import xentflow as xf
from xentflow.experiments.passes import largest_gap, measure, one_thread, step_size, through_block, through_logits

AXES = ("classes", "sequence")


def parts(generator, S=40, F=12, K=4):
    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(K, (S,), generator=generator)
    return normal(S, F), xf.Linear(normal(K, F), normal(K)), labels


@pytest.mark.parametrize("step", [1.0, 0.3, xf.CertifiedStep()], ids=["1", "0.3", "certified"])
@pytest.mark.parametrize(
    "oracle", [xf.Given(), xf.SelfPrediction(hard=True), xf.SelfPrediction(0.5), xf.Uniform()], ids=repr
)
@pytest.mark.parametrize("axis", AXES)
def test_iterating_logits_is_passing_through_the_block(generator, axis, oracle, step):
    Z, model, labels = parts(generator)
    block = xf.derive(xf.CrossEntropy(axis), model, oracle=oracle, step=step)
    C = None
    if isinstance(oracle, xf.Given):
        C = torch.nn.functional.one_hot(labels, 4).double()
        C = C / C.sum(-2 if axis == "sequence" else -1, keepdim=True)
    whole, small = list(through_block(block, Z, 5, C)), list(through_logits(block, Z, 5, C))
    assert len(whole) == len(small) == 6
    for (N, targets), (other, others) in zip(whole, small, strict=True):
        assert_close(N, other)
        assert_close(targets, others)
    assert largest_gap(whole, small) < 1e-12


def test_the_points_are_those_of_the_blocks_trajectory(generator):
    Z, model, labels = parts(generator)
    block = xf.derive(xf.CrossEntropy("classes"), model)
    path = block.trajectory(Z, targets=labels, steps=5)
    points = list(through_logits(block, Z, 5, labels))
    assert_close(torch.stack([N for N, _ in points]), path.logits)
    passes = measure(points, labels, block.objective)
    assert_close(torch.tensor(passes.energy, dtype=torch.float64), path.energy[path.ends] / len(Z))


def test_measures_by_hand():
    N = torch.tensor([[2.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 1, 1])
    C = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    passes = measure([(N, C)], labels, xf.CrossEntropy("classes"), named=True)
    assert passes.accuracy == (0.75,)
    assert passes.agreement == (0.75,)
    per_image = torch.nn.functional.cross_entropy(N, labels)
    assert passes.energy_to_labels[0] == pytest.approx(per_image.item())
    assert passes.energy[0] == pytest.approx(torch.nn.functional.cross_entropy(N, C).item())
    assert measure([(N, C)], labels, xf.CrossEntropy("classes")).agreement is None


def test_a_bias_stays_where_it_is(generator):
    Z, model, labels = parts(generator)
    block = xf.derive(xf.CrossEntropy("classes"), model)
    assert_close(next(through_logits(block, Z, 1, labels))[0], Z @ model.theta.mT + model.bias)


def test_what_cannot_be_followed_by_logits_is_refused(generator):
    Z, model, _ = parts(generator)
    memory = xf.NearestNeighbours(1).remember(Z, torch.eye(4).double()[torch.zeros(len(Z), dtype=torch.int64)])
    block = xf.derive(xf.CrossEntropy("classes"), model, oracle=memory)
    with pytest.raises(xf.XentflowError, match="got NearestNeighbours, whose targets depend on the features"):
        next(through_logits(block, Z, 1))
    quadratic = xf.derive(xf.CrossEntropy("classes"), xf.Quadratic(torch.eye(12).double()))
    with pytest.raises(xf.XentflowError, match="expected a Linear model without heads, got Quadratic"):
        next(through_logits(quadratic, Z, 1))
    with pytest.raises(xf.XentflowError, match="step: expected a number or CertifiedStep"):
        step_size(xf.derive(xf.CrossEntropy("classes"), model, step=xf.LineSearch()))


def test_one_thread_gives_the_others_back():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before

"""One conformance suite for every model, and what is special to each."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.autograd.functional import jacobian
from torch.testing import assert_close

import xentflow as xf
from instances import BATCHES, HEADS, MODELS, F, K, S, along, normal, relative_error

all_heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
all_batches = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())


class ModelConformance:
    """What must hold of any map from features to logits and its pullback. A subclass names the model."""

    name: str
    degree: int | None = None
    """Degree in Z of the pullback, where one is declared."""

    @property
    def case(self):
        return MODELS[self.name]

    def draw(self, generator, heads, batch=()):
        """Tensors of the model, features, and a matrix like its logits."""
        tensors = self.case.draw(generator, () if heads is None else (heads,), batch)
        Z = normal((*batch, S, F), generator)
        return tensors, Z, normal(self.case.logits(Z, *tensors).shape, generator)

    def of_sample(self, tensors, sample):
        """The tensors of the model that one sample of a batch sees."""
        return tensors

    def of_head(self, tensors, head):
        return tuple(tensor[head] for tensor in tensors)

    @all_heads
    @all_batches
    def test_logits_are_the_formula(self, heads, batch, generator):
        tensors, Z, _ = self.draw(generator, heads, batch)
        model, expected = self.case.build(*tensors), self.case.logits(Z, *tensors)
        assert_close(model.logits(Z), expected, rtol=1e-12, atol=1e-12)
        assert_close(model(Z), expected, rtol=1e-12, atol=1e-12)
        assert model.heads == heads
        assert expected.shape[: len(batch)] == batch

    @all_heads
    @all_batches
    def test_pullback_is_the_vector_jacobian_product(self, heads, batch, generator):
        tensors, Z, M = self.draw(generator, heads, batch)
        model = self.case.build(*tensors)
        pulled = model.pullback(Z, M)
        Z.requires_grad_()
        (expected,) = torch.autograd.grad((M * self.case.logits(Z, *tensors)).sum(), Z)
        assert pulled.shape == Z.shape
        assert relative_error(pulled, expected) <= 1e-12
        assert relative_error(pulled, xf.Model.pullback(model, Z.detach(), M)) <= 1e-12

    @all_heads
    def test_pullback_is_adjoint_to_a_difference_of_logits(self, heads, generator):
        tensors, Z, M = self.draw(generator, heads)
        model, V, t = self.case.build(*tensors), normal(Z.shape, generator), 1e-5
        moved = (model.logits(Z + t * V) - model.logits(Z - t * V)) / (2 * t)
        assert_close((model.pullback(Z, M) * V).sum(), (M * moved).sum(), rtol=1e-7, atol=1e-8)

    @all_heads
    def test_pullback_is_linear(self, heads, generator):
        tensors, Z, M = self.draw(generator, heads)
        model, other = self.case.build(*tensors), normal(M.shape, generator)
        together = model.pullback(Z, 2 * M - 3 * other)
        assert relative_error(together, 2 * model.pullback(Z, M) - 3 * model.pullback(Z, other)) <= 1e-12

    def test_heads_add(self, generator):
        tensors, Z, M = self.draw(generator, 4, (2,))
        model = self.case.build(*tensors)
        single = [self.case.build(*self.of_head(tensors, head)) for head in range(4)]
        logits = torch.stack([one.logits(Z) for one in single], -3)
        assert_close(model.logits(Z), logits, rtol=1e-12, atol=1e-12)
        summed = sum(one.pullback(Z, M[..., head, :, :]) for head, one in enumerate(single))
        assert relative_error(model.pullback(Z, M), summed) <= 1e-12

    def test_one_head_is_a_model_that_shares_theta(self, generator):
        tensors, Z, M = self.draw(generator, 4, (2,))
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        model = self.case.build(*leaves)
        if self.name == "functional":
            assert model.of_head(2) is None
            return
        one, alone = model.of_head(2), self.case.build(*self.of_head(tensors, 2))
        assert one.heads is None
        assert self.case.build(*self.of_head(tensors, 2)).of_head(0) is None
        assert (one.pullback_degree, one.is_gradient) == (model.pullback_degree, model.is_gradient)
        assert_close(one.logits(Z), alone.logits(Z), rtol=1e-12, atol=1e-12)
        assert one.logits_like(Z).shape == alone.logits(Z).shape
        assert_close(one.pullback(Z, M[:, 2]), alone.pullback(Z, M[:, 2]), rtol=1e-12, atol=1e-12)
        for held, expected in zip(one.tensors(), alone.tensors(), strict=True):
            assert_close(held, expected, rtol=0, atol=0)
        summed = one.logits(Z).square().sum()
        theta, *_ = leaves
        (slope,) = torch.autograd.grad(summed, theta)
        assert (slope[2] != 0).all()
        assert (slope[[0, 1, 3]] == 0).all()
        views = {leaf.data_ptr() + 2 * leaf.stride(0) * leaf.element_size() for leaf in leaves if leaf.ndim > 1}
        assert one.tensors()[0].data_ptr() in views

    @all_heads
    def test_batch_of_n_is_n_batches_of_one(self, heads, generator):
        tensors, Z, M = self.draw(generator, heads, (3,))
        model = self.case.build(*tensors)
        logits, pulled = model.logits(Z), model.pullback(Z, M)
        for sample in range(3):
            alone = self.case.build(*self.of_sample(tensors, sample))
            assert_close(alone.logits(Z[sample]), logits[sample], rtol=1e-12, atol=1e-12)
            assert_close(alone.pullback(Z[sample], M[sample]), pulled[sample], rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("heads", [None, 2], ids=["one-head", "two-heads"])
    def test_gradcheck_in_features_and_parameters(self, heads, generator):
        tensors, Z, M = self.draw(generator, heads)
        inputs = [tensor.clone().requires_grad_() for tensor in (Z, M, *tensors)]
        build = self.case.build if self.name != "functional" else lambda *_: self.case.build(*tensors)
        if self.name == "functional":
            inputs = inputs[:2]
        assert gradcheck(lambda Z, M, *tensors: build(*tensors).logits(Z), inputs, fast_mode=True)
        assert gradcheck(lambda Z, M, *tensors: build(*tensors).pullback(Z, M), inputs, fast_mode=True)

    def test_declared_degree_of_the_pullback(self, generator):
        tensors, Z, M = self.draw(generator, None)
        model = self.case.build(*tensors)
        assert model.pullback_degree == self.degree
        W = normal(Z.shape, generator)
        at_Z, at_W = model.pullback(Z, M), model.pullback(W, M)
        if self.degree == 0:
            assert torch.equal(at_Z, at_W)
        elif self.degree == 1:
            assert relative_error(model.pullback(2 * Z - W, M), 2 * at_Z - at_W) <= 1e-12
            assert relative_error(at_Z, at_W) > 1e-2
        else:
            assert relative_error(model.pullback(2 * Z - W, M), 2 * at_Z - at_W) > 1e-2

    def test_whole_derivative_unless_said_otherwise(self, generator):
        assert self.case.build(*self.draw(generator, None)[0]).is_gradient

    def test_parameters_stay_parameters_and_tensors_are_buffers(self, generator):
        tensors, Z, _ = self.draw(generator, None)
        if self.name == "functional":
            assert len(list(self.case.build(*tensors).parameters())) == len(tensors)
            return
        held = self.case.build(*tensors)
        assert not list(held.parameters())
        assert len(list(held.buffers())) == len(tensors)
        learned = self.case.build(*map(nn.Parameter, tensors))
        assert len(list(learned.parameters())) == len(tensors)
        learned.logits(Z).square().sum().backward()
        assert all(parameter.grad is not None for parameter in learned.parameters())
        restored = self.case.build(*(torch.zeros_like(tensor) for tensor in tensors))
        restored.load_state_dict(held.state_dict())
        assert torch.equal(restored.logits(Z), held.logits(Z))

    @all_heads
    @all_batches
    def test_logits_like_has_the_shape_of_the_logits(self, heads, batch, generator):
        tensors, Z, M = self.draw(generator, heads, batch)
        alike = self.case.build(*tensors).logits_like(Z)
        assert (alike.shape, alike.dtype) == (M.shape, M.dtype)

    def test_trainable_copies_tensors_and_shares_parameters(self, generator):
        tensors, Z, M = self.draw(generator, None)
        model = self.case.build(*tensors)
        learned = model.trainable()
        assert [held.shape for held in learned.tensors()] == [held.shape for held in model.tensors()]
        assert torch.equal(learned.logits(Z), model.logits(Z))
        assert torch.equal(learned.pullback(Z, M), model.pullback(Z, M))
        assert list(learned.parameters())
        if self.name == "functional":
            return
        assert not list(model.parameters())
        twin = learned.trainable()
        assert all(a is b for a, b in zip(twin.parameters(), learned.parameters(), strict=True))
        with torch.no_grad():
            for parameter in learned.parameters():
                parameter.zero_()
        assert torch.equal(model.logits(Z), self.case.build(*tensors).logits(Z))

    @all_heads
    def test_operator_norm_is_the_largest_singular_value_of_the_jacobian(self, heads, generator):
        tensors, Z, M = self.draw(generator, heads)
        model = self.case.build(*tensors)
        if self.degree != 0:
            with pytest.raises(xf.XentflowError, match="not affine"):
                model.operator_norm()
            return
        dense = jacobian(model.logits, Z).reshape(M.numel(), Z.numel())
        assert_close(model.operator_norm(), torch.linalg.matrix_norm(dense, 2), rtol=1e-10, atol=0)


class TestLinear(ModelConformance):
    name, degree = "linear", 0

    def test_pullback_by_hand(self):
        model = xf.Linear(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        assert torch.equal(model.logits(torch.tensor([[1.0, 10.0]])), torch.tensor([[21.0, 43.0, 65.0]]))
        assert torch.equal(model.pullback(torch.zeros(1, 2), torch.tensor([[1.0, 0.0, 1.0]])), torch.tensor([[6.0, 8]]))


class TestLinearWithBias(ModelConformance):
    name, degree = "linear-bias", 0

    def test_bias_is_added_to_every_token(self, generator):
        theta, bias, Z = normal((K, F), generator), normal((K,), generator), normal((S, F), generator)
        difference = xf.Linear(theta, bias).logits(Z) - xf.Linear(theta).logits(Z)
        assert_close(difference, bias.expand(S, K), rtol=1e-12, atol=1e-12)


class TestFunctional(ModelConformance):
    name = "functional"

    def of_head(self, tensors, head):
        return (*tensors[:-1], tensors[-1][head])

    def test_one_head_is_a_head(self, generator):
        theta, Z = normal((1, K, F), generator), normal((2, S, F), generator)
        model = xf.Functional(lambda Z: Z.unsqueeze(-3) @ theta.mT, heads=1)
        assert torch.equal(model.logits(Z), (Z @ theta[0].T).unsqueeze(1))

    def test_any_callable_has_the_pullback_of_its_closed_form(self, generator):
        theta, Z, M = normal((F, F), generator), normal((2, S, F), generator), normal((2, S, S), generator)
        by_autograd = xf.Functional(lambda Z: Z @ theta @ Z.mT).pullback(Z, M)
        assert relative_error(xf.Quadratic(theta).pullback(Z, M), by_autograd) <= 1e-12


class TestBilinear(ModelConformance):
    name, degree = "bilinear", 0

    def of_sample(self, tensors, sample):
        return tensors[0], tensors[1][sample]

    def of_head(self, tensors, head):
        return tensors[0][head], tensors[1]

    @all_heads
    def test_context_is_shared_by_a_batch(self, heads, generator):
        tensors, Z, M = self.draw(generator, heads)
        model = self.case.build(*tensors)
        Z, M = torch.stack([Z, -Z]), torch.stack([M, 2 * M])
        for sample in range(2):
            assert_close(model.logits(Z)[sample], model.logits(Z[sample]), rtol=1e-12, atol=1e-12)
            assert_close(model.pullback(Z, M)[sample], model.pullback(Z[sample], M[sample]), rtol=1e-12, atol=1e-12)

    @all_heads
    @all_batches
    def test_logits_like_has_the_shape_of_the_logits(self, heads, batch, generator):
        tensors, Z, M = self.draw(generator, heads, batch)
        alike = self.case.build(*tensors).logits_like(Z)
        assert (alike.shape, alike.dtype) == (M.shape, M.dtype)

    @all_heads
    def test_operator_norm_is_one_for_each_sample_of_the_context(self, heads, generator):
        tensors, _, _ = self.draw(generator, heads, (2, 2))
        norms = self.case.build(*tensors).operator_norm()
        alone = [self.case.build(tensors[0], context).operator_norm() for context in tensors[1].flatten(0, 1)]
        assert_close(norms, torch.stack(alone).view(2, 2), rtol=1e-12, atol=0)

    def test_another_context_shares_theta(self, generator):
        (theta, context), Z, M = self.draw(generator, 4)
        other = xf.Bilinear(theta).at(context)
        here = xf.Bilinear(theta, context)
        assert torch.equal(other.logits(Z), here.logits(Z))
        assert torch.equal(other.pullback(Z, M), here.pullback(Z, M))
        assert torch.equal(here.at(-context).logits(Z), -here.logits(Z))
        with pytest.raises(xf.XentflowError, match="context"):
            xf.Bilinear(theta).logits(Z)

    def test_with_the_features_as_context_is_the_query_role(self, generator):
        theta, Z, M = normal((F, F), generator), normal((S, F), generator), normal((S, S), generator)
        pulled = xf.Bilinear(theta, Z).pullback(Z, M)
        assert relative_error(pulled, xf.Quadratic(theta).query_pullback(Z, M)) <= 1e-12


class QuadraticConformance(ModelConformance):
    degree = 1

    def theta(self, tensors):
        return tensors[0]

    @all_heads
    def test_roles_add_up(self, heads, generator):
        tensors, Z, M = self.draw(generator, heads, (2,))
        both, own = self.case.build(*tensors), self.case.build(*tensors, roles="own")
        query, key = both.query_pullback(Z, M), both.key_pullback(Z, M)
        assert relative_error(query + key, both.pullback(Z, M)) <= 1e-12
        assert torch.equal(own.pullback(Z, M, axis="classes"), query)
        assert torch.equal(own.pullback(Z, M, axis="sequence"), key)
        assert not own.is_gradient
        # In a query's row, and in a key's column, the copies of Z that stay still hold no derivative.
        moving, theta, still = Z.clone().requires_grad_(), self.theta(tensors), Z
        if heads is not None:
            still = still.unsqueeze(-3)
        rows = (moving.unsqueeze(-3) if heads is not None else moving) @ theta @ still.mT
        columns = still @ theta @ (moving.unsqueeze(-3) if heads is not None else moving).mT
        for found, N in ((query, rows), (key, columns)):
            (expected,) = torch.autograd.grad((M * N).sum(), moving)
            assert relative_error(found, expected) <= 1e-12

    def test_own_role_needs_the_axis(self, generator):
        tensors, Z, M = self.draw(generator, None)
        with pytest.raises(xf.XentflowError, match="axis"):
            self.case.build(*tensors, roles="own").pullback(Z, M)

    @all_heads
    def test_full_theta(self, heads, generator):
        tensors, Z, _ = self.draw(generator, heads)
        model, theta = self.case.build(*tensors), self.theta(tensors)
        assert_close(model.full_theta(), theta, rtol=1e-12, atol=1e-12)
        assert_close(xf.Quadratic(model.full_theta()).logits(Z), model.logits(Z), rtol=1e-12, atol=1e-12)

    @all_heads
    def test_pullback_norm_bounds_the_operator(self, heads, generator):
        for _ in range(5):
            tensors, Z, M = self.draw(generator, heads)
            model = self.case.build(*tensors)
            dense = jacobian(lambda Z, model=model, M=M: model.pullback(Z, M), Z).reshape(Z.numel(), Z.numel())
            assert torch.linalg.matrix_norm(dense, 2) <= model.pullback_norm(M) * (1 + 1e-12)

    def test_pullback_norm_minds_both_rows_and_columns(self, generator):
        tensors, Z = self.draw(generator, None)[0], normal((16, F), generator)
        model, M = self.case.build(*tensors), torch.zeros(16, 16, dtype=torch.float64)
        M[:, 0] = 1
        dense = jacobian(lambda Z: model.pullback(Z, M), Z).reshape(Z.numel(), Z.numel())
        norm = torch.linalg.matrix_norm(dense, 2)
        assert norm <= model.pullback_norm(M) <= 2.01 * norm
        assert_close(model.pullback_norm(M), model.pullback_norm(M.mT), rtol=1e-12, atol=0)

    def test_pullback_norm_is_the_largest_of_a_batch(self, generator):
        tensors, _, M = self.draw(generator, None, (3,))
        model = self.case.build(*tensors)
        assert_close(model.pullback_norm(M), torch.stack([model.pullback_norm(one) for one in M]).max())


class TestQuadratic(QuadraticConformance):
    name = "quadratic"

    def test_by_hand(self):
        theta = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
        model, Z = xf.Quadratic(theta), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        assert torch.equal(model.logits(Z), torch.tensor([[2.0, 4.0], [6.0, 12.0]]))
        M = torch.tensor([[0.0, 1.0], [0.0, 0.0]])  # only N₀₁ = z₀₀z₁₁
        assert torch.equal(model.query_pullback(Z, M), torch.tensor([[4.0, 0.0], [0.0, 0.0]]))
        assert torch.equal(model.key_pullback(Z, M), torch.tensor([[0.0, 0.0], [0.0, 1.0]]))


class TestQuadraticSymmetric(QuadraticConformance):
    name = "quadratic-symmetric"

    def test_logits_are_symmetric(self, generator):
        tensors, Z, _ = self.draw(generator, 4, (2,))
        N = self.case.build(*tensors).logits(Z)
        assert_close(N, N.mT, rtol=1e-12, atol=1e-12)

    def test_pullback_norm_is_reached(self, generator):
        (theta,), Z, _ = self.draw(generator, None)
        model, M = xf.Quadratic(theta), torch.eye(S, dtype=torch.float64)
        dense = jacobian(lambda Z: model.pullback(Z, M), Z).reshape(Z.numel(), Z.numel())
        assert_close(model.pullback_norm(M), torch.linalg.matrix_norm(dense, 2), rtol=1e-10, atol=0)


class TestQuadraticFromFactor(QuadraticConformance):
    name = "quadratic-factor"

    def theta(self, tensors):
        return tensors[0] @ tensors[0].mT

    @pytest.mark.parametrize("rank", [1, 5], ids=["rank-one", "wider-than-features"])
    def test_any_rank(self, rank, generator):
        phi, Z, M = normal((F, rank), generator), normal((2, S, F), generator), normal((2, S, S), generator)
        factored, full = xf.Quadratic.from_factor(phi), xf.Quadratic(phi @ phi.T)
        assert_close(factored.logits(Z), full.logits(Z), rtol=1e-12, atol=1e-12)
        assert relative_error(factored.pullback(Z, M), full.pullback(Z, M)) <= 1e-12


class TestQuadraticFromTwoFactors(QuadraticConformance):
    name = "quadratic-two-factors"

    def theta(self, tensors):
        phi, psi = tensors
        return phi @ psi.mT


def test_axis_decides_nothing_where_there_is_one_role(generator):
    for name in MODELS:
        case = MODELS[name]
        tensors = case.draw(generator, (), ())
        Z = normal((S, F), generator)
        model, M = case.build(*tensors), normal(case.logits(Z, *tensors).shape, generator)
        assert torch.equal(model.pullback(Z, M, axis="classes"), model.pullback(Z, M, axis="sequence"))
        assert model.logits(Z).sum(along("classes")).shape == (S,)


def test_every_model_of_the_catalogue_has_a_conformance_test():
    def names(cls):
        return {name for sub in cls.__subclasses__() for name in {getattr(sub, "name", None)} | names(sub)}

    assert names(ModelConformance) - {None} == set(MODELS)

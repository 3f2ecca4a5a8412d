"""``derive``: the one factory of blocks. It checks that the parts make sense together, and else says why not."""

from xentflow.axes import is_number, require_type
from xentflow.block import DerivedBlock, StepRule
from xentflow.constraints import Constraint, Free, Whitened
from xentflow.errors import XentflowError
from xentflow.integrators import Euler, Method
from xentflow.models import Functional, Model, Quadratic, require_same_kind
from xentflow.objective import Objective
from xentflow.oracles import Band, Given, LearnedTargets, Oracle, Shift
from xentflow.splitting import LieTrotter, Splitting
from xentflow.steps import CertifiedStep, LearnedStep, LineSearch


def derive(
    objective: Objective,
    model: Model,
    *,
    oracle: Oracle | None = None,
    splitting: Method | None = None,
    step: StepRule = 1.0,
    constraint: Constraint | None = None,
    target_model: Model | None = None,
    causal: bool = False,
    printed_form: bool = False,
) -> DerivedBlock:
    """The block that the gradient flow of ``objective`` over ``model`` implies.

    θ becomes a parameter: a tensor is copied, an ``nn.Parameter`` is shared with whoever else holds it.

    oracle: where C comes from, ``Given()`` unless said otherwise; splitting: ``LieTrotter()`` with Euler half-steps, as
    in the paper, unless said otherwise, or an integrator of the unsplit flow; step: h, or ``LearnedStep``,
    ``CertifiedStep``, ``LineSearch``; target_model: another θ for the target half-step, the paper's θ^(ℓ+½);
    causal: no token sees a later one; printed_form: the paper's Eq. (9) as printed.
    """
    require_type("objective", objective, Objective)
    require_type("model", model, Model)
    oracle = Given() if oracle is None else oracle
    splitting = LieTrotter() if splitting is None else splitting
    constraint = Free() if constraint is None else constraint
    require_type("oracle", oracle, Oracle)
    require_type("splitting", splitting, Method)
    require_type("constraint", constraint, Constraint)
    if target_model is not None:
        require_type("target_model", target_model, Model)
        require_same_kind(model, target_model)
    if printed_form and not (isinstance(model, Quadratic) and model.is_gradient):
        raise XentflowError('printed_form: expected a Quadratic model with roles="both", the only one the paper prints')
    if isinstance(oracle, Shift | Band | LearnedTargets) and not isinstance(model, Quadratic):
        raise XentflowError(
            f"oracle: expected one for {type(model).__name__} logits, got {type(oracle).__name__}, "
            "whose targets are tokens; it goes with a Quadratic model"
        )
    if causal:
        _require_causal(model, oracle, splitting, constraint)
    _require_exact(model, splitting, constraint)
    block = DerivedBlock(
        objective,
        _trainable(model),
        oracle,
        splitting,
        step,
        constraint,
        None if target_model is None else _trainable(target_model),
        causal,
        printed_form,
    )
    _require_step(block)
    return block


def _trainable(model: Model) -> Model:
    trainable = getattr(model, "trainable", None)
    if trainable is None:
        raise XentflowError(f"model: expected one that holds its θ, got {type(model).__name__}; give the context later")
    made: Model = trainable()
    return made


def _require_causal(model: Model, oracle: Oracle, splitting: Method, constraint: Constraint) -> None:
    if not isinstance(model, Quadratic):
        raise XentflowError(f"causal: expected a Quadratic model, where classes are tokens, got {type(model).__name__}")
    if model.is_gradient:
        raise XentflowError(
            'causal: expected roles="own", got "both": the exact gradient of a causally masked energy moves a token by '
            "what later tokens make of it as their key, and so carries the future into the past"
        )
    if isinstance(constraint, Whitened):
        raise XentflowError("causal: expected Free, Sphere or Dual features, got Whitened, which mixes all tokens")
    if isinstance(splitting, Splitting) and splitting.exact:
        raise XentflowError(
            "causal: expected integrated sub-steps, got exact=True, whose number of sub-steps depends on all tokens"
        )
    if isinstance(oracle, Shift) and oracle.offset > 0:
        raise XentflowError(f"causal: expected a Shift that looks back, got offset={oracle.offset}")


def _require_exact(model: Model, splitting: Method, constraint: Constraint) -> None:
    if isinstance(splitting, Splitting) and splitting.exact:
        if not isinstance(constraint, Free):
            raise XentflowError(f"exact: expected Free features, got {constraint!r}, on which no sub-flow is solvable")
        if isinstance(model, Functional):
            raise XentflowError("exact: expected a Linear, Quadratic or Bilinear model, got Functional")


def _require_step(block: DerivedBlock) -> None:
    step, model = block.step, block.model
    if isinstance(step, LearnedStep):
        if step.heads is not None and step.heads != model.heads:
            raise XentflowError(f"step: expected one for each of the model's heads, {model.heads}, got {step.heads}")
        if step.features is not None and not isinstance(block.constraint, Free):
            raise XentflowError(
                f"step: expected one for all features on {block.constraint!r}, got {step.features}, one for each "
                "feature, along which ℓ need not fall there"
            )
    elif isinstance(step, CertifiedStep):
        if not isinstance(block.constraint, Free) or not is_one_euler_step(block.splitting):
            raise XentflowError(
                "step: expected Free features and Euler or LieTrotter() with Euler half-steps for CertifiedStep, since "
                f"its bound is for one gradient step, got {block.constraint!r} and {block.splitting!r}"
            )
        if model.pullback_degree != 0 or block.kind != "gradient flow":
            raise XentflowError(
                f"step: expected a gradient flow of an affine model for CertifiedStep, got {type(model).__name__} and "
                f"a {block.kind}; no bound on its curvature exists. LineSearch goes with any gradient flow"
            )
    elif isinstance(step, LineSearch):
        if block.kind != "gradient flow":
            raise XentflowError(f"step: expected a gradient flow for LineSearch, got a {block.kind}: nothing need fall")
    elif not callable(step) and not is_number(step):
        raise XentflowError(
            f"step: expected a positive finite number, LearnedStep, CertifiedStep or LineSearch, got {step!r}"
        )


def is_one_euler_step(splitting: Method) -> bool:
    """Whether, on an affine model, the method is Z − h ∂ℓ."""
    return isinstance(splitting, Euler) or (isinstance(splitting, LieTrotter) and isinstance(splitting.substep, Euler))

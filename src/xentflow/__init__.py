"""xentflow: attention you can derive.

State a regression objective over features; get the transformer block that its gradient flow implies.
"""

from xentflow.attention import cross_attention, self_attention
from xentflow.block import DerivedBlock
from xentflow.constraints import Constraint, Dual, Free, Sphere, Whitened
from xentflow.derive import derive
from xentflow.errors import Diverged, XentflowError
from xentflow.flow import GradientFlow
from xentflow.gradient import FeatureGradient, feature_gradient, printed_form
from xentflow.integrators import RK4, Euler, Heun, Path, integrate
from xentflow.losses import linear_cross_entropy
from xentflow.meter import Faithfulness, measure_faithfulness
from xentflow.models import Bilinear, Functional, Linear, Model, Quadratic
from xentflow.objective import CrossEntropy, Objective
from xentflow.oracles import (
    Band,
    Given,
    Learned,
    LearnedTargets,
    NearestNeighbours,
    Oracle,
    SelfPrediction,
    Shift,
    Uniform,
)
from xentflow.potentials import Entmax, HalfSquare, LogSumExp, Potential, Softplus
from xentflow.splitting import LieTrotter, Splitting, Strang, Yoshida
from xentflow.stack import Stack, initialise_
from xentflow.steps import CertifiedStep, LearnedStep, LineSearch, curvature_bound, safe_step
from xentflow.trajectory import Trajectory

__version__ = "0.1.0"

__all__ = [
    "RK4",
    "Band",
    "Bilinear",
    "CertifiedStep",
    "Constraint",
    "CrossEntropy",
    "DerivedBlock",
    "Diverged",
    "Dual",
    "Entmax",
    "Euler",
    "Faithfulness",
    "FeatureGradient",
    "Free",
    "Functional",
    "Given",
    "GradientFlow",
    "HalfSquare",
    "Heun",
    "Learned",
    "LearnedStep",
    "LearnedTargets",
    "LieTrotter",
    "LineSearch",
    "Linear",
    "LogSumExp",
    "Model",
    "NearestNeighbours",
    "Objective",
    "Oracle",
    "Path",
    "Potential",
    "Quadratic",
    "SelfPrediction",
    "Shift",
    "Softplus",
    "Sphere",
    "Splitting",
    "Stack",
    "Strang",
    "Trajectory",
    "Uniform",
    "Whitened",
    "XentflowError",
    "Yoshida",
    "cross_attention",
    "curvature_bound",
    "derive",
    "feature_gradient",
    "initialise_",
    "integrate",
    "linear_cross_entropy",
    "measure_faithfulness",
    "printed_form",
    "safe_step",
    "self_attention",
]

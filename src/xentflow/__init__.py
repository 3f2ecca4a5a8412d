"""xentflow: attention you can derive.

State a regression objective over features; get the transformer block that its gradient flow implies.
"""

from xentflow.attention import cross_attention, self_attention
from xentflow.constraints import Constraint, Free, Sphere, Whitened
from xentflow.errors import Diverged, XentflowError
from xentflow.flow import GradientFlow
from xentflow.gradient import FeatureGradient, feature_gradient, printed_form
from xentflow.integrators import RK4, Euler, Heun, Path, integrate
from xentflow.models import Bilinear, Functional, Linear, Model, Quadratic
from xentflow.objective import CrossEntropy, Objective
from xentflow.potentials import Entmax, HalfSquare, LogSumExp, Potential, Softplus
from xentflow.splitting import LieTrotter, Splitting, Strang, Yoshida
from xentflow.steps import LineSearch, curvature_bound, safe_step

__version__ = "0.1.0"

__all__ = [
    "RK4",
    "Bilinear",
    "Constraint",
    "CrossEntropy",
    "Diverged",
    "Entmax",
    "Euler",
    "FeatureGradient",
    "Free",
    "Functional",
    "GradientFlow",
    "HalfSquare",
    "Heun",
    "LieTrotter",
    "LineSearch",
    "Linear",
    "LogSumExp",
    "Model",
    "Objective",
    "Path",
    "Potential",
    "Quadratic",
    "Softplus",
    "Sphere",
    "Splitting",
    "Strang",
    "Whitened",
    "XentflowError",
    "Yoshida",
    "cross_attention",
    "curvature_bound",
    "feature_gradient",
    "integrate",
    "printed_form",
    "safe_step",
    "self_attention",
]

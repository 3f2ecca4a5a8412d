"""Fitting θ: the corruption of images, the recipe, and three ways to run it under the same law; the exact minimum."""

from xentflow.training.classifier import fit_fast
from xentflow.training.literal import NoisyImages, fit_literal, fit_vectorised
from xentflow.training.multinomial import MultinomialFit, fit_multinomial
from xentflow.training.noise import Corruption
from xentflow.training.recipe import ClassifierConfig, FittedClassifier

__all__ = [
    "ClassifierConfig",
    "Corruption",
    "FittedClassifier",
    "MultinomialFit",
    "NoisyImages",
    "fit_fast",
    "fit_literal",
    "fit_multinomial",
    "fit_vectorised",
]

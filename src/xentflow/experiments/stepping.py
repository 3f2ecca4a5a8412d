"""The time of a training step: networks interleaved in one process, so that what else goes on hits all alike."""

import time
from collections.abc import Mapping
from statistics import median

import torch

from xentflow.experiments.train import TrainConfig, make_network, make_task, make_trainer
from xentflow.training.trainer import Trainer

ROUNDS, STEPS = 9, 40


def seconds_per_step(configs: Mapping[str, TrainConfig], rounds: int = ROUNDS, steps: int = STEPS) -> dict[str, float]:
    """The median over rounds of the mean time of a step, planning and judging not counted."""
    trainers = {}
    for name, config in configs.items():
        task = make_task(config)
        trainers[name] = make_trainer(config, make_network(config, task), task)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(rounds + 1):
        for name, trainer in trainers.items():
            taken = _timed(trainer, min(steps, trainer.steps_per_pass))
            if turn:  # the first round warms up
                seconds[name].append(taken)
    return {name: median(taken) for name, taken in seconds.items()}


def _timed(trainer: Trainer, steps: int) -> float:
    trainer.begin_pass()
    _wait()
    began = time.perf_counter()
    for _ in range(steps):
        trainer.advance()
    _wait()
    return (time.perf_counter() - began) / steps


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()

"""One small trainer: AdamW, a warm-up and a cosine, clipping, early stop, and nothing hidden.

    rate at step k of n:  r(k) = rate · min(1, (k + 1)/w) · ½(1 + cos(πk/n)),     w = warm-up steps

Training goes by passes. A pass plans its steps at once (``Task.plan``), takes them, and judges the network on what was
held out. Everything a step reads and writes lies in tensors that stay where they are: the plan, the rate, the step's
number, the optimiser's moments, the sums of loss and accuracy. So on a GPU a step can be recorded once as a CUDA graph
and replayed, and the host waits for nothing between the ends of passes; and a checkpoint is those tensors, the
generator's state at the start of the pass, and the step's number. Resumed, the same bits come out.

The network may be wrapped from outside (``wrap``: compiled), and trained by several processes at once (``parallel``),
each on its share of the same batches; parameters are read and saved through the bare one, in full.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from xentflow.errors import XentflowError
from xentflow.training.parallel import ALONE, Processes, fill, whole
from xentflow.training.tasks import IGNORED, Held, Rows, Task

Criterion = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the network, inputs and labels: the loss to descend, and the logits to judge by."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Args:
        steps: in all.
        batch: samples of a step.
        learning_rate: the highest.
        weight_decay: of AdamW.
        warm_up: the part of the steps in which the rate rises.
        clip: the longest gradient.
        patience: passes without a better validation loss after which to stop; 0 goes on to the end.
    """

    steps: int = 2000
    batch: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warm_up: float = 0.05
    clip: float = 1.0
    patience: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("patience", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise XentflowError(f"{name}: expected a whole number of at least {least}, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise XentflowError(f"{name}: expected a finite number above 0, got {getattr(self, name)}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0 and 0 <= self.warm_up < 1):
            raise XentflowError(
                "weight_decay, warm_up: expected at least 0, and a part below 1, got "
                f"{self.weight_decay}, {self.warm_up}"
            )

    def rates(self, first: int, count: int) -> Tensor:
        """r(k) of ``count`` steps from step ``first``."""
        k = torch.arange(first, first + count, dtype=torch.float64)
        risen = ((k + 1) / max(1, self.warm_up * self.steps)).clamp_max(1)
        return (self.learning_rate * risen * 0.5 * (1 + torch.cos(math.pi * k / self.steps))).float()


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy and accuracy over the decisions that were asked for."""

    loss: float
    accuracy: float


def layer_wise(network: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of what the whole network says: θ of every layer, by backpropagation through the passes."""
    logits: Tensor = network(x)
    return cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=IGNORED), logits


class _Loss(nn.Module):
    """A network with what is descended, as one module: several processes share what it calls."""

    def __init__(self, network: nn.Module, criterion: Criterion) -> None:
        super().__init__()
        self.network, self.criterion = network, criterion

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.criterion(self.network, x, y)


class Trainer:
    """A training run: ``run()`` takes it to its end, ``state`` and ``restore`` carry it over an interruption.

    criterion: what is descended; wrap: makes of the network what is called in training; graph: record a step as a CUDA
    graph and replay it; processes: those that train together, all of which call the same methods.
    """

    def __init__(
        self,
        network: nn.Module,
        task: Task,
        recipe: Recipe,
        seed: int,
        *,
        criterion: Criterion = layer_wise,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        graph: bool = False,
        processes: Processes = ALONE,
    ) -> None:
        processes.require_divisor(recipe.batch)
        self.network, self.task, self.recipe, self.processes = network, task, recipe, processes
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self._loss = processes.spread(network, _Loss(network if wrap is None else wrap(network), criterion))
        self.steps_per_pass = task.steps_per_pass(recipe.batch)
        self._generator = torch.Generator().manual_seed(seed)
        self._at_start_of_pass = self._generator.get_state()
        device = next(network.parameters()).device
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._rate = torch.zeros((), device=device)
        # Fused on either kind of device, with the rate and the moments in tensors that keep their place.
        self._optimiser = torch.optim.AdamW(
            self._parameters,
            lr=self._rate,
            betas=(0.9, 0.98),
            weight_decay=recipe.weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        # In 64 bits the order in which processes and checkpoints sum does not matter.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._plan: Rows = {}
        self._prime()
        self.advance: Callable[[], None] = self._take
        """Take the next step of the plan."""
        if graph:
            self._draw_plan()
            self.advance = self._recorded()

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.step >= self.recipe.steps or self._is_stuck()

    def run(self) -> Iterator[bool]:
        """Take all steps that are left; after each comes whether a pass has ended with it and been judged."""
        while not self.finished:
            first = self.begin_pass()
            last = min(self.steps_per_pass, first + self.recipe.steps - self.step)
            for place in range(first, last):
                self.advance()
                self.step += 1
                ends = place + 1 == last
                if ends:
                    self._close_pass()
                yield ends

    def begin_pass(self) -> int:
        """Plan the pass that the next step is of; the step's place in it."""
        first = self.step % self.steps_per_pass
        self._draw_plan()
        self._place.fill_(first)
        return first

    @torch.no_grad()
    def judge(self, part: Held) -> Score:
        """The network on what was held out."""
        self.network.eval()
        loss, right, asked = 0.0, 0, 0
        for x, y in itertools.starmap(self.processes.to_judge, self.task.held_out(part)):
            logits = self.network(x).flatten(0, -2).float()
            y = y.flatten()
            loss += float(cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum"))
            right += int((logits.argmax(-1) == y).sum())
            asked += int((y != IGNORED).sum())
        self.network.train()
        loss, right, asked = self.processes.total(torch.tensor([loss, right, asked], dtype=torch.float64)).tolist()
        return Score(loss / asked, right / asked)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the rest of the run depends on."""
        held = {name: whole(tensor) for name, tensor in self._held().items()}
        held |= {"sums": self.processes.total(self._sums), "generator": self._at_start_of_pass}
        return held, {"step": self.step, "history": self.history}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], figures: dict[str, Any]) -> None:
        """Go on from a ``state``, in place: recorded steps keep the tensors they know."""
        held = self._held()
        if set(held) | {"generator"} != set(tensors):
            raise XentflowError("checkpoint: expected the state of this network and optimiser, got another's")
        for name, tensor in held.items():
            fill(tensor, tensors[name])
        # What all have summed is held by one.
        self._sums *= self.processes.first
        self._at_start_of_pass = tensors["generator"]
        self._generator.set_state(self._at_start_of_pass)
        self.step, self.history = figures["step"], list(figures["history"])

    def _take(self) -> None:
        row = {name: rows.index_select(0, self._place)[0] for name, rows in self._plan.items()}
        self._rate.copy_(row.pop("rate"))
        x, y = self.task.batch(row)
        asked = (y != IGNORED).sum()
        loss, logits = self._loss(x, y)
        # The mean over nothing is no number; a share of a batch may be asked for nothing.
        loss = torch.where(asked > 0, loss, 0)
        self.processes.weighted(loss, asked).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=False)
        with torch.no_grad():
            self._sums += torch.stack([loss.detach() * asked, (logits.argmax(-1) == y).sum(), asked])
            self._place += 1

    def _draw_plan(self) -> None:
        # A pass that was interrupted is planned again from the state that it began with.
        self._generator.set_state(self._at_start_of_pass)
        plan = self.task.plan(self._generator, self.steps_per_pass, self.recipe.batch)
        plan["rate"] = self.recipe.rates(self.step - self.step % self.steps_per_pass, self.steps_per_pass)
        for name, rows in plan.items():
            if name != "rate":
                rows = self.processes.share(rows, 1)
            if name in self._plan:
                self._plan[name].copy_(rows)
            else:
                self._plan[name] = rows.to(self._rate.device)

    def require_finite(self) -> None:
        """Raise where the loss has stopped being finite since the pass began."""
        loss = float(self.processes.total(self._sums)[0])
        if not math.isfinite(loss):
            raise XentflowError(
                f"training: expected a finite loss, got {loss:.3g} after {self.step} steps; "
                "a lower learning_rate may help"
            )

    def _close_pass(self) -> None:
        self.processes.meet()
        self.require_finite()
        loss, right, asked = self.processes.total(self._sums).tolist()
        held = self.judge("validation")
        if not math.isfinite(held.loss):
            raise XentflowError(
                f"training: expected a finite validation loss, got {held.loss:.3g} after {self.step} steps; "
                "a lower learning_rate may help"
            )
        self.history.append(
            {
                "step": self.step,
                "loss": loss / asked,
                "accuracy": right / asked,
                "validation_loss": held.loss,
                "validation_accuracy": held.accuracy,
            }
        )
        self._sums.zero_()
        self._at_start_of_pass = self._generator.get_state()

    def _is_stuck(self) -> bool:
        losses = [entry["validation_loss"] for entry in self.history]
        best = losses.index(min(losses)) if losses else 0
        return 0 < self.recipe.patience <= len(losses) - 1 - best

    @torch.no_grad()
    def _prime(self) -> None:
        """Let the optimiser make its moments, without moving anything: a step of rate zero, and then zeros again."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._optimiser.step()
        for moment in self._moments().values():
            moment.zero_()

    def _held(self) -> dict[str, Tensor]:
        """What training changes, each tensor once, though modules may share it."""
        held = {f"network.{name}": value.detach() for name, value in self.network.named_parameters()}
        held |= {f"network.{name}": value for name, value in self.network.named_buffers()}
        held |= {f"optimiser.{name}": value for name, value in self._moments().items()}
        return held | {"sums": self._sums}

    def _moments(self) -> dict[str, Tensor]:
        names = {id(parameter): name for name, parameter in self.network.named_parameters()}
        return {
            f"{names[id(parameter)]}.{kind}": value
            for parameter in self._parameters
            for kind, value in self._optimiser.state[parameter].items()
        }

    def _recorded(self) -> Callable[[], None]:
        """The step as a CUDA graph; what trying it out changed is put back."""
        changed = [*self._held().values(), self._place]
        before = [tensor.clone() for tensor in changed]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._place.zero_()
                self._take()
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            self._take()
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        return recorded.replay

"""``xentflow train --compare``: the derived transformer against ``nn.TransformerEncoder``, its control, its ablations.

Every run is an ``xentflow train`` of its own, in a process of its own, and can be repeated from its record. First the
time of a step is measured, both networks interleaved on an otherwise idle machine; the budget, in seconds of such
steps, gives each its number of steps. Then the learning rate of each is chosen from one grid by validation loss, on
a seed that is not judged, by runs of full length, since short ones favour rates that do not hold. Then come, in this
order: the judged seeds, the shuffled labels, recall and text, the judged seeds with a part of the steps, the ablations
beside them, and the paper's stack.

``records.json`` holds everything that is finished, and is written whole after each run. A run that stands there with
the same settings is not done again; one that was cut short goes on from its checkpoint.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from xentflow.errors import XentflowError
from xentflow.experiments.passes import one_thread
from xentflow.experiments.stepping import seconds_per_step
from xentflow.experiments.train import COMPARISON, TrainConfig, checkpoint_settings
from xentflow.records import report_console, require_writable, versions, write_whole

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
TUNING_SEED = 1000
SEQUENCE_RATES, SEQUENCE_STEPS = (1e-3, 2e-3, 4e-3, 8e-3), 2000
SHORTER = 4
"""The short runs take one in so many of the steps."""

ABLATIONS: dict[str, dict[str, Any]] = {
    "both roles, exact": {"roles": "both"},
    "both roles, as printed": {"roles": "both", "printed": True},
    "tied": {"tied": True},
    "no target term": {"target": False},
    "Lie–Trotter": {"splitting": "lie-trotter"},
    "Strang": {"splitting": "strang"},
    "Yoshida": {"splitting": "yoshida"},
    "sphere": {"normalisation": "sphere"},
    "free features": {"normalisation": "free"},
    "entmax": {"potential": "entmax"},
    "sigmoid": {"potential": "sigmoid"},
    "θ of its own for the target term": {"separate": True},
}


PAPER_STACKS: dict[str, dict[str, Any]] = {
    "two-stage": {"tied": True, "optimisation": "two-stage", "compiled": False},
    "layer-wise, one θ": {"tied": True},
    "layer-wise, θ of every half-step": {},
}
"""The paper's block in depth, its θ found in each way there is."""


@dataclass(frozen=True)
class Run:
    """One training run of the comparison."""

    name: str
    config: TrainConfig

    @property
    def settings(self) -> dict[str, Any]:
        """What its record depends on; versions are in the record, to be read and not to be matched."""
        return {name: value for name, value in checkpoint_settings(self.config).items() if name != "versions"}


Records = dict[str, Any]


def run(config: TrainConfig, output: Path) -> int:
    """The command: run what is not there yet, as far as the time goes, then write ``comparison.md``."""
    from xentflow.report.comparison import as_markdown

    require_writable(output)
    console = report_console()
    try:
        compare(config, output, console)
    finally:
        # What is there is shown, whatever became of the rest.
        text = as_markdown(read(output))
        write_whole(output / "comparison.md", text.encode())
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    console.print(f"Written: {output / 'records.json'} and {output / 'comparison.md'}", soft_wrap=True, highlight=False)
    return 0


def compare(config: TrainConfig, output: Path, console: Console) -> None:
    """Measure, choose, train: everything into ``records.json``."""
    deadline = time.monotonic() + 60 * config.minutes
    records = read(output)
    wanted = {name: value for name, value in asdict(config).items() if name not in ("data_dir", *COMPARISON[3:])}
    records |= {"config": wanted, "versions": versions()}
    _write(output, records)
    of = ("size", "patch", "batch", "compiled", "device")
    timing = {name: getattr(config, name) for name in of} | asdict(config.derivation)
    if records.get("timing", {}).get("of") != timing:
        with one_thread():  # as the runs have
            seconds = seconds_per_step({name: replace(config, network=name, compare=False) for name in NETWORKS})
        records["timing"] = {"of": timing, "seconds": seconds}
        _write(output, records)
    Pool(config, output, console, records, deadline).work()


NETWORKS: tuple[Any, ...] = ("derived", "transformer")


def planned(config: TrainConfig, records: Records) -> list[Run]:
    """Every run whose settings are known by now, the most important first."""
    steps = {name: max(1, int(config.budget / seconds)) for name, seconds in records["timing"]["seconds"].items()}
    plain = replace(config, compare=False)
    shorter = {name: max(1, count // SHORTER) for name, count in steps.items()}
    runs = []
    for network in NETWORKS:
        base = replace(plain, network=network, task=config.task, steps=steps[network], seed=TUNING_SEED)
        runs += [Run(f"tuning {network} {rate:g}", replace(base, learning_rate=rate)) for rate in RATES]
    rates = {network: rate for network in NETWORKS if (rate := _best(runs, records, network)) is not None}
    if len(rates) < len(NETWORKS):
        return runs
    judged = {
        network: replace(plain, network=network, steps=steps[network], learning_rate=rates[network])
        for network in NETWORKS
    }
    short = {network: replace(config, steps=shorter[network]) for network, config in judged.items()}
    for seed, network in product(range(config.seeds), NETWORKS):
        runs.append(Run(f"{network} seed {seed}", replace(judged[network], seed=seed)))
    for seed, network in product(range(config.ablation_seeds), NETWORKS):
        runs.append(Run(f"shuffled {network} seed {seed}", replace(short[network], seed=seed, shuffle_labels=True)))
    runs += _sequences(config, plain, records)
    for seed, network in product(range(config.seeds), NETWORKS):
        runs.append(Run(f"short {network} seed {seed}", replace(short[network], seed=seed)))
    for seed, (name, change) in product(range(config.ablation_seeds), ABLATIONS.items()):
        runs.append(Run(f"ablation {name} seed {seed}", replace(short["derived"], seed=seed, **change)))
    pixels = replace(plain, network="paper", steps=4000, batch=256, learning_rate=1e-3, shift=0)
    for seed, (name, change) in product(range(config.ablation_seeds), PAPER_STACKS.items()):
        runs.append(Run(f"paper {name} seed {seed}", replace(pixels, seed=seed, **change)))
    return runs


def _sequences(config: TrainConfig, plain: TrainConfig, records: Records) -> list[Run]:
    """Recall, and the text if there is one: equal steps for both networks, C of the derived one by distances."""
    runs = []
    tasks: tuple[Any, ...] = ("recall",) if config.text is None else ("recall", "text")
    for task, network in product(tasks, NETWORKS):
        shown = replace(plain, task=task, network=network, size="tiny", batch=64, steps=SEQUENCE_STEPS)
        shown = replace(shown, relative=True)
        tuned = {rate: replace(shown, seed=TUNING_SEED, learning_rate=rate) for rate in SEQUENCE_RATES}
        tuning = [Run(f"tuning {task} {network} {rate:g}", config) for rate, config in tuned.items()]
        runs += tuning
        rate = _best(tuning, records, network)
        if rate is not None:
            seeds = range(config.ablation_seeds)
            runs += [
                Run(f"{task} {network} seed {seed}", replace(shown, learning_rate=rate, seed=seed)) for seed in seeds
            ]
    return runs


def _best(tuning: list[Run], records: Records, network: str) -> float | None:
    """The rate of the lowest validation loss among a network's tuning runs, once all are there."""
    losses = {}
    for run in tuning:
        if run.config.network == network:
            found = finished(run, records)
            if found is None:
                return None
            losses[run.config.learning_rate] = found["validation"]["loss"]
    return min(losses, key=lambda rate: losses[rate])


def finished(run: Run, records: Records) -> dict[str, Any] | None:
    """The record of a run that was made with its settings."""
    record = records["runs"].get(run.name)
    if record is None or record["settings"] != json.loads(json.dumps(run.settings)):
        return None
    result: dict[str, Any] = record["result"]
    return result


class Pool:
    """Processes, at most ``workers`` at once, each with one run."""

    def __init__(self, config: TrainConfig, output: Path, console: Console, records: Records, deadline: float) -> None:
        self._config, self._output, self._console = config, output, console
        self._records, self._deadline = records, deadline
        self._running: dict[str, tuple[Run, subprocess.Popen[bytes], float]] = {}
        self._failed: set[str] = set()

    def work(self) -> None:
        """Until all is done or the time is up; what is still running then is stopped, its checkpoints kept."""
        try:
            while time.monotonic() < self._deadline:
                self._collect()
                left = [run for run in planned(self._config, self._records) if self._is_open(run)]
                for run in left[: self._config.workers - len(self._running)]:
                    self._start(run)
                if not self._running:
                    break
                time.sleep(1)
        finally:
            for _, process, _ in self._running.values():
                process.kill()
                process.wait()
        open_runs = [run for run in planned(self._config, self._records) if finished(run, self._records) is None]
        self._say(f"{len(self._records['runs'])} runs finished, {len(open_runs)} known to be left")
        if self._failed:
            raise XentflowError(f"compare: expected every run to end well, got failures of {sorted(self._failed)}")

    def _is_open(self, run: Run) -> bool:
        known = run.name in self._running or run.name in self._failed
        return not known and finished(run, self._records) is None

    def _start(self, run: Run) -> None:
        folder = self._folder(run)
        # JSON is YAML.
        write_whole(folder / "config.yaml", (json.dumps(asdict(run.config), indent=1) + "\n").encode())
        # Threads of several runs at once would only get in each other's way.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        command = ["train", "--config", str(folder / "config.yaml"), "--output", str(folder)]
        with (folder / "said.txt").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "xentflow.cli", *command], stdout=said, stderr=said, env=environment
            )
        self._running[run.name] = (run, process, time.monotonic())

    def _collect(self) -> None:
        for name, (run, process, began) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[name]
            folder = self._folder(run)
            if process.returncode != 0:
                self._failed.add(name)
                self._say(f"{name} failed: {(folder / 'said.txt').read_text(errors='replace').strip()[-600:]}")
                continue
            result = json.loads((folder / "result.json").read_text())
            kept = {key: value for key, value in result.items() if key not in ("command", "config")}
            kept["seconds"] = round(time.monotonic() - began, 1)
            # The newest stands last, also where it takes an older one's place.
            self._records["runs"].pop(name, None)
            self._records["runs"][name] = {"settings": run.settings, "result": kept}
            _write(self._output, self._records)
            self._say(f"{name}: test accuracy {kept['test']['accuracy']:.4f}, loss {kept['test']['loss']:.4f} "
                      f"({kept['seconds']} s)")  # fmt: skip

    def _folder(self, run: Run) -> Path:
        name = run.name.replace(" ", "-").replace("–", "-").replace(",", "")
        return self._output / "runs" / name

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def read(output: Path) -> Records:
    """The records in a folder, or none yet."""
    path = output / "records.json"
    if not path.exists():
        return {"runs": {}}
    try:
        records: Records = json.loads(path.read_text())
        if not isinstance(records["runs"], dict):
            raise TypeError("runs is no table")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise XentflowError(f"{path}: expected the records of xentflow train --compare, got {error}") from error
    return records


def _write(output: Path, records: Mapping[str, Any]) -> None:
    write_whole(output / "records.json", (json.dumps(records, indent=1, allow_nan=False) + "\n").encode())

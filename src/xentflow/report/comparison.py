"""The comparison's records as tables: nothing here is computed that a record holds, and nothing is measured."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Records = Mapping[str, Any]
Found = Mapping[str, Any]

NETWORKS = ("derived", "transformer")


def as_markdown(records: Records) -> str:
    """Every table, for ``comparison.md`` and for the document that quotes them."""
    parts = [
        _heading(records),
        _tuning(records),
        _judged(records),
        _judged(records, short=True),
        _shuffled(records),
        _ablations(records),
        _paper(records),
        _sequences(records),
        _depth(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def difference(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of first − second, and Welch's interval of it: two samples of unknown and possibly unlike spread."""
    from scipy import stats

    if len({*first}) == len({*second}) == 1:
        return (first[0] - second[0],) * 3
    interval = stats.ttest_ind(first, second, equal_var=False).confidence_interval(confidence)
    return statistics.fmean(first) - statistics.fmean(second), float(interval.low), float(interval.high)


def _heading(records: Records) -> str:
    if "timing" not in records:
        return "Nothing has been measured yet."
    config, timing = records["config"], records["timing"]
    seconds = timing["seconds"]
    return (
        f"Size `{config['size']}`, {config['patch']}×{config['patch']} patches, batches of {config['batch']}, "
        f"training images {_augmentation(config['shift'])}. A step takes "
        f"{1e3 * seconds['derived']:.2f} ms (derived) and {1e3 * seconds['transformer']:.2f} ms (transformer), both "
        f"{'compiled and ' if timing['of']['compiled'] else ''}measured interleaved, device `{config['device']}`; "
        f"with {config['budget']:g} s of steps for each run that is {int(config['budget'] / seconds['derived']):,} and "
        f"{int(config['budget'] / seconds['transformer']):,} steps."
    )


def _augmentation(shift: int) -> str:
    pixels = "a pixel" if shift == 1 else f"{shift} pixels"
    return f"moved by up to {pixels} and mirrored every other time" if shift else "as they are"


def _tuning(records: Records) -> str:
    names = [name for name in records["runs"] if name.startswith("tuning ")]
    rows = []
    for name in names:
        settings, result = records["runs"][name]["settings"], records["runs"][name]["result"]
        rows.append(
            (
                settings["task"],
                settings["network"],
                f"{settings['learning_rate']:g}",
                f"{result['validation']['loss']:.4f}",
                f"{result['validation']['accuracy']:.4f}",
            )
        )
    rows.sort(key=lambda row: (row[0], row[1], float(row[2])))
    heading = ("task", "network", "learning rate", "validation loss", "validation accuracy")
    return _table("Learning rates", heading, rows) if rows else ""


def _judged(records: Records, short: bool = False) -> str:
    prefix, rows, accuracies, losses = "short " if short else "", [], {}, {}
    for network in NETWORKS:
        found = _seeds(records, f"{prefix}{network} seed ")
        if len(found) < 2:
            return ""
        accuracies[network] = _accuracies(found)
        losses[network] = [result["test"]["loss"] for result in found]
        rows.append(
            (
                network,
                f"{found[0]['parameters']:,}",
                f"{found[0]['steps']:,}",
                f"{_settings(records, f'{prefix}{network} seed ')['learning_rate']:g}",
                _spread([result["training"]["loss"] for result in found], 4),
                _spread(losses[network], 4),
                _spread(accuracies[network], 4),
                ", ".join(f"{accuracy:.4f}" for accuracy in accuracies[network]),
            )
        )
    heading = (
        "network", "parameters", "steps", "learning rate", "training loss", "test loss", "test accuracy", "its seeds",
    )  # fmt: skip
    title = f"{records['config']['task']}, equal parameters and equal time" + (", a quarter of it" if short else "")
    return _table(title, heading, rows) + (
        f"\n\nDerived minus transformer, with Welch's 95 % interval: accuracy {_difference(*accuracies.values())}; "
        f"test loss {_difference(*losses.values())}."
    )


def _difference(first: Sequence[float], second: Sequence[float]) -> str:
    mean, low, high = difference(first, second)
    verdict = "excludes" if low > 0 or high < 0 else "includes"
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f}, which {verdict} zero)"


def _shuffled(records: Records) -> str:
    rows = []
    for network in NETWORKS:
        found = _seeds(records, f"shuffled {network} seed ")
        if found:
            losses = [result["test"]["loss"] for result in found]
            rows.append((network, str(len(found)), _spread(losses, 4), _spread(_accuracies(found), 4)))
    title = (
        f"Trained on shuffled labels; chance among ten classes is a loss of {math.log(10):.4f} and an accuracy of 0.1"
    )
    return _table(title, ("network", "seeds", "test loss", "test accuracy"), rows)


def _sequences(records: Records) -> str:
    parts = []
    for task, quantity, title in (
        ("recall", "accuracy", "Associative recall"),
        ("text", "loss", "The next character: nats each"),
    ):
        rows, means = [], {}
        for network in NETWORKS:
            found = _seeds(records, f"{task} {network} seed ")
            if found:
                values = [result["test"][quantity] for result in found]
                means[network] = statistics.fmean(values)
                rows.append((network, f"{found[0]['parameters']:,}", f"{found[0]['steps']:,}", _spread(values, 4)))
        part = _table(title, ("network", "parameters", "steps", f"test {quantity}"), rows)
        if part and task == "text" and len(means) == 2:
            part += f"\n\nDerived over transformer: {means['derived'] / means['transformer'] - 1:+.2%}."
        parts.append(part)
    return "\n\n".join(part for part in parts if part)


def _ablations(records: Records) -> str:
    names = list(dict.fromkeys(_choice(name) for name in records["runs"] if name.startswith("ablation ")))
    base = _seeds(records, "short derived seed ")
    if not names or not base:
        return ""
    mean = statistics.fmean(_accuracies(base))
    rows = [("nothing", str(len(base)), f"{base[0]['parameters']:,}", _spread(_accuracies(base), 4), "")]
    for name in names:
        found = _seeds(records, f"ablation {name} seed ")
        values = _accuracies(found)
        change = f"{statistics.fmean(values) - mean:+.4f}"
        rows.append((name, str(len(found)), f"{found[0]['parameters']:,}", _spread(values, 4), change))
    heading = ("what is changed", "seeds", "parameters", "test accuracy", "change")
    return _table(f"Ablations: the derived network, {base[0]['steps']:,} steps at one learning rate", heading, rows)


def _paper(records: Records) -> str:
    rows = []
    for name in dict.fromkeys(_choice(name) for name in records["runs"] if name.startswith("paper ")):
        found = _seeds(records, f"paper {name} seed ")
        losses = [result["test"]["loss"] for result in found]
        rows.append(
            (name, str(len(found)), f"{found[0]['parameters']:,}", _spread(losses, 4), _spread(_accuracies(found), 4))
        )
    heading = ("how θ is found", "seeds", "parameters", "test loss", "test accuracy")
    return _table("The paper's stack on pixels, C from a learned network", heading, rows)


def _accuracies(results: Sequence[Found]) -> list[float]:
    return [result["test"]["accuracy"] for result in results]


def _depth(records: Records) -> str:
    parts = []
    rows: list[Sequence[str]]
    derived = _of_seed_0(records, "derived")
    if derived and "own_energy" in derived:
        rows = [
            (str(number // 2 + 1), ("mix", "sort")[number % 2], f"{before:.4f}", f"{after:.4f}", f"{cosine:.4f}")
            for number, ((before, after), cosine) in enumerate(
                zip(derived["own_energy"], derived["own_cosine"], strict=True)
            )
        ]
        of_halves = ("layer", "half", "own ℓ before", "after", "cosine with its own flow")
        parts.append(_table("Each half's own energy, per token, seed 0", of_halves, rows))
    for network in NETWORKS:
        depth = _of_seed_0(records, network)
        if depth:
            energy, rows = depth["readout_energy_at_start"], []
            for number, layer in enumerate(depth["readout"], start=1):
                energy += layer["change_of_energy"]
                rows.append(
                    (
                        str(number),
                        f"{energy:.4f}",
                        f"{layer['change_of_energy']:+.4f}",
                        f"{layer['descending']:.0%}",
                        f"{layer['cosine']:+.4f}",
                        f"{layer['control_deviation']:.4f}",
                    )
                )
            heading = ("half" if network == "derived" else "layer", "energy after", "change", "samples descending",
                       "cosine with descent", "random directions, sd")  # fmt: skip
            title = f"The read-out's energy through depth, {network}, seed 0"
            start = f"At the embedding: {depth['readout_energy_at_start']:.4f}."
            parts.append(_table(title, heading, rows) + "\n\n" + start)
    return "\n\n".join(parts)


def _of_seed_0(records: Records, network: str) -> Any:
    run = records["runs"].get(f"{network} seed 0")
    return None if run is None else run["result"]["depth"]


def _seeds(records: Records, prefix: str) -> list[Found]:
    """Results of all seeds of a kind, in the order of the seeds; of settings that have changed, the last ones'."""
    runs = {name: run for name, run in records["runs"].items() if _is_seed(name, prefix)}
    wanted = _settings(records, prefix)
    alike = [int(name.removeprefix(prefix)) for name, run in runs.items() if _but_the_seed(run) == wanted]
    return [runs[f"{prefix}{number}"]["result"] for number in sorted(alike)]


def _settings(records: Records, prefix: str) -> dict[str, Any]:
    """Those of the last run of a kind, whatever its seed."""
    runs = [run for name, run in records["runs"].items() if _is_seed(name, prefix)]
    return _but_the_seed(runs[-1]) if runs else {}


def _but_the_seed(run: Found) -> dict[str, Any]:
    return {name: value for name, value in run["settings"].items() if name != "seed"}


def _is_seed(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.removeprefix(prefix).isdigit()


def _choice(name: str) -> str:
    """What stands between the kind of a run and its seed."""
    return name.partition(" ")[2].rpartition(" seed ")[0]


def _spread(values: Sequence[float], digits: int) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _table(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heading, *rows)]
    return f"### {title}\n\n" + "\n".join([lines[0], "|---" * len(heading) + "|", *lines[1:]])

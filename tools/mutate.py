"""Mutation testing of the mathematics: break it one place at a time, and see whether anything notices.

Every mutant is one small edit of one module (a sign flipped, a transpose dropped, an axis swapped, ...), made in a
copy of the sources in a temporary directory, where the checks then run. A mutant that every check passes has survived.

    python tools/mutate.py --modules gradient models
    python tools/mutate.py --modules gradient --tests "tests/test_gradient.py -k linear" --command "xentflow verify"
    python tools/mutate.py --modules models --list

A mutant is killed when any one check fails or runs into the time-out. Checks run in the repository's root with
``PYTHONPATH`` at the mutated copy. Exit status: 0 if none survived.
"""

import argparse
import ast
import copy
import difflib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "xentflow"
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
DEFAULT_MODULES = ("potentials", "objective", "models", "gradient")

FLIPPED_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.MatMult: ast.Mult}
FLIPPED_COMPARISONS = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
SWAPPED_NAMES = {
    "query_pullback": "key_pullback",
    "key_pullback": "query_pullback",
    "sequence": "classes",
    "classes": "sequence",
    "both": "own",
    "own": "both",
}
CHANGED_NUMBERS = {0.5: 1.0, 2: 1, 0.25: 0.5, 1: 2, 0: 1}
MINUS_DIMENSIONS = (1, 2)  # −1 and −2, which syntax trees hold as a minus sign and a number


@dataclass(frozen=True)
class Mutant:
    """One edit: where, what it does, and the whole source with it made."""

    file: Path
    line: int
    what: str
    before: str
    after: str

    def diff(self) -> str:
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=0)
        return "\n".join("    " + line for line in list(lines)[3:])


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every mutated form of one node, with a word on what was done."""
    match node:
        case ast.BinOp(op=op) if type(op) in FLIPPED_OPERATORS:
            new = copy.deepcopy(node)
            new.op = FLIPPED_OPERATORS[type(op)]()
            yield f"{type(op).__name__} → {type(new.op).__name__}", new
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if value in MINUS_DIMENSIONS:
            yield f"-{value} → -{3 - value}", ast.UnaryOp(ast.USub(), ast.Constant(3 - value))
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert() as op, operand=operand):
            yield f"{type(op).__name__} removed", copy.deepcopy(operand)
        case ast.Attribute(attr="mT", value=value):
            yield ".mT dropped", copy.deepcopy(value)
        case ast.Attribute(attr=name) if name in SWAPPED_NAMES:
            new = copy.deepcopy(node)
            new.attr = SWAPPED_NAMES[name]
            yield f"{name} → {new.attr}", new
        case ast.Compare(ops=[op]) if type(op) in FLIPPED_COMPARISONS:
            new = copy.deepcopy(node)
            new.ops = [FLIPPED_COMPARISONS[type(op)]()]
            yield f"{type(op).__name__} → {type(new.ops[0]).__name__}", new
        case ast.BoolOp(op=op):
            new = copy.deepcopy(node)
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"{type(op).__name__} → {type(new.op).__name__}", new
        case ast.Constant(value=bool(value)):
            yield f"{value} → {not value}", ast.Constant(not value)
        case ast.Constant(value=str(value)) if value in SWAPPED_NAMES:
            yield f'"{value}" → "{SWAPPED_NAMES[value]}"', ast.Constant(SWAPPED_NAMES[value])
        case ast.Constant(value=int(value) | float(value)) if value in CHANGED_NUMBERS:
            yield f"{value} → {CHANGED_NUMBERS[value]}", ast.Constant(CHANGED_NUMBERS[value])
        case ast.Call(func=ast.Attribute(value=value, attr="masked_fill"), args=[mask, filling]):
            yield "masked_fill dropped", copy.deepcopy(value)
            new = copy.deepcopy(node)
            new.args = [copy.deepcopy(mask), ast.BinOp(copy.deepcopy(filling), ast.Add(), ast.Constant(1))]
            if "float" not in ast.unparse(filling):  # infinity or NaN plus one would be the same
                yield "masked_fill value + 1", new


def mutable_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes whose change could matter to a result: no annotations, error messages or names of types."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
            continue
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            # The number below a minus sign is mutated with its sign, not again alone.
            yield node
            continue
        yield node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(node, ast.Subscript) and "Literal" in ast.unparse(node.value):
                continue
            children = value if isinstance(value, list) else [value]
            pending += [child for child in children if isinstance(child, ast.AST)]


def mutants(file: Path) -> list[Mutant]:
    """All mutants of one file, made by replacing the text of one node: the rest stays as it is written."""
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw, found = source.encode(), []
    for node in mutable_nodes(ast.parse(source)):
        for what, new in replacements(node):
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            # Parentheses keep the new text one operand, whatever stands around it.
            after = (raw[:start] + f"({ast.unparse(new)})".encode() + raw[stop:]).decode()
            found.append(Mutant(file, node.lineno, what, source, after))
    unique = {mutant.after: mutant for mutant in found}
    return sorted(unique.values(), key=lambda mutant: mutant.line)


def default_tests(modules: list[str]) -> str:
    """The test files of the modules themselves, those of what stands directly on them, and what must be refused."""
    names = dict.fromkeys([*modules, "objective", "gradient", "flow", "masks", "derive"])
    files = [f"tests/test_{name}.py" for name in names if (ROOT / f"tests/test_{name}.py").exists()]
    return " ".join([*files, "tests/bad_input"])


def passes(command: list[str], source: Path, timeout: float) -> tuple[bool, str]:
    """Whether a check succeeds on the sources in a directory, and the end of what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return False, f"ran longer than {timeout:g} s"
    return done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def survives(mutant: Mutant, commands: list[list[str]], timeout: float) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copied = shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        (copied / mutant.file.relative_to(ROOT / "src")).write_text(mutant.after, encoding="utf-8")
        return all(passes(command, copied, timeout)[0] for command in commands)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=list(DEFAULT_MODULES), help="modules of the package to break")
    parser.add_argument("--tests", help="pytest's arguments; by default the test files of the modules; '' runs none")
    parser.add_argument("--command", action="append", default=[], help="another check, a shell line; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a check may run before it fails")
    parser.add_argument("--sample", type=int, help="only so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--match", default="", help="only mutants whose file:line and description hold this text")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    files = [ROOT / "src" / PACKAGE / f"{module}.py" for module in options.modules]
    missing = [str(file.relative_to(ROOT)) for file in files if not file.exists()]
    if missing:
        print(f"no such module: {', '.join(missing)}", file=sys.stderr)
        return 2

    def place(mutant: Mutant) -> str:
        return f"{mutant.file.relative_to(ROOT)}:{mutant.line}: {mutant.what}"

    chosen = [mutant for file in files for mutant in mutants(file) if options.match in place(mutant)]
    if options.sample is not None and options.sample < len(chosen):
        chosen = random.Random(options.seed).sample(chosen, options.sample)
    if options.list:
        print("\n".join(f"{place(mutant)}\n{mutant.diff()}" for mutant in chosen))
        return 0

    tests = default_tests(options.modules) if options.tests is None else options.tests
    commands = [[sys.executable, *PYTEST, *shlex.split(tests)]] if tests else []
    commands += [shlex.split(line) for line in options.command]
    for command in commands:
        fine, output = passes(command, ROOT / "src", options.timeout)
        if not fine:
            print(f"fails on the unbroken sources, so it can judge nothing: {shlex.join(command)}\n{output}")
            return 2

    survivors = []
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = pool.map(lambda mutant: survives(mutant, commands, options.timeout), chosen)
        for count, (mutant, survived) in enumerate(zip(chosen, verdicts, strict=True), 1):
            if survived:
                survivors.append(mutant)
            print(f"[{count}/{len(chosen)}] {'SURVIVED' if survived else 'killed'} {place(mutant)}", flush=True)
    for mutant in survivors:
        print(f"\nSURVIVED {place(mutant)}\n{mutant.diff()}")
    print(f"\n{len(chosen)} mutants, {len(chosen) - len(survivors)} killed, {len(survivors)} survived")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())

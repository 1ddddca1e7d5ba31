"""Dependencies point one way, and the package is quick to import."""

import ast
import functools
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).resolve().parent.parent / "hf_zero"

# The house, from the ground up: a floor may import from the floors below it, and within itself where no circle arises.
_FLOORS = [
    ["errors", "layout", "tables", "changes", "under_way", "parameters"],
    ["torch_compat", "host"],
    ["config"],
    ["comm"],
    ["engine.__init__", "engine.ranks"],
    ["engine.parameters"],
    ["engine.units"],
    ["engine.backward"],
    ["engine.modules"],
    ["engine.tiles"],
    ["engine.engine"],
    ["engine.gathered_parameters"],
    ["optim"],
    ["plan"],
    ["checkpoint.__init__", "checkpoint.files"],
    ["checkpoint.ranks", "checkpoint.savable", "checkpoint.held_parameters"],
    ["checkpoint.commit", "checkpoint.model_state", "checkpoint.optimizer_state", "checkpoint.export"],
    ["checkpoint.offline", "checkpoint.importing"],
    ["checkpoint.handover"],
    ["trace"],
    ["sharding"],
    ["integrations.__init__", "integrations.random_state", "integrations.vllm_weights"],
    ["integrations.accelerate"],
    ["integrations.pipeline", "integrations.trainer"],
    ["integrations.everywhere"],
    ["bench"],
    ["run"],
    ["cli"],
]
_NOT_BELOW_CHECKPOINTS = {"accelerate", "transformers", "yaml", "rich", "datasets", "peft", "safetensors", "numpy"}


class _Imports(ast.NodeVisitor):
    """Collects what a file imports when it runs, inside functions too: `a.b` for `from a import b`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":  # names for annotations only
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "relative import"
        self.names.update(f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _modules() -> dict[str, Path]:
    """The files of hf_zero by name; packages' `__init__` are left out when empty."""
    found = {".".join(path.relative_to(_PACKAGE).with_suffix("").parts): path for path in _PACKAGE.rglob("*.py")}
    return {name: path for name, path in found.items() if name != "__init__" and path.read_text().strip()}


@functools.cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def _nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(_tree(source)))


@functools.cache
def _imports(source: str) -> frozenset[str]:
    visitor = _Imports()
    visitor.visit(_tree(source))
    return frozenset(visitor.names)


def _own(names: Set[str], modules: dict[str, Path]) -> set[str]:
    """Those of `names` that are files of hf_zero."""
    found = set()
    for name in names:
        parts = name.split(".")[1:] if name.startswith("hf_zero.") else []
        candidates = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        found.update([each for each in candidates if each in modules][:1])
    return found


def _floor(name: str) -> int:
    for index, line in enumerate(_FLOORS):
        if any(name == entry or name.startswith(f"{entry}.") for entry in line):
            return index
    pytest.fail(f"hf_zero/{name.replace('.', '/')}.py has no place in tests/test_imports.py: add it where it belongs")


def _upward(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, others in sorted(imports.items())
        for other in sorted(others)
        if _floor(other) > _floor(name)
    ]


def _circles(imports: dict[str, set[str]]) -> set[str]:
    """The files that lie on a circle, or import one that does."""
    left = {name: set(others) for name, others in imports.items()}
    while done := {name for name, others in left.items() if not others}:
        left = {name: others - done for name, others in left.items() if name not in done}
    return set(left)


def _graph() -> dict[str, set[str]]:
    modules = _modules()
    return {name: _own(_imports(path.read_text()), modules) - {name} for name, path in modules.items()}


def test_imports_point_down() -> None:
    assert _upward(_graph()) == []


def test_imports_form_no_circle() -> None:
    assert _circles(_graph()) == set()


def test_a_dependency_that_points_up_or_in_a_circle_is_found() -> None:
    source = (
        "def f():\n    from hf_zero.engine.engine import ZeroEngine\nif TYPE_CHECKING:\n    from hf_zero import cli\n"
    )
    own = _own(_imports(source), _modules())
    assert own == {"engine.engine"}
    assert _upward({"comm.native": own}) == ["comm.native imports engine.engine"]
    assert _circles({"a": {"b"}, "b": {"a"}, "c": set()}) == {"a", "b"}


# What imports by names that are not known before: a class that a checkpoint names.
_IMPORTS_BY_NAME = {"checkpoint.files.state_values"}


def _hidden_imports(source: str) -> list[str]:
    """Imports of hf_zero, or of nobody knows what, that `_imports` does not see: a circle could hide behind them."""
    calls = [node for node in _nodes(source) if isinstance(node, ast.Call)]
    by_name = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in ("import_module", "__import__")]
    return [
        ast.unparse(call)
        for call in by_name
        if not isinstance(call.args[0], ast.Constant) or str(call.args[0].value).split(".")[0] == "hf_zero"
    ]


def test_no_file_hides_what_it_imports() -> None:
    found = {name: _hidden_imports(path.read_text()) for name, path in _modules().items()}
    assert {name: hidden for name, hidden in found.items() if hidden and name not in _IMPORTS_BY_NAME} == {}


def test_an_import_by_name_is_found() -> None:
    hidden = ["import_module('hf_zero.cli')", "importlib.import_module(f'hf_zero.{name}')", "__import__('hf_zero')"]
    source = "".join(f"def f():\n    {each}\n" for each in [*hidden, "importlib.import_module('peft.tuners')"])
    assert _hidden_imports(source) == hidden


def test_engine_and_all_below_know_torch_only() -> None:
    for name, path in _modules().items():
        if _floor(name) < _floor("plan") and not name.startswith("config."):
            tops = {each.split(".")[0] for each in _imports(path.read_text())}
            assert not tops & _NOT_BELOW_CHECKPOINTS, f"{name} imports {tops & _NOT_BELOW_CHECKPOINTS}"


@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("hf_zero", ""),
        ("hf_zero", "3"),  # then plain TrainingArguments and Accelerators are seen to, but not imported
        ("hf_zero.config.zero_config", ""),
        ("hf_zero.errors", ""),
        ("hf_zero.comm.ledger", ""),
    ],
)
def test_import_does_not_load_torch(module: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_CONFIG", config)
    code = f"import {module}, sys; print(*sorted({{'torch', 'transformers', 'accelerate', 'yaml'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=_PACKAGE.parent)
    assert done.stdout.split() == []


def test_every_public_name_can_be_imported() -> None:
    import hf_zero
    import hf_zero.errors

    assert sorted(hf_zero.__all__) == list(hf_zero.__all__)
    for name in hf_zero.__all__:
        assert getattr(hf_zero, name).__name__ == name
    errors = {name for name, found in vars(hf_zero.errors).items() if isinstance(found, type)}
    assert errors <= set(hf_zero.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        _ = hf_zero.no_such


# Functions of torch that make a tensor on the default device, which is the user's to set.
_FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
}


@pytest.mark.parametrize("name", [name for name in _modules() if not name.startswith("bench")])
def test_tensors_are_made_on_a_device_that_is_named(name: str) -> None:
    for node in _nodes(_modules()[name].read_text()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FACTORIES:
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            assert not is_torch or any(each.arg == "device" for each in node.keywords), f"{name}: line {node.lineno}"


def test_modules_are_asked_for_their_parameters_in_one_place() -> None:
    """Classes may have a `parameters` of their own, see hf_zero/parameters.py; benchmarks have none of these."""
    found = [
        f"{path.relative_to(_PACKAGE)}:{node.lineno}"
        for path in _PACKAGE.rglob("*.py")
        if path.relative_to(_PACKAGE).parts[0] != "bench"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parameters"
    ]
    assert not found, found

"""What no source file of the project may call or import, so that nothing that is read can run code."""

import ast
import re
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

SOURCES = [
    path for top in ("grpo_core", "tasks", "flows", "configs", "data") for path in (REPOSITORY / top).rglob("*.py")
]


@cache
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(REPOSITORY).as_posix(): ast.parse(path.read_text()) for path in SOURCES}


@cache
def calls() -> list[tuple[str, ast.Call, str]]:
    nodes = [(path, node) for path, tree in trees().items() for node in ast.walk(tree)]
    return [(path, node, dotted(node.func)) for path, node in nodes if isinstance(node, ast.Call)]


def dotted(node: ast.expr) -> str:
    """`a.b` of names, `.b` where it is called on something else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


class TestSources:
    """No way to read a pickle, or to run code that lies beside a model, is in the sources at all."""

    UNSAFE_MODULES = ("marshal", "shelve", "dill", "joblib", "cloudpickle", "jsonpickle")

    def test_nothing_unpickles(self) -> None:
        found = [
            f"{path}: {name}"
            for path, call, name in calls()
            if re.fullmatch(r"pickle\.(load|loads|Unpickler)|torch\.(load|save)|(np|numpy)\.load|eval|exec", name)
            and not (name == "torch.load" and given(call, "weights_only") == ["True"])
        ]
        assert found == []
        imported = [
            f"{path}: {name}"
            for path, tree in trees().items()
            for node in ast.walk(tree)
            for name in imports(node)
            if name.split(".")[0] in self.UNSAFE_MODULES
        ]
        assert imported == []

    def test_remote_code_is_never_trusted(self) -> None:
        trusted = [value for _, call, _ in calls() for value in given(call, "trust_remote_code")]
        assert len(trusted) >= 5
        assert {*trusted} == {"False"}
        automatic = [
            (path, call) for path, call, name in calls() if re.search(r"(\bAuto\w+|Pipeline)\.from_pretrained$", name)
        ]
        assert len(automatic) >= 4
        assert [path for path, call in automatic if not given(call, "trust_remote_code")] == []

    def test_no_command_line_is_put_together_from_text(self) -> None:
        found = [
            f"{path}: {name}"
            for path, call, name in calls()
            if name in ("os.system", "os.popen", "subprocess.getoutput") or given(call, "shell") == ["True"]
        ]
        assert found == []


def given(call: ast.Call, name: str) -> list[str]:
    """The source of a keyword argument's value."""
    return [ast.unparse(each.value) for each in call.keywords if each.arg == name]

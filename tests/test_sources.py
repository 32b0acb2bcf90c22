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
    return [(path, node, ast.unparse(node.func)) for path, node in nodes if isinstance(node, ast.Call)]


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
            and not (name == "torch.load" and ("weights_only", "True") in keywords(call))
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
        given = [(path, value) for path, call, _ in calls() for key, value in keywords(call) if "trust_remote" in key]
        assert len(given) >= 5
        assert {value for _, value in given} == {"False"}
        automatic = [
            (path, call) for path, call, name in calls() if re.search(r"(\bAuto\w+|Pipeline)\.from_pretrained$", name)
        ]
        assert len(automatic) >= 4
        assert [path for path, call in automatic if ("trust_remote_code", "False") not in keywords(call)] == []

    def test_no_command_line_is_put_together_from_text(self) -> None:
        found = [
            f"{path}: {name}"
            for path, call, name in calls()
            if name in ("os.system", "os.popen", "subprocess.getoutput") or ("shell", "True") in keywords(call)
        ]
        assert found == []


def keywords(call: ast.Call) -> list[tuple[str, str]]:
    return [(keyword.arg or "", ast.unparse(keyword.value)) for keyword in call.keywords]

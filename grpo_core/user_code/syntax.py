"""Source code as keys see it: its syntax tree without comments and docstrings, and what it imports."""

import ast
import threading
import warnings

Import = tuple[str, str | None]
"""A module and a name in it; None for the module itself."""

PARSING = threading.RLock()
"""Python 3.11 raises SystemError in one of two threads that build syntax trees at once."""


def parse(source: str | bytes) -> ast.Module:
    """Return the syntax tree; raises SyntaxError or ValueError for what is no Python."""
    with PARSING, warnings.catch_warnings():
        # Whoever runs the code hears them.
        warnings.simplefilter("ignore")
        return ast.parse(source)


class SyntaxWalk:
    """One pass over a syntax tree.

    Attributes:
        text: equal, joined, for sources that differ in format, comments and docstrings alone.
        names: that are read or bound.
        imports: the bound name, what it is bound to, and whether the import runs, which one for types does not.
        beyond: lines of relative imports that lead out of the packages' root.
    """

    def __init__(self, package: str, *, passes_on: bool = False) -> None:
        """Begin in a package (dotted; empty at the root); `passes_on` leaves imports out of the text."""
        self.package, self.passes_on = package, passes_on
        self.text: list[str] = []
        self.names: set[str] = set()
        self.imports: list[tuple[str, Import, bool]] = []
        self.beyond: list[int] = []

    def visit(self, node: ast.AST) -> None:
        """Add a node and all below it."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._add_imports(node, runs=True)
            if self.passes_on:
                return
        if isinstance(node, ast.If) and _is_for_types(node.test):
            for statement in node.body:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    self._add_imports(statement, runs=False)
            for statement in node.orelse:
                self.visit(statement)
            return
        if isinstance(node, ast.Name):
            self.names.add(node.id)
        self.text.append(f"({type(node).__name__}")
        for name in node._fields:
            value = getattr(node, name, None)
            values = [each for each in value if not _is_text(each)] if isinstance(value, list) else [value]
            # Fields that are empty are left out: later versions of Python add some.
            if value is None or not values:
                continue
            self.text.append(name)
            for each in values:
                if isinstance(each, ast.AST):
                    self.visit(each)
                else:
                    self.text.append(repr(each))
        self.text.append(")")

    def _add_imports(self, node: ast.Import | ast.ImportFrom, *, runs: bool) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                self.imports.append((alias.asname or alias.name.split(".")[0], (alias.name, None), runs))
            elif (target := self._target(node)) is None:
                self.beyond.append(node.lineno)
            else:
                self.imports.append((alias.asname or alias.name, (target, alias.name), runs))

    def _target(self, node: ast.ImportFrom) -> str | None:
        if not node.level:
            return node.module or ""
        parents = self.package.split(".") if self.package else []
        if node.level - 1 > len(parents):
            return None
        return ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])


def _is_for_types(test: ast.expr) -> bool:
    named = test.id if isinstance(test, ast.Name) else getattr(test, "attr", None)
    return named == "TYPE_CHECKING"


def _is_text(statement: object) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )

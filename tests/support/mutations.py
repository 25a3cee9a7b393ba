"""Mutations of Python source: small changes after which a program should behave differently.

Left out is what changes no behaviour that a test should notice: docstrings, texts, what is logged,
annotations, decorators, `__repr__`, and the arguments of what is raised; and what any test notices:
attributes that ``__init__`` does not set, and functions that return nothing and must not.
"""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

import attrs

_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SHIFTED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_NAMES = {"all": "any", "any": "all", "min": "max", "max": "min"}
_LOGGERS = {"_log", "log", "logger", "logging", "warnings"}
_CHANGED = (ast.Compare, ast.UnaryOp, ast.Constant)  # conditions that change as expressions
_UNTESTED = {"__repr__", "__str__"}
_MESSAGES = {"msg", "message"}


@attrs.frozen
class Mutation:
    """A part of a file, and what takes its place.

    Attributes:
        file: The file, from the root of the repository.
        line: Its line, counted from 1.
        column: Where the part begins, in bytes of UTF-8.
        before: The part.
        after: What takes its place.
    """

    file: str
    line: int
    column: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.line}  {before:.90}  ->  {after:.90}"

    def applied(self, source: str) -> str:
        """The source with the mutation.

        Raises:
            ValueError: The part is not where it was.
        """
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        content, part = b"".join(lines), self.before.encode()
        if content[start : start + len(part)] != part:
            msg = f"{self.file}:{self.line} has changed since this mutation was drawn"
            raise ValueError(msg)
        return (content[:start] + self.after.encode() + content[start + len(part) :]).decode()


def mutations_of(file: PurePosixPath, source: str) -> list[Mutation]:
    """All mutations of a file, in its order."""
    tree, lines = ast.parse(source), source.encode().splitlines(keepends=True)
    found = []
    for node, after in _changes(tree):
        before = _segment(lines, node)
        if before != after:
            found.append(Mutation(str(file), node.lineno, node.col_offset, before, after))
    return found


def _segment(lines: list[bytes], node: ast.stmt | ast.expr) -> str:
    """The text of a node; `ast.get_source_segment` would split all lines for each."""
    assert node.end_lineno is not None
    part = lines[node.lineno - 1 : node.end_lineno]
    part[-1] = part[-1][: node.end_col_offset]
    part[0] = part[0][node.col_offset :]
    return b"".join(part).decode()


def _changes(
    node: ast.AST, function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Nodes at and below this one that can be changed, and the text of the changed ones."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node
    if isinstance(node, ast.stmt):
        yield from _changed_statement(node, function)
    elif isinstance(node, ast.expr):
        for changed in _changed_expressions(node):
            yield node, f"({ast.unparse(changed)})" if _is_open(changed) else ast.unparse(changed)
    for part in _parts(node):
        yield from _changes(part, function)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node in which changes matter."""
    match node:
        case ast.FunctionDef(name=name) if name in _UNTESTED:
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            if not isinstance(node, ast.ClassDef):
                yield from (one for one in node.args.defaults + node.args.kw_defaults if one)
            yield from node.body
        case ast.Expr(value=ast.Constant()) | ast.Raise() | ast.Assert() | ast.JoinedStr():
            return
        case ast.Expr(value=ast.Call() as call) if _is_logging(call):
            return
        case ast.Assign(targets=[ast.Name(id=name)]) if name in _MESSAGES:
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.AnnAssign():
            yield from () if node.value is None else (node.value,)
        case ast.Call(func=ast.Name(id="cast" | "TypeVar")):
            return
        case ast.Import() | ast.ImportFrom():
            return
        case _:
            yield from ast.iter_child_nodes(node)


def _changed_statement(
    node: ast.stmt, function: ast.FunctionDef | ast.AsyncFunctionDef | None
) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    is_init = function is not None and function.name == "__init__"
    may_be_none = function is not None and "None" in ast.unparse(function.returns or function)
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="__init__"))):
            return
        case ast.Assign(targets=[ast.Attribute()]) if is_init:
            return
        case ast.Expr(value=ast.Call() as call) if not _is_logging(call):
            yield node, "pass"
        case ast.Expr(value=ast.Await(value=ast.Call())):
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield node, "pass"
        case ast.AugAssign() | ast.Delete() | ast.Raise():
            yield node, "pass"
        case ast.Continue():
            yield node, "break"
        case ast.Break():
            yield node, "continue"
        case ast.Return(value=ast.expr() as value) if may_be_none and not _is_false(value):
            yield node, "return None"
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, _CHANGED):
            yield test, f"not ({ast.unparse(test)})"


def _changed_expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=[one]):
            for table in (_FLIPPED, _SHIFTED):
                if type(one) in table:
                    yield ast.Compare(node.left, [table[type(one)]()], node.comparators)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp(op=op) if type(op) in _OPERATORS and not _is_text(node):
            yield ast.BinOp(node.left, _OPERATORS[type(op)](), node.right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            yield ast.Call(ast.Name(_NAMES[name]), node.args, node.keywords)
        case ast.IfExp(test=test):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), node.body, node.orelse)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            yield from _without_conditions(node)


def _without_conditions(
    node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
) -> Iterator[ast.expr]:
    """A comprehension of everything."""
    for number, loop in enumerate(node.generators):
        if loop.ifs:
            every = ast.comprehension(loop.target, loop.iter, [], loop.is_async)
            loops = [*node.generators[:number], every, *node.generators[number + 1 :]]
            fields = dict(ast.iter_fields(node)) | {"generators": loops}
            yield type(node)(**fields)


def _is_open(node: ast.expr) -> bool:
    """Whether other operators beside it would take its parts."""
    open_ones = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp)
    is_negative = isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 0
    return isinstance(node, open_ones) or is_negative


def _is_logging(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    return isinstance(owner, ast.Name) and (owner.id in _LOGGERS or owner.id == "_warn")


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _is_text(node: ast.expr) -> bool:
    """Whether it is surely made of texts, types or lists, whose difference is an error."""
    match node:
        case ast.BinOp():
            return _is_text(node.left) or _is_text(node.right)
        case ast.Constant(value=value):
            return not isinstance(value, int | float)
        case ast.JoinedStr() | ast.List() | ast.Tuple() | ast.ListComp():
            return True
    return False

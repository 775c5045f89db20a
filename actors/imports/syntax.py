"""Values of a Python script out of its syntax tree. Nothing of the script is run.

Statements are followed in order: constants, names, arithmetic, f-strings, containers, calls of the script's own
functions. Where the tree does not say which branch is taken, names that differ afterwards are unreadable. Every other
call stays a `Call` with its arguments, so that a reader can look for the calls it knows.
"""

import ast
import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.imports.job import Unreadable
from schemas.errors import ConfigError

MAX_DEPTH = 8
"""Calls of the script's functions inside each other that are followed."""
MAX_STATEMENTS = 20_000
"""Statements that are followed, against scripts that call themselves without end."""
ITEM = "__getitem__"
"""Name of the method that an item of a call's result stands for: `load_dataset("owner/name")["train"]`."""


@dataclass(frozen=True)
class Imported:
    """Name that an import statement binds, or an attribute of one: `torch.bfloat16`."""

    path: str
    """Dotted path."""


@dataclass
class Local:
    """Function, class or lambda of the script."""

    name: str
    """Name, empty for a lambda."""
    node: ast.AST
    """Definition."""
    importable: bool
    """Whether another process can import it from the script: a definition at the top level."""

    def __deepcopy__(self, _: Any) -> "Local":
        """Return the same object: definitions do not change."""
        return self


@dataclass
class Call:
    """Call that is not followed."""

    function: Any
    """Value called: `Imported`, `Local`, `Method` or unreadable."""
    args: list[Any]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments, and attributes that the script sets later."""
    source: str
    """Text."""
    line: int
    """Line of the script."""
    is_partial: bool = False
    """Whether some arguments can't be read: `**options`."""

    @property
    def name(self) -> str:
        """Last part of the name that is called."""
        match self.function:
            case Imported(path):
                return path.rpartition(".")[2]
            case Local() | Method():
                return self.function.name
        return ""


@dataclass
class Method:
    """Method of a value that is no module: `load_dataset(…).map`."""

    base: Any
    """Value with the method."""
    name: str
    """Name."""


@dataclass
class Parsed:
    """Result of a command line parser of the script."""

    names: list[str]
    """Classes whose fields it has, or nothing for argparse."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Attributes that the script sets after parsing."""


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_BUILTINS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "len": len,
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "max": max,
    "min": min,
    "round": round,
    "abs": abs,
    "sum": sum,
}
_TEXT_METHODS = ("split", "strip", "lower", "upper", "replace", "format", "rstrip", "lstrip", "removesuffix", "join")
_PARSES = ("parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "parse_known_args")


class Script:
    """A script, followed."""

    def __init__(
        self,
        text: str,
        name: str,
        arguments: Mapping[str, Any],
        defaults: Mapping[str, Any],
        known_calls: Mapping[str, Any] | None = None,
    ) -> None:
        """Follow a script.

        Args:
            text: the script.
            name: file name, for errors.
            arguments: options of the script's command line, for its parser.
            defaults: values of options that neither the command line nor the script has.
            known_calls: values that calls return, by the last part of the name that is called.

        Raises:
            ConfigError: the text is not Python.
        """
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            line = f" line {error.lineno}:" if isinstance(error, SyntaxError) else ""
            raise ConfigError(f"{name}:{line} is not Python: {error.args[0]}") from None
        self.calls: list[Call] = []
        """Calls that were not followed, in the order of the script."""
        self.options: dict[str, Any] = {}
        """Defaults of the options of the script's own parser."""
        self._arguments, self._defaults, self._known_calls = arguments, defaults, known_calls or {}
        self._depth = self._statements = 0
        operations = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Subscript)
        self._expressions: dict[Any, Callable[..., Any]] = {
            (ast.List, ast.Tuple, ast.Set): self._sequence,
            ast.Dict: self._dict,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.JoinedStr: self._text,
            operations: self._operation,
        }
        self._top: dict[str, Any] = {}
        try:
            self._block(self.tree.body, self._top, is_top=True)
        except RecursionError:
            raise ConfigError(f"{name}: is nested too deeply to be read") from None

    def effects(self) -> list[int]:
        """Return the lines of statements that do work when the script is imported."""
        harmless = ("environ", "getLogger", "compile", "namedtuple", "TypeVar", "filterwarnings", "setLevel", "Version")
        lines = []
        for node in self.tree.body:
            value = getattr(node, "value", None)
            is_call = isinstance(node, ast.Expr | ast.Assign) and isinstance(value, ast.Call)
            # a call whose value is known here, such as a text's `split`, does nothing else
            if is_call and isinstance(value, ast.Call) and not _is_plain(self.value(value, self._top)):
                text = ast.unparse(value.func)
            else:
                text = ""
            is_loop = isinstance(node, ast.For | ast.While | ast.With)
            if is_loop or (text and not any(word in text for word in harmless)):
                lines.append(node.lineno)
        return lines

    def top_level_name(self, node: ast.AST) -> str | None:
        """Return the name that a statement at the top level gives to the value of an expression's text, if any."""
        text = ast.unparse(node)
        for statement in self.tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == text:
                return ast.unparse(statement.targets[0])
        return None

    def _block(self, body: list[ast.stmt], names: dict[str, Any], is_top: bool = False) -> Any:
        """Follow statements. Return the value of a return statement, else `_NO_RETURN`."""
        for node in body:
            self._statements += 1
            # statements at the top come to an end by themselves
            if self._statements > MAX_STATEMENTS and self._depth:
                return Unreadable("too many statements")
            found = self._statement(node, names, is_top)
            if found is not _NO_RETURN:
                return found
        return _NO_RETURN

    def _statement(self, node: ast.stmt, names: dict[str, Any], is_top: bool) -> Any:
        match node:
            case ast.Import():
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    names[bound] = Imported(alias.name if alias.asname else bound)
            case ast.ImportFrom():
                for alias in node.names:
                    names[alias.asname or alias.name] = Imported(f"{'.' * node.level}{node.module or ''}.{alias.name}")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = Local(node.name, node, is_top)
            case ast.Assign():
                value = self.value(node.value, names)
                for target in node.targets:
                    self._bind(target, value, names)
            case ast.AnnAssign() if node.value is not None:
                self._bind(node.target, self.value(node.value, names), names)
            case ast.AugAssign():
                load = copy.copy(node.target)
                load.ctx = ast.Load()
                value = self.value(ast.copy_location(ast.BinOp(load, node.op, node.value), node), names)
                self._bind(node.target, value, names)
            case ast.Expr():
                self.value(node.value, names)
            case _:
                return self._control(node, names)
        return _NO_RETURN

    def _control(self, node: ast.stmt, names: dict[str, Any]) -> Any:
        match node:
            case ast.Return():
                return self.value(node.value, names) if node.value is not None else None
            case ast.If():
                return self._branch(node, names)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, Unreadable(ast.unparse(item.context_expr)), names)
                return self._block(node.body, names)
            case ast.Try():
                # as if nothing failed
                return self._block([*node.body, *node.orelse, *node.finalbody], names)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(node, names)
        return _NO_RETURN

    def _branch(self, node: ast.If, names: dict[str, Any]) -> Any:
        test = self.value(node.test, names)
        if _is_known(test):
            return self._block(node.body if test else node.orelse, names)
        # both ways; what differs afterwards is not known
        one, other = copy.deepcopy(names), copy.deepcopy(names)
        first, second = self._block(node.body, one), self._block(node.orelse, other)
        for name in {*one, *other}:
            left, right = one.get(name, _NO_RETURN), other.get(name, _NO_RETURN)
            names[name] = left if _same(left, right) else _merged(left, right, ast.unparse(node.test))
        if first is _NO_RETURN or second is _NO_RETURN:
            # an early return for a case that is not known is taken as a way out of the script
            return _NO_RETURN
        return first if _same(first, second) else Unreadable(ast.unparse(node.test))

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, names: dict[str, Any]) -> None:
        if not isinstance(node, ast.While):
            self._bind(node.target, Unreadable(ast.unparse(node.iter)), names)
        before = copy.deepcopy(names)
        self._block(node.body, names)
        for name, value in names.items():
            if not _same(before.get(name, _NO_RETURN), value) and not isinstance(value, Local | Imported | Call):
                names[name] = Unreadable(f"{name} after a loop")

    def _bind(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        match target:
            case ast.Name():
                names[target.id] = value
            case ast.Tuple() | ast.List():
                values = self._unpacked(value, target)
                for element, one in zip(target.elts, values, strict=True):
                    self._bind(element, one, names)
            case ast.Attribute():
                base = self.value(target.value, names)
                if isinstance(base, Parsed):
                    base.attributes[target.attr] = value
                elif isinstance(base, Call):
                    base.kwargs[target.attr] = value
            case ast.Subscript():
                base, key = self.value(target.value, names), self.value(target.slice, names)
                if isinstance(base, dict) and isinstance(key, str):
                    base[key] = value

    @staticmethod
    def _unpacked(value: Any, target: ast.Tuple | ast.List) -> list[Any]:
        """Return the values of a target's elements."""
        if isinstance(value, Parsed):
            names = value.names + [""] * len(target.elts)
            return [Parsed([names[index]]) for index in range(len(target.elts))]
        is_plain = isinstance(value, list | tuple) and not any(isinstance(one, ast.Starred) for one in target.elts)
        if is_plain and len(value) == len(target.elts):
            return list(value)
        source = value.source if isinstance(value, Unreadable | Call) else ast.unparse(target)
        # each part of an unpacked result may be asked for its source
        if isinstance(value, Call):
            return [value] * len(target.elts)
        return [Unreadable(source)] * len(target.elts)

    def value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """Return the value of an expression."""
        unreadable = Unreadable(ast.unparse(node)[:200])
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                if node.id == "__name__":
                    return "__main__"
                if node.id in names:
                    return names[node.id]
                return self._top.get(node.id, Imported(f"builtins.{node.id}") if node.id in _BUILTINS else unreadable)
            case ast.Lambda():
                return Local("", node, False)
            case ast.IfExp():
                test = self.value(node.test, names)
                if not _is_known(test):
                    return unreadable
                return self.value(node.body if test else node.orelse, names)
        for kind, follow in self._expressions.items():
            if isinstance(node, kind):
                return follow(node, names, unreadable)
        return unreadable

    def _sequence(self, node: ast.List | ast.Tuple | ast.Set, names: dict[str, Any], unreadable: Unreadable) -> Any:
        values: list[Any] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                inner = self.value(element.value, names)
                if not isinstance(inner, list | tuple):
                    return unreadable
                values += inner
            else:
                values.append(self.value(element, names))
        return tuple(values) if isinstance(node, ast.Tuple) else values

    def _dict(self, node: ast.Dict, names: dict[str, Any], unreadable: Unreadable) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            one = self.value(value, names)
            if key is None:
                if not isinstance(one, dict):
                    return unreadable
                found |= one
                continue
            name = self.value(key, names)
            if not isinstance(name, str | int | float | bool):
                return unreadable
            found[name] = one
        return found

    def _text(self, node: ast.JoinedStr, names: dict[str, Any], unreadable: Unreadable) -> Any:
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value, names)
                if not _is_plain(value) or part.format_spec is not None or part.conversion != -1:
                    return unreadable
                parts.append(str(value))
            elif isinstance(part, ast.Constant):
                parts.append(str(part.value))
        return "".join(parts)

    def _operation(self, node: ast.expr, names: dict[str, Any], unreadable: Unreadable) -> Any:
        try:
            match node:
                case ast.BinOp():
                    return self._binary(node, names, unreadable)
                case ast.UnaryOp():
                    operand = self.value(node.operand, names)
                    if isinstance(node.op, ast.Not):
                        return not operand if _is_known(operand) else unreadable
                    if not _is_plain(operand):
                        return unreadable
                    return -operand if isinstance(node.op, ast.USub) else unreadable
                case ast.BoolOp():
                    return self._bool(node, names, unreadable)
                case ast.Compare() if len(node.ops) == 1:
                    left, right = self.value(node.left, names), self.value(node.comparators[0], names)
                    if isinstance(node.ops[0], ast.Is | ast.IsNot) and right is None and _is_something(left):
                        return isinstance(node.ops[0], ast.IsNot)
                    if not (_is_plain(left) and _is_plain(right)):
                        return unreadable
                    return _COMPARE[type(node.ops[0])](left, right)
                case ast.Subscript():
                    return self._item(node, names, unreadable)
        except (TypeError, ValueError, LookupError, ArithmeticError):
            return unreadable
        return unreadable

    def _item(self, node: ast.Subscript, names: dict[str, Any], unreadable: Unreadable) -> Any:
        base, key = self.value(node.value, names), self.value(node.slice, names)
        if isinstance(base, dict | list | tuple | str) and isinstance(key, str | int):
            return base[key]  # type: ignore[index]
        if isinstance(base, Call) and isinstance(key, str):
            return Call(Method(base, ITEM), [key], {}, unreadable.source, node.lineno)
        return unreadable

    def _binary(self, node: ast.BinOp, names: dict[str, Any], unreadable: Unreadable) -> Any:
        left, right = self.value(node.left, names), self.value(node.right, names)
        if not (_is_plain(left) and _is_plain(right)) or type(node.op) not in _BINARY:
            return unreadable
        are_numbers = all(isinstance(one, int | float) for one in (left, right))
        # a long text or a huge power would take memory and time
        is_large = isinstance(node.op, ast.Pow) and not abs(right) < 64
        if is_large or (not are_numbers and not isinstance(node.op, ast.Add)):
            return unreadable
        return _BINARY[type(node.op)](left, right)

    def _bool(self, node: ast.BoolOp, names: dict[str, Any], unreadable: Unreadable) -> Any:
        found: Any = unreadable
        for part in node.values:
            found = self.value(part, names)
            if not _is_known(found):
                return unreadable
            if bool(found) is isinstance(node.op, ast.Or):
                return found
        return found

    def _attribute(self, node: ast.Attribute, names: dict[str, Any], unreadable: Unreadable) -> Any:
        base = self.value(node.value, names)
        match base:
            case Imported(path):
                return Imported(f"{path}.{node.attr}")
            case Parsed():
                return self._option(base, node.attr, unreadable)
            case Call() if node.attr in base.kwargs:
                return base.kwargs[node.attr]
            case Unreadable():
                return unreadable
        return Method(base, node.attr)

    def _option(self, parsed: Parsed, name: str, unreadable: Unreadable) -> Any:
        """Return an attribute of a parser's result: set by the script, given, or a default."""
        if name in parsed.attributes:
            return parsed.attributes[name]
        if name in self._arguments:
            return self._arguments[name]
        for group in parsed.names:
            found = self._field(group, name)
            if not isinstance(found, Unreadable):
                return found
        if name in self.options:
            return self.options[name]
        return self._defaults.get(name, unreadable)

    def _field(self, group: str, name: str) -> Any:
        """Return the default of a field of a dataclass of the script."""
        local = self._top.get(group)
        body = local.node.body if isinstance(local, Local) and isinstance(local.node, ast.ClassDef) else []
        for node in body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                value = node.value
                if isinstance(value, ast.Call):
                    defaults = [word.value for word in value.keywords if word.arg == "default"]
                    value = defaults[0] if defaults else None
                return self.value(value, self._top) if value is not None else Unreadable(name)
        return Unreadable(name)

    def _call(self, node: ast.Call, names: dict[str, Any], unreadable: Unreadable) -> Any:
        function = self.value(node.func, names)
        args = [self.value(one, names) for one in node.args if not isinstance(one, ast.Starred)]
        kwargs: dict[str, Any] = {}
        is_partial = any(isinstance(one, ast.Starred) for one in node.args)
        for word in node.keywords:
            value = self.value(word.value, names)
            if word.arg is not None:
                kwargs[word.arg] = value
            elif isinstance(value, dict):
                kwargs |= value
            else:
                is_partial = True
        plain = _plain_call(function, args, kwargs)
        if plain is not _NO_RETURN and not is_partial:
            return plain
        if isinstance(function, Method) and function.name in _PARSES and isinstance(function.base, Call):
            return self._parsed(function)
        call = Call(function, args, kwargs, unreadable.source, node.lineno, is_partial)
        if call.name in self._known_calls:
            return self._known_calls[call.name]
        if isinstance(function, Method) and function.name == "add_argument":
            self._add_option(args, kwargs)
        may_follow = self._depth < MAX_DEPTH and self._statements < MAX_STATEMENTS
        if isinstance(function, Local) and isinstance(function.node, ast.FunctionDef) and may_follow:
            return self._follow(function.node, args, kwargs, unreadable)
        self.calls.append(call)
        return call

    def _parsed(self, function: Method) -> Any:
        classes = function.base.args[0] if function.base.args else function.base.kwargs.get("dataclass_types", [])
        classes = classes if isinstance(classes, list | tuple) else [classes]
        paths = [one.path if isinstance(one, Imported) else getattr(one, "name", "") for one in classes]
        parsed = Parsed([path.rpartition(".")[2] for path in paths])
        return (parsed, []) if function.name == "parse_known_args" else parsed

    def _add_option(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        flags = [one for one in args if isinstance(one, str)]
        if not flags:
            return
        name = max(flags, key=len).lstrip("-").replace("-", "_")
        if "default" in kwargs:
            self.options[name] = kwargs["default"]
        elif kwargs.get("action") == "store_true":
            self.options[name] = False

    def _follow(self, node: ast.FunctionDef, args: list[Any], kwargs: dict[str, Any], unreadable: Unreadable) -> Any:
        """Return what a function of the script returns."""
        parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        names = dict(self._top)
        defaults = node.args.defaults
        for name, default in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True):
            names[name] = self.value(default, self._top)
        for one, keyword_default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if keyword_default is not None:
                names[one.arg] = self.value(keyword_default, self._top)
        for name in parameters:
            names.setdefault(name, unreadable)
        names |= dict(zip(parameters, args, strict=False)) | kwargs
        # names of the function's own; changes of lists and objects stay
        self._depth += 1
        found = self._block(node.body, names)
        self._depth -= 1
        return None if found is _NO_RETURN else found


_NO_RETURN: Any = object()


def _plain_call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the value of a call of a builtin or a text's method on plain values, else `_NO_RETURN`."""
    is_plain = all(_is_plain(one) for one in (*args, *kwargs.values()))
    try:
        match function:
            case Imported("builtins.dict") if not args:
                return kwargs
            case Imported(path) if path.startswith("builtins.") and is_plain:
                return _BUILTINS[path.partition(".")[2]](*args, **kwargs)
            case Imported("pathlib.Path") | Imported("os.path.expanduser") if is_plain and len(args) == 1:
                return str(args[0])
            case Imported("os.path.join") if is_plain and args:
                return "/".join(str(one).rstrip("/") for one in args)
            case Imported("builtins.getattr") | Unreadable("getattr"):
                if len(args) >= 2 and isinstance(args[0], Imported) and isinstance(args[1], str):
                    return Imported(f"{args[0].path}.{args[1]}")
            case Method(base, name) if isinstance(base, str) and name in _TEXT_METHODS and is_plain:
                return getattr(base, name)(*args, **kwargs)
    except (TypeError, ValueError, LookupError, ArithmeticError):
        return _NO_RETURN
    return _NO_RETURN


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    if isinstance(value, dict):
        return all(_is_plain(one) for one in value.values())
    return value is None or isinstance(value, str | int | float | bool)


def _is_known(value: Any) -> bool:
    """Tell whether the truth of a value is known."""
    if isinstance(value, list | tuple | dict):
        return True
    return _is_plain(value) or isinstance(value, Local | Imported)


def _is_something(value: Any) -> bool:
    """Tell whether a value that can't be read is not None all the same: an object that a call makes."""
    return isinstance(value, Local | Imported | Parsed) or (
        isinstance(value, Call) and not value.name.startswith("get_") and value.name[:1].isupper()
    )


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Local) and isinstance(right, Local):
        return left.name == right.name and ast.dump(left.node) == ast.dump(right.node)
    return type(left) is type(right) and bool(left == right)


def _merged(left: Any, right: Any, test: str) -> Any:
    """Return the value after a branch that is not known: of objects, the parts on which both ways agree."""
    if isinstance(left, Parsed) and isinstance(right, Parsed) and left.names == right.names:
        return Parsed(left.names, _merged_map(left.attributes, right.attributes, test))
    if isinstance(left, dict) and isinstance(right, dict):
        return _merged_map(left, right, test)
    if isinstance(left, Call) and isinstance(right, Call) and left.source == right.source:
        return Call(left.function, left.args, _merged_map(left.kwargs, right.kwargs, test), left.source, left.line)
    return Unreadable(f"depends on {test}")


def _merged_map(left: dict[str, Any], right: dict[str, Any], test: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in {**left, **right}:
        one, other = left.get(key, _NO_RETURN), right.get(key, _NO_RETURN)
        if _same(one, other):
            found[key] = one
        else:
            found[key] = _merged(one, other, test)
    return found

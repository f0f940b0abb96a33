"""Runs inside of a sandbox: holds code to a text of tests. Standard library only; sent as a text, never imported there.

This process splits off a child, which has no copy of what comes then: tests and key from the standard input, a pipe
that is empty afterwards, whoever else has it. Then only the child begins with the code. The tests run here, where
nobody can look: a name that they import from the code, or that neither they nor Python know, is asked of the child,
which is told the arguments of a call and answers with plain data. What a test wants of these it never sees, and it has
no way to say that a test passed.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import hmac
import io
import itertools
import json
import operator
import os
import pickle
import sys
from collections import deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import CodeType

PR_SET_DUMPABLE = 4
BEGIN = b"begin\n"
LARGEST_NUMBER = 1 << 63
"""Beyond it decimal digits would be slow, or refused."""
CHANGEABLE = (list, dict, set)
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
WRITTEN: dict[str, tuple[Any, Any, Any]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "timedelta": (timedelta, lambda it: [it.days, it.seconds, it.microseconds], lambda parts: timedelta(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "complex": (complex, str, complex),
    "bytes": ((bytes, bytearray), lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")),
}
"""Plain data that JSON has no form for: what it is, and how it becomes a text and is read from one. A subclass of the
program's is sent as what it is one of, so that no method of the program's takes part in a comparison."""
ENDS = (StopIteration, StopAsyncIteration)
CAUGHT = "__caught__"
"""What the tests' except clauses are led through: Python itself asks nothing of a class there."""


class DataFault(BaseException):
    """The tests themselves are to blame, whatever the program is; `except Exception` in a test does not hide it."""


class Named(tuple[Any, ...]):
    """A named tuple of the program's: data, with the fields as attributes, and without methods."""


class Requests(pickle.Unpickler):
    """The child's end: what it is asked, with objects of its own by their numbers."""

    def __init__(self, file: Any, objects: Sequence[Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        """Such an object."""
        return self._objects[pid]


def serve(path: str, asked: int, answering: int) -> None:
    """The child: the code, and then what is asked of it."""
    requests = os.fdopen(asked, "rb")
    if requests.readline() != BEGIN:
        return
    space: dict[str, Any] = {"__name__": "solution", "__file__": path}
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), space)
    objects: list[Any] = [space]
    numbers: dict[int, int] = {}

    def number_of(value: object) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    with os.fdopen(answering, "w") as answers:
        while requests.peek(1):
            function, arguments, keywords = Requests(requests, objects).load()
            try:
                value = packed(function(*arguments, **keywords), number_of)
                changed = [packed(one, number_of) for one in arguments if isinstance(one, CHANGEABLE)]
                answer = ["value", value, changed]
            except BaseException as error:  # noqa: BLE001 - sys.exit of the code is no end of it either
                kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
                answer = ["raised", kinds, str(error), packed(error.args, number_of)]
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def packed(value: Any, number_of: Callable[[object], int]) -> Any:
    """A value for JSON: plain data as what they are, anything else by a number that the tests can ask for."""
    if value is None or isinstance(value, (float, str)) or (isinstance(value, int) and abs(value) < LARGEST_NUMBER):
        return value
    if isinstance(value, dict):
        return ["dict", [[packed(key, number_of), packed(one, number_of)] for key, one in value.items()]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named", packed(dict(zip(value._fields, value, strict=True)), number_of)]
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [packed(one, number_of) for one in value]]
    for name, (kind, write, _) in WRITTEN.items():
        if isinstance(value, kind):
            return [name, write(value)]
    is_array = type(value).__module__ == "numpy" and hasattr(value, "tolist")
    return packed(value.tolist(), number_of) if is_array else ["object", number_of(value)]


class Remote:
    """An object of the program's. Each of its operations is a question to the program, whose answer is judged here.

    It has no comparison and no arithmetic: the program would see what is wanted, and say that it is equal.
    """

    __slots__ = ("_number", "_program")

    _number: int
    _program: Program

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What it returns, or raises."""
        return self._program.ask(self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # by which libraries take memory or methods of an object
            raise AttributeError(name)
        return self._program.ask(getattr, self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask(setattr, self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._program.ask(operator.getitem, self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._program.ask(operator.setitem, self, key, value)

    def __len__(self) -> Any:
        return self._program.ask(len, self)

    def __bool__(self) -> Any:
        return self._program.ask(bool, self)

    def __str__(self) -> Any:
        return self._program.ask(str, self)

    def __repr__(self) -> Any:
        return self._program.ask(repr, self)

    def __iter__(self) -> Any:
        return self._program.ask(iter, self)

    def __next__(self) -> Any:
        for value in self._program.ask(list, self._program.ask(itertools.islice, self, 1)):
            return value
        raise StopIteration

    def __as_class(self, *_: Any) -> Any:
        raise DataFault("they use what is the program's as a class: in isinstance, in except, or as a base class")

    __instancecheck__ = __subclasscheck__ = __mro_entries__ = __as_class


def caught(kinds: Any) -> Any:
    """What an except clause names, once it is no class of the program's."""
    isinstance(None, kinds)
    return kinds


class Questions(pickle.Pickler):
    """Calls and their arguments, with objects of the program's by their numbers."""

    def persistent_id(self, obj: Any) -> int | None:
        """Of such an object; None for any other."""
        return obj._number if type(obj) is Remote else None


class Program:
    """What the tests see of the child.

    Attributes:
        was_asked: whether they have asked anything of it. That it has a function or class is nothing yet.
        is_lacking: whether they have looked for a name that it did not have.
    """

    def __init__(self, asking: int, answers: int) -> None:
        self.was_asked = self.is_lacking = False
        self._asking, self._answers = os.fdopen(asking, "wb"), os.fdopen(answers)
        self._objects: dict[Any, Remote] = {}

    def begin(self) -> None:
        """Have the code run."""
        self._asking.write(BEGIN)
        self._asking.flush()

    def look_up(self, name: str) -> Any:
        """What the program calls by a name; `KeyError` where it has none such."""
        before, self.is_lacking = self.is_lacking, True
        value = self._answer(operator.getitem, Remote(self, 0), name)
        self.is_lacking = before
        self.was_asked |= type(value) is not Remote
        return value

    def as_module(self, name: str) -> ModuleType:
        """What `import NAME` gives to the tests: the program's names."""

        def attribute(name: str) -> Any:
            with contextlib.suppress(KeyError):
                if not name.startswith("__"):
                    return self.look_up(name)
            raise AttributeError(name)

        module = ModuleType(name)
        vars(module)["__getattr__"] = attribute
        return module

    def ask(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """What a function returns or raises in the child. Lists, dicts and sets that it changed are changed here."""
        self.was_asked = True
        return self._answer(function, *arguments, **keywords)

    def _answer(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        question = io.BytesIO()
        try:
            Questions(question, 4).dump((function, arguments, keywords))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            what = "what is no data, such as a function or a class of their own"
            raise DataFault(f"they hand the program {what}: {error}") from None
        self._asking.write(question.getbuffer())
        self._asking.flush()
        line = self._answers.readline()
        if not line:
            raise EOFError("the program has ended")
        said, *told = json.loads(line)
        if said == "raised":
            raise raised(self._unpacked(told.pop()), *told)
        value, changed = told
        for argument in arguments:
            if isinstance(argument, CHANGEABLE):
                new = self._unpacked(changed.pop(0))
                argument.clear()
                (argument.extend if isinstance(argument, list) else argument.update)(new)
        return self._unpacked(value)

    def _unpacked(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, content = value
        if kind == "object":
            return self._objects.setdefault(content, Remote(self, content))
        if kind == "dict":
            return {self._unpacked(key): self._unpacked(one) for key, one in content}
        if kind == "named":
            fields = self._unpacked(content)
            named = Named(fields.values())
            vars(named).update(fields, _fields=tuple(fields))
            return named
        if kind in CONTAINERS:
            return CONTAINERS[kind](self._unpacked(one) for one in content)
        return WRITTEN[kind][2](content)


def raised(arguments: Sequence[Any], kinds: Sequence[str], text: str) -> Exception:
    """An exception of the program's as the nearest of Python's own; never one that ends a loop of the tests.

    It has the program's arguments where it says the same with them, and what the program's says otherwise.
    """
    for kind in (getattr(builtins, name, None) for name in kinds):
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ENDS):
            for given in (arguments, (text,)):
                with contextlib.suppress(Exception):
                    error = kind(*given)
                    if given is not arguments or str(error) == text:
                        return error
    return RuntimeError(text)


class Names(dict[str, Any]):
    """The tests' own, and the program's for all that is neither theirs nor Python's.

    Args:
        program: the program.
        asked_first: names of Python's own that are the program's where it has them.

    Attributes:
        of_python: names of Python's own that the tests came across.
    """

    def __init__(self, program: Program, asked_first: Collection[str] = ()) -> None:
        super().__init__({"__name__": "__main__", CAUGHT: caught})
        self.of_python: set[str] = set()
        self._program, self._asked_first = program, asked_first

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (hasattr(builtins, name) and name not in self._asked_first):
            self.of_python.add(name)
            raise KeyError(name)
        value = self._program.look_up(name)
        if type(value) is Remote:  # a function or class, asked for once; data may be another next time
            self[name] = value
        return value


def split(tests: Sequence[str]) -> list[tuple[CodeType, bool]]:
    """Top-level statements, and whether each is a test. Where no one has an assertion of its own, all are one test."""
    statements: list[tuple[CodeType, bool]] = []
    for text in tests:
        body = checking_what_is_caught(ast.parse(text)).body
        parts = [(ast.Module([statement], []), is_test(statement)) for statement in body]
        if not any(is_one for _, is_one in parts):
            parts = [(ast.Module(body, []), has_assertion(*body))]
        statements += [(compile(part, "<tests>", "exec"), is_one) for part, is_one in parts]
    if not any(is_one for _, is_one in statements):
        raise DataFault("they assert nothing, so that any program would pass: each test needs an assert statement")
    return statements


def checking_what_is_caught(tests: ast.Module) -> ast.Module:
    """The same tests, whose `except KIND` says `except __caught__(KIND)`."""
    for node in ast.walk(tests):
        if isinstance(node, ast.ExceptHandler) and node.type:
            node.type = ast.Call(ast.Name(CAUGHT, ast.Load()), [node.type], [])
    return ast.fix_missing_locations(tests)


def is_test(statement: ast.stmt) -> bool:
    """Whether a statement asserts something as soon as it runs."""
    return has_assertion(statement) and not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def has_assertion(*statements: ast.stmt) -> bool:
    """Whether there is one anywhere in them."""
    return any(isinstance(node, ast.Assert) for statement in statements for node in ast.walk(statement))


def run_tests(statements: Sequence[tuple[CodeType, bool]], program: Program) -> list[bool]:
    """Whether each test passed.

    Where they came across a single name of Python's own and nothing of the program's, it is the program's that they
    mean, such as `sum` in `assert sum(10, 15) == 6`. With more names than one a program could replace what judges it.
    """
    names = Names(program)
    passed, why = attempt(statements, names)
    is_without = not (program.was_asked or program.is_lacking or isinstance(why, ImportError))
    if is_without and len(names.of_python) == 1:
        passed, why = attempt(statements, Names(program, names.of_python))
    if not program.was_asked and all(passed):
        raise DataFault("they pass without a call of the program: end them with one, such as check(NAME)")
    if not program.was_asked and not program.is_lacking:
        raise DataFault(f"they fail without a call: {why!r}; Python's unless imported: {sorted(names.of_python)}")
    return passed


def attempt(statements: Sequence[tuple[CodeType, bool]], names: Names) -> tuple[list[bool], Exception | None]:
    """Whether each test passed, and the error of the last one that did not; what is no test and fails, fails all."""
    passed: list[bool] = []
    why = None
    for code, is_one in statements:
        try:
            exec(code, names)
        except SystemExit:
            raise DataFault("they end Python, as unittest.main() does: say what they want with assert") from None
        except Exception as error:  # noqa: BLE001 - whatever a test or the program raises
            why = error
            if not is_one:
                return [False] * sum(is_one for _, is_one in statements), why
            passed.append(False)
        else:
            passed += [True] * is_one
    return passed, why


def judge(program: Program) -> None:
    """The parent: run the tests, and write what became of them, sealed with the key that nobody else has."""
    given = json.loads(sys.stdin.read())
    output, sys.stdout = sys.stdout, io.StringIO()  # what tests print is nobody's
    # The folder is the program's, and what it puts there must not be what a test imports.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path.cwd()]
    passed: list[bool] = []
    fault = ""
    try:
        statements = split(given["tests"])
        module = Path(sys.argv[1]).stem
        sys.modules[module] = program.as_module(module)
        program.begin()
        passed = run_tests(statements, program)
    except SyntaxError as error:
        fault = f"they are not Python: {error}"
    except DataFault as error:
        fault = str(error)
    verdict = json.dumps([passed, fault])
    output.write(f"{verdict}\n{hmac.new(given['key'].encode(), verdict.encode(), 'sha256').hexdigest()}\n")


def main() -> None:
    """Begin with the code before anything is read that it must not see."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    asked, asking = os.pipe()
    answers, answering = os.pipe()
    if os.fork() == 0:
        os.close(asking)
        os.close(answers)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        serve(sys.argv[1], asked, answering)
        sys.exit(0)
    os.close(asked)
    os.close(answering)
    judge(Program(asking, answers))


if __name__ == "__main__":
    main()

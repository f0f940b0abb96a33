"""Test harness that runs inside a sandbox. Standard library only; it is sent to the sandbox as text, not imported.

This process forks a child that runs the code; the parent runs the tests. The parent reads the tests and the key from
standard input only after the fork, so the child has no copy, and the pipe is empty afterwards. The child starts the
code only then. If a test uses a name that it imports from the code, or that neither the tests nor Python define, the
parent asks the child: it sends the arguments of a call and gets plain data back. The code never sees the expected
values, and it has no way to report that a test passed.
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
"""First line to the child: run the code now."""
LARGEST_NUMBER = 1 << 63
"""Integers from here on are sent in hexadecimal: converting long decimals is slow, and Python refuses it."""
CHANGEABLE = (list, dict, set)
"""Types of arguments whose changes by a call are sent back."""
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
ENCODED: dict[str, tuple[Any, Any, Any]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "timedelta": (timedelta, lambda it: [it.days, it.seconds, it.microseconds], lambda parts: timedelta(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "complex": (complex, str, complex),
    "bytes": ((bytes, bytearray), lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")),
}
"""Types without a form in JSON: the type, its encoder and its decoder. An instance of a subclass is sent as its base
type, so that a comparison calls no method of the program."""
ENDS = (StopIteration, StopAsyncIteration)
CAUGHT = "__caught__"
"""Name of the function through which the tests' `except` clauses look up their classes, because Python does not call
a class's hooks there."""


class BadTestsError(BaseException):
    """The tests are wrong for every program. A BaseException, so that `except Exception` in a test does not hide it."""


class Named(tuple[Any, ...]):
    """A named tuple of the program: data with its fields as attributes, without methods."""


class CallUnpickler(pickle.Unpickler):
    """Reads calls in the child and replaces references to the program's objects by the objects."""

    def __init__(self, file: Any, objects: Sequence[Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        """Return the object with this number."""
        return self._objects[pid]


def serve(path: str, call_fd: int, answer_fd: int) -> None:
    """Run the code in the child, then answer calls until the parent closes the pipe.

    Args:
        path: file of the code.
        call_fd: descriptor from which calls are read.
        answer_fd: descriptor to which answers are written, one line of JSON each.
    """
    calls = os.fdopen(call_fd, "rb")
    if calls.readline() != BEGIN:
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

    with os.fdopen(answer_fd, "w") as answers:
        while calls.peek(1):
            function, arguments, keywords = CallUnpickler(calls, objects).load()
            try:
                value = packed(function(*arguments, **keywords), number_of)
                changed = [packed(argument, number_of) for argument in arguments if isinstance(argument, CHANGEABLE)]
                answer = ["value", value, changed]
            except BaseException as error:  # noqa: BLE001 - the code's sys.exit must not end this process
                kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
                answer = ["raised", kinds, str(error), packed(error.args, number_of)]
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def packed(value: Any, number_of: Callable[[object], int]) -> Any:
    """Return a value in a form for JSON: plain data as itself, other objects as a number that refers to them."""
    if value is None or isinstance(value, (float, str)) or (isinstance(value, int) and abs(value) < LARGEST_NUMBER):
        return value
    if isinstance(value, dict):
        return ["dict", [[packed(key, number_of), packed(item, number_of)] for key, item in value.items()]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named", packed(dict(zip(value._fields, value, strict=True)), number_of)]
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [packed(item, number_of) for item in value]]
    for name, (kind, write, _) in ENCODED.items():
        if isinstance(value, kind):
            return [name, write(value)]
    is_array = type(value).__module__ == "numpy" and hasattr(value, "tolist")
    return packed(value.tolist(), number_of) if is_array else ["object", number_of(value)]


class Remote:
    """An object of the program. Each operation on it is a call to the child, whose result the tests check here.

    It defines neither comparison nor arithmetic: the code would see the expected value and could claim to be equal.
    """

    __slots__ = ("_number", "_program")

    _number: int
    _program: Program

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the object; return its result or raise its exception."""
        return self._program.ask(self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # libraries probe for such names to get at memory or methods
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
        raise BadTestsError("they use an object of the program as a class, in isinstance or except or as a base class")

    __instancecheck__ = __subclasscheck__ = __mro_entries__ = __as_class


def caught(kinds: Any) -> Any:
    """Return the classes of an `except` clause, after checking that none of them is the program's."""
    isinstance(None, kinds)
    return kinds


class CallPickler(pickle.Pickler):
    """Writes calls in the parent and replaces the program's objects by their numbers."""

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of a program's object; None for other objects."""
        return obj._number if type(obj) is Remote else None


class Program:
    """The program in the child, as the tests see it.

    Attributes:
        was_asked: whether the tests have called the program or read data from it. Looking up a function does not count.
        is_lacking: whether the tests have looked up a name that the program does not have.
    """

    def __init__(self, call_fd: int, answer_fd: int) -> None:
        self.was_asked = self.is_lacking = False
        self._calls = os.fdopen(call_fd, "wb")
        self._answers = os.fdopen(answer_fd)
        self._objects: dict[Any, Remote] = {}

    def begin(self) -> None:
        """Start the code in the child."""
        self._calls.write(BEGIN)
        self._calls.flush()

    def look_up(self, name: str) -> Any:
        """Return what the program defines under a name.

        Raises:
            KeyError: it defines no such name.
        """
        before, self.is_lacking = self.is_lacking, True
        value = self._answer(operator.getitem, Remote(self, 0), name)
        self.is_lacking = before
        self.was_asked |= type(value) is not Remote
        return value

    def as_module(self, name: str) -> ModuleType:
        """Return a module with the program's names, for `import NAME` in the tests."""

        def attribute(name: str) -> Any:
            with contextlib.suppress(KeyError):
                if not name.startswith("__"):
                    return self.look_up(name)
            raise AttributeError(name)

        module = ModuleType(name)
        vars(module)["__getattr__"] = attribute
        return module

    def ask(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a function in the child and return its result or raise its exception.

        Lists, dicts and sets among the arguments are updated if the call changed them.
        """
        self.was_asked = True
        return self._answer(function, *arguments, **keywords)

    def _answer(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        buffer = io.BytesIO()
        try:
            CallPickler(buffer, 4).dump((function, arguments, keywords))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            what = "an argument that is not data, such as a function or a class of the tests"
            raise BadTestsError(f"they pass the program {what}: {error}") from None
        self._calls.write(buffer.getbuffer())
        self._calls.flush()
        line = self._answers.readline()
        if not line:
            raise EOFError("the program has ended")
        kind, *fields = json.loads(line)
        if kind == "raised":
            raise raised(self._unpacked(fields.pop()), *fields)
        value, changed = fields
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
            return {self._unpacked(key): self._unpacked(item) for key, item in content}
        if kind == "named":
            fields = self._unpacked(content)
            named = Named(fields.values())
            vars(named).update(fields, _fields=tuple(fields))
            return named
        if kind in CONTAINERS:
            return CONTAINERS[kind](self._unpacked(item) for item in content)
        return ENCODED[kind][2](content)


def raised(args: Sequence[Any], kinds: Sequence[str], text: str) -> Exception:
    """Return an exception of the program as the nearest built-in one; never one that ends a loop of the tests.

    It has the program's arguments if its text stays the same with them, else it has the text.

    Args:
        args: arguments of the exception.
        kinds: names of its built-in classes, in the order of inheritance.
        text: text of the exception.
    """
    for kind in (getattr(builtins, name, None) for name in kinds):
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ENDS):
            for candidate in (args, (text,)):
                with contextlib.suppress(Exception):
                    error = kind(*candidate)
                    if candidate is not args or str(error) == text:
                        return error
    return RuntimeError(text)


class Names(dict[str, Any]):
    """Global names of the tests: their own, and the program's for names that neither the tests nor Python define.

    Args:
        program: the program.
        from_program: built-in names that are looked up in the program first.

    Attributes:
        of_python: built-in names that the tests have used.
    """

    def __init__(self, program: Program, from_program: Collection[str] = ()) -> None:
        super().__init__({"__name__": "__main__", CAUGHT: caught})
        self.of_python: set[str] = set()
        self._program = program
        self._from_program = from_program

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (hasattr(builtins, name) and name not in self._from_program):
            self.of_python.add(name)
            raise KeyError(name)
        value = self._program.look_up(name)
        if type(value) is Remote:  # keep functions and classes; data may change between lookups
            self[name] = value
        return value


def split(tests: Sequence[str]) -> list[tuple[CodeType, bool]]:
    """Compile the top-level statements, and return whether each is a test.

    The statements of a text without a test of its own are one part. It is a test if it has an assertion anywhere.

    Raises:
        BadTestsError: there is no assertion in any text.
        SyntaxError: a text is not Python.
    """
    statements: list[tuple[CodeType, bool]] = []
    for text in tests:
        body = checking_what_is_caught(ast.parse(text)).body
        parts = [(ast.Module([statement], []), is_test(statement)) for statement in body]
        if not any(is_test_part for _, is_test_part in parts):
            parts = [(ast.Module(body, []), has_assertion(*body))]
        statements += [(compile(part, "<tests>", "exec"), is_test_part) for part, is_test_part in parts]
    if not any(is_test_part for _, is_test_part in statements):
        raise BadTestsError("they assert nothing, so any program would pass: each test needs an assert statement")
    return statements


def checking_what_is_caught(tests: ast.Module) -> ast.Module:
    """Return the tests with each `except KIND` changed to `except __caught__(KIND)`."""
    for node in ast.walk(tests):
        if isinstance(node, ast.ExceptHandler) and node.type:
            node.type = ast.Call(ast.Name(CAUGHT, ast.Load()), [node.type], [])
    return ast.fix_missing_locations(tests)


def is_test(statement: ast.stmt) -> bool:
    """Return whether a statement asserts something when it runs."""
    return has_assertion(statement) and not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def has_assertion(*statements: ast.stmt) -> bool:
    """Return whether the statements contain an assertion anywhere."""
    return any(isinstance(node, ast.Assert) for statement in statements for node in ast.walk(statement))


def run_tests(statements: Sequence[tuple[CodeType, bool]], program: Program) -> list[bool]:
    """Return whether each test passed.

    If the tests use exactly one built-in name and nothing of the program, that name is taken from the program, such as
    `sum` in `assert sum(10, 15) == 6`. With more names the program could replace a function that judges it.

    Raises:
        BadTestsError: the tests pass or fail without a call of the program.
    """
    names = Names(program)
    passed, last_error = attempt(statements, names)
    is_without = not (program.was_asked or program.is_lacking or isinstance(last_error, ImportError))
    if is_without and len(names.of_python) == 1:
        passed, last_error = attempt(statements, Names(program, names.of_python))
    if not program.was_asked and all(passed):
        raise BadTestsError("they pass without a call of the program: end them with one, such as check(NAME)")
    if not program.was_asked and not program.is_lacking:
        names_used = sorted(names.of_python)
        raise BadTestsError(f"they fail without a call: {last_error!r}; Python's unless imported: {names_used}")
    return passed


def attempt(statements: Sequence[tuple[CodeType, bool]], names: Names) -> tuple[list[bool], Exception | None]:
    """Run the statements; return whether each test passed, and the last error.

    If a statement that is not a test fails, all tests fail.
    """
    passed: list[bool] = []
    last_error = None
    for code, is_test_part in statements:
        try:
            exec(code, names)
        except SystemExit:
            raise BadTestsError("they end Python, as unittest.main() does: use assert statements") from None
        except Exception as error:  # noqa: BLE001 - tests and the program may raise anything
            last_error = error
            if not is_test_part:
                return [False] * sum(is_test for _, is_test in statements), last_error
            passed.append(False)
        else:
            if is_test_part:
                passed.append(True)
    return passed, last_error


def judge(program: Program) -> None:
    """Run the tests in the parent, and write the verdict with a seal: its HMAC under the key of the request."""
    request = json.loads(sys.stdin.read())
    output, sys.stdout = sys.stdout, io.StringIO()  # discard what tests print
    # The code can write to this folder: tests must not import modules from it.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path.cwd()]
    passed: list[bool] = []
    fault = ""
    try:
        statements = split(request["tests"])
        module = Path(sys.argv[1]).stem
        sys.modules[module] = program.as_module(module)
        program.begin()
        passed = run_tests(statements, program)
    except SyntaxError as error:
        fault = f"they are not Python: {error}"
    except BadTestsError as error:
        fault = str(error)
    verdict = json.dumps([passed, fault])
    output.write(f"{verdict}\n{hmac.new(request['key'].encode(), verdict.encode(), 'sha256').hexdigest()}\n")


def main() -> None:
    """Fork the child before the tests and the key are read, so that it has no copy of them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    call_reader, call_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    if os.fork() == 0:
        os.close(call_writer)
        os.close(answer_reader)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        serve(sys.argv[1], call_reader, answer_writer)
        sys.exit(0)
    os.close(call_reader)
    os.close(answer_writer)
    judge(Program(call_writer, answer_reader))


if __name__ == "__main__":
    main()

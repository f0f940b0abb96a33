"""The examples in the docstrings of a module."""

import ast
import doctest

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def examples_in(source: str) -> list[doctest.Example]:
    """Return the examples of all docstrings in the source of a module."""
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return [example for text in docstrings for example in doctest.DocTestParser().get_examples(text)]

"""`checked` tests a flag, a number, a word or an object that a user passes; `listed` tests a list of them.

Every room may call them, and does so before it changes anything. Errors say what was passed and what was expected.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

from torch import Tensor, nn


def checked(name: str, value: Any, *expected: Any, above: int | None = None, hint: str = "") -> Any:
    """Returns the value of an argument if it is one of the ``expected`` classes and words. ``None`` is a word.

    Where a number is expected, a bool is none, those of NumPy and torch become numbers of Python, and an int is a float
    too. ``above``: numbers are larger. ``hint``: the end of the error.

    Raises:
        TypeError: the value is of another class.
        ValueError: it is another word, or a number that is too small or NaN.
    """
    if type(value) in expected and above is None:  # most values: this is asked in calls too
        return value
    found = _of_python(value) if {bool, int, float} & {*expected} else value
    if found is None or isinstance(found, str):
        fits = found in expected or (found is not None and str in expected)
    else:
        fits = any(_is(found, kind) for kind in expected if isinstance(kind, type))
    if fits and (above is None or not _is(found, float) or found > above):
        return found
    is_word = isinstance(found, str) and any(isinstance(each, str) for each in expected)
    what = " or ".join(", ".join(_in_words(each, above) for each in expected).rsplit(", ", 1))
    raise (ValueError if fits or is_word else TypeError)(f"{name}={value!r:.200}: expected {what}{hint}")


def listed(name: str, values: Any, kind: type, hint: str = "", above: int | None = None) -> list[Any]:
    """Returns the entries of an iterable, each by `checked`. ``None`` has none."""
    if values is None:
        return []
    if isinstance(values, str) or not isinstance(values, Iterable) or (kind is Tensor and isinstance(values, Tensor)):
        raise TypeError(f"{name}={values!r:.200}: expected a list, each entry {_in_words(kind, above)}{hint}")
    return [checked(f"{name}[{i}]", entry, kind, above=above, hint=hint) for i, entry in enumerate(values)]


def _of_python(value: Any) -> Any:
    """Returns the bool or number for which a value of NumPy, of torch or of a similar class stands, or the value."""
    try:
        value = value.item() if hasattr(value, "dtype") else value
        is_int = hasattr(value, "__index__") and not isinstance(value, bool)
        return operator.index(value) if is_int else value
    except (AttributeError, TypeError, ValueError, RuntimeError):  # a tensor of several values, for example
        return value


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, Real if kind is float else kind) and (kind is bool or not isinstance(value, bool))


_WORDS = {
    bool: "True, False", int: "an int", float: "a number", str: "a string", dict: "a dict", list: "a list",
    tuple: "a tuple", Callable: "a function", nn.Module: "a torch.nn.Module",
}  # fmt: skip


def _in_words(expected: Any, above: int | None) -> str:
    if not isinstance(expected, type):
        return repr(expected)
    words = _WORDS.get(expected) or f"a {expected.__module__}.{expected.__qualname__}"
    return f"{words} above {above}" if above is not None and expected in (int, float) else words

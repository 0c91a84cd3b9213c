"""Check the sizes and guards of a .pt2, which are Python text that torch evaluates. Only sums, products, quotients,
comparisons, min and max of sizes and small numbers are allowed.

A short power or shift can take forever to evaluate (9**9**9**9), and so can a number with a long exponent of either
sign, which sympy computes exactly.
"""

from __future__ import annotations

import ast
import math
import re

from vitlab.errors import ExportError

MAX_LENGTH = 2**14  # characters; our own files have hundreds
MAX_NESTING = 100
MAX_BITS = 1024  # of an integer computed from sizes
SIZE_BITS = 40  # of a size
LONG_EXPONENT = re.compile(r"[\d._]e[+-]?[\d_]{3,}", re.IGNORECASE)  # 1e-999 is 0.0 to Python, and exact to sympy
PERMITTED = "only + - * // % comparisons, min and max are allowed"
FORBIDDEN = {ast.Pow: "a power", ast.LShift: "a shift", ast.RShift: "a shift", ast.IfExp: "a condition"}

ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.USub, ast.UAdd)
GUARD_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Load, *ARITHMETIC),
    *(ast.And, ast.Or, ast.Not, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
    *(ast.Call, ast.Name, ast.Subscript, ast.Attribute),  # L['x'].size()[0], max(1, ...)
)
GUARD_NAMES = ("L", "max", "min")
SIZE_NODES = (ast.Expression, ast.Call, ast.keyword, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
SIZE_NAMES = (
    *("Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Max", "Min", "Mod", "PythonMod", "Identity", "Where"),
    *("FloorDiv", "CeilDiv", "CleanDiv", "ModularIndexing", "IntTrueDiv", "FloatTrueDiv", "ToFloat"),
    *("TruncToInt", "TruncToFloat", "FloorToInt", "CeilToInt", "RoundToInt"),
    *("Equality", "Unequality", "StrictGreaterThan", "GreaterThan", "StrictLessThan", "LessThan", "And", "Or", "Not"),
)
SIZE_OPTIONS = {"positive", "nonnegative", "integer", "real", "dps", "precision"}
MAX_PRECISION = 64


def check_guard(text: str) -> None:
    """Raise ExportError unless a guard only compares sizes."""
    for node in _parsed(text, GUARD_NODES):
        if isinstance(node, ast.Name) and node.id not in GUARD_NAMES:
            raise ExportError(f"it contains the name {node.id!r:.40}; {PERMITTED}")


def check_size(text: str) -> None:
    """Raise ExportError unless a size is arithmetic on symbols."""
    for node in _parsed(text, SIZE_NODES):
        if isinstance(node, ast.Name) and node.id not in SIZE_NAMES:
            raise ExportError(f"it contains the function {node.id!r:.40}; {PERMITTED}")
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            raise ExportError("it contains a bare float, which torch writes as Float('0.5')")
        if isinstance(node, ast.keyword):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            small = isinstance(value, bool) or (isinstance(value, int) and 0 < value <= MAX_PRECISION)
            if node.arg not in SIZE_OPTIONS or not small:
                raise ExportError(f"it contains the option {node.arg!s:.40}={value!r:.20}")


def _parsed(text: str, allowed: tuple[type, ...]) -> list[ast.AST]:
    """Nodes of the syntax tree, each of an allowed type, with every number in range."""
    if len(text) > MAX_LENGTH:
        raise ExportError(f"it has {len(text)} characters; at most {MAX_LENGTH} are allowed")
    if LONG_EXPONENT.search(text):
        raise ExportError("it contains a number with an exponent of more than two digits")
    try:
        level: list[ast.AST] = [ast.parse(text, mode="eval")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # depends on nesting and numbers
        raise ExportError("it is not an expression") from None
    nodes: list[ast.AST] = []
    for _ in range(MAX_NESTING):
        nodes += level
        level = [inner for outer in level for inner in ast.iter_child_nodes(outer)]
        if not level:
            break
    else:
        raise ExportError(f"it is nested more than {MAX_NESTING} levels deep")
    for node in nodes:
        if not isinstance(node, allowed):
            raise ExportError(f"it contains {FORBIDDEN.get(type(node), type(node).__name__)}; {PERMITTED}")
        if isinstance(node, ast.Constant):
            _check_constant(node.value)
    return nodes


def _check_constant(value: object) -> None:
    if isinstance(value, str):  # name of a symbol, or digits of Float('0.5')
        try:
            value = float(value)
        except ValueError:
            return
    if not isinstance(value, int | float):
        raise ExportError(f"it contains a constant of type {type(value).__name__}")
    if abs(value) >= 2**63 or not math.isfinite(value):
        raise ExportError("it contains a number that is too large for a size")


def check_growth(nodes: object) -> None:
    """Raise ExportError if integers in a graph grow without bound, as by repeated products."""
    bits: dict[str, int] = {}
    for node in nodes if isinstance(nodes, list) else ():
        target = node.get("target") if isinstance(node, dict) else None
        if not isinstance(target, str) or not target.startswith(("_operator.", "torch.sym_", "math.")):
            continue
        sizes = [bits.get(leaf, SIZE_BITS) if isinstance(leaf, str) else leaf for leaf in _leaves(node.get("inputs"))]
        result = sum(sizes) if target == "_operator.mul" else max(sizes, default=0) + 1
        if result > MAX_BITS:
            raise ExportError(f"its graph computes integers of more than {MAX_BITS} bits, too large for a size")
        bits |= dict.fromkeys((leaf for leaf in _leaves(node.get("outputs")) if isinstance(leaf, str)), result)


def _leaves(part: object) -> list[str | int]:
    """Names and bit lengths of the values in an argument."""
    if isinstance(part, dict):
        leaves: list[str | int] = [part["as_name"]] if isinstance(part.get("as_name"), str) else []
        leaves += [part["as_int"].bit_length()] if isinstance(part.get("as_int"), int) else []
        return leaves + [
            leaf for key, inner in part.items() if key not in ("as_name", "as_int") for leaf in _leaves(inner)
        ]
    return [leaf for inner in part for leaf in _leaves(inner)] if isinstance(part, list) else []

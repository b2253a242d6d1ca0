"""Formats formulas of the registry for readers: "2 (p - 1)/p n" instead of "2 * f * n"."""

from __future__ import annotations

import ast

_SYMBOLS = {ast.Add: " + ", ast.Sub: " - ", ast.Mult: " ", ast.Div: "/"}
_SYMBOLS |= {ast.Mod: " mod ", ast.Pow: "^"}
_STRENGTH = {ast.Add: 1, ast.Sub: 1, ast.Mult: 2, ast.Mod: 2, ast.Div: 2}
_STRENGTH |= {ast.Pow: 4}
_SIGNS = {ast.Eq: "=", ast.NotEq: "≠", ast.Gt: ">", ast.GtE: "≥", ast.Lt: "<", ast.LtE: "≤"}
_NAMES = {"f": ("(p - 1)/p", 2)}


def readable(formula: object) -> str:
    """Return a formula in ordinary notation; a dash if there is none."""
    text = str(formula)
    if formula is None or text == "counted":
        return "-" if formula is None else text
    return _written(ast.parse(text, mode="eval").body)[0]


def _written(node: ast.expr) -> tuple[str, int]:
    """Return an expression, and how strongly it holds together: a weaker part gets parentheses."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        return f"⌊{_operation(ast.BinOp(node.left, ast.Div(), node.right))[0]}⌋", 9
    if isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
        return _operation(node)
    if isinstance(node, ast.Name):
        return _NAMES.get(node.id, (node.id, 9))
    if isinstance(node, ast.IfExp):
        then, other = _written(node.body)[0], _written(node.orelse)[0]
        return f"{then} if {_condition(node.test)}, else {other}", 0
    if isinstance(node, ast.Call) and isinstance(node.args[0], ast.GeneratorExp):
        return _sum(node.args[0]), 2
    if isinstance(node, ast.Call):
        name, inner = (ast.unparse(node.func), ", ".join(_written(part)[0] for part in node.args))
        return (f"⌈{inner}⌉" if name == "ceil" else f"{name}({inner})"), 9
    if isinstance(node, ast.Compare | ast.BoolOp):
        return f"[{_condition(node)}]", 9
    return ast.unparse(node), 9


def _operation(node: ast.BinOp) -> tuple[str, int]:
    kind = type(node.op)
    strength = _STRENGTH[kind]
    left, right = (_written(operand) for operand in (node.left, node.right))
    is_strict = kind in (ast.Sub, ast.Div, ast.Mod)
    return (
        f"{_enclosed(left, strength)}{_SYMBOLS[kind]}{_enclosed(right, strength + is_strict)}",
        strength,
    )


def _enclosed(part: tuple[str, int], least: int) -> str:
    text, strength = part
    return text if strength >= least else f"({text})"


def _sum(generator: ast.GeneratorExp) -> str:
    """Return a sum over a range: "sum over i < k of (2^i)"."""
    (loop,) = generator.generators
    assert isinstance(loop.iter, ast.Call), "sums are over ranges"
    (end,) = loop.iter.args
    name = ast.unparse(loop.target)
    return f"sum over {name} < {_written(end)[0]} of ({_written(generator.elt)[0]})"


def _condition(node: ast.expr) -> str:
    """Return a condition, which counts as 1 or 0."""
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.Or) else " and "
        return word.join(map(_condition, node.values))
    assert isinstance(node, ast.Compare), ast.dump(node)
    parts = [_written(node.left)[0]]
    for sign, other in zip(node.ops, node.comparators, strict=True):
        parts += [_SIGNS[type(sign)], _written(other)[0]]
    return " ".join(parts)

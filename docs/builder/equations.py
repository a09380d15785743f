"""Equations of docstrings as MathML, which browsers draw by themselves: no script, no font, no network.

Docstrings write ``w <- sum_k p_k w_k``, readable as it stands. A span in double backticks is an equation unless it is
code: an option, a setting, a file, a name.

>>> is_equation("w <- sum_k p_k w_k"), is_equation("lam = 0", {"lam"}), is_equation("num_batches_tracked")
(True, False, False)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "lambda": "λ", "mu": "μ", "sigma": "σ",
    "tau": "τ", "theta": "θ", "phi": "φ", "psi": "ψ", "rho": "ρ", "Delta": "Δ",
}  # fmt: skip
SIGNS = {"<-": "←", "->": "→", "<=": "≤", ">=": "≥", "||": "∥", "-": "−", "@": "·", ".": "·", "*": "∗", "~": "∼"}
LIMITS = {"sum": "∑", "mean": "mean", "max": "max", "min": "min", "argmin": "argmin", "argmax": "argmax"}
TOKEN = re.compile(
    r"\s+|\d+(?:\.\d+)?(?:e-?\d+)?|[A-Za-z][A-Za-z0-9]*|<-|->|<=|>=|\|\||_\{[^}]*\}|_[A-Za-z0-9]+|[^\sA-Za-z0-9]"
)
CODE = re.compile(
    r"\"|\.py\b|\[(?:train|evaluate|model|split|data)\]|\b(?:true|false|nn)\b|^\[\w+, |->|_k?\w{3,}_|^\w+[_.][a-z]{4,}"
)
PLAIN = re.compile(r"[A-Za-z][\w-]*(?: = [\w.\"-]+)*")


def is_equation(span: str, options: Collection[str] = ()) -> bool:
    """Whether a span of a docstring is mathematics; ``options`` are names that are code wherever they stand alone."""
    if CODE.search(span):
        return False
    if not PLAIN.fullmatch(span):
        return bool(re.search(r"[A-Za-z]", span))
    names = [part for part in span.split(" = ") if not re.fullmatch(r"[\d.e-]+", part)]
    return not set(names) & set(options) and all(_is_symbol(name) for name in names)


def _is_symbol(word: str) -> bool:
    base = word.split("_")[0]
    return len(base) == 1 or base in GREEK or ("_" in word and word.split("_")[1] in ("k", "j", "t"))


def mathml(text: str, options: Collection[str] = (), display: bool = False) -> str:
    """An equation; ``options`` (``inner_lr``, ``adapt-lr``) are written as words.

    >>> mathml("w_k")
    '<span class="equation"><math><msub><mi>w</mi><mi>k</mi></msub></math></span>'
    """
    inner = "".join(_row(list(_tokens(text, options))))
    kind = ' display="block"' if display else ""
    return f'<span class="equation"><math{kind}>{inner}</math></span>'


def _tokens(text: str, options: Collection[str]) -> Iterator[str]:
    text = re.sub(r"<([^<>=\s-][^<>]*)>", r"⟨\1⟩", text)
    names = sorted((name for name in options if re.search(r"[_-]", name)), key=len, reverse=True)
    pattern = "|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in names) or r"(?!)"
    while text:
        found = re.match(pattern, text) or TOKEN.match(text)
        assert found is not None, text
        yield found[0]
        text = text[found.end() :]


def _row(tokens: list[str]) -> Iterator[str]:
    """Nodes one after the other: what a symbol carries is put on it, spaces between symbols are narrow."""
    index = 0
    while index < len(tokens):
        token, index = tokens[index], index + 1
        if token.isspace():
            if index > 1 and index < len(tokens) and _stands_alone(tokens[index - 2]) and _stands_alone(tokens[index]):
                yield '<mspace width="0.2em"/>'
            continue
        node, limits = _node(token), token in LIMITS
        below = above = ""
        while index < len(tokens):
            mark, after = tokens[index], tokens[index + 1] if index + 1 < len(tokens) else " "
            if mark[0] == "_" and len(mark) > 1:
                below = _index(mark.strip("_{}"))
            elif mark == "^" and not after.isspace():
                above, index = _node(after), index + 1
            elif mark == "'" or (
                mark in "+*" and not tokens[index - 1].isspace() and (after.isspace() or after in "),⟩|")
            ):
                above += _mo("′" if mark == "'" else SIGNS.get(mark, mark))
            elif mark == "~" and not tokens[index - 1].isspace():
                node = f'<mover accent="true">{node}{_mo("~")}</mover>'
            else:
                break
            index += 1
        yield _with(node, below, above, limits)


def _with(node: str, below: str, above: str, limits: bool) -> str:
    above = f"<mrow>{above}</mrow>" if above.count("</") > 1 else above
    if below and above:
        return f"<msubsup>{node}{below}{above}</msubsup>"
    if below:
        name = "munder" if limits else "msub"
        return f"<{name}>{node}{below}</{name}>"
    return f"<msup>{node}{above}</msup>" if above else node


def _stands_alone(token: str) -> bool:
    """Whether something beside it needs a little air: a symbol, a word, a bracket, but no operator."""
    return token[0].isalnum() or token[0] in "()[]|_'"


def _node(token: str) -> str:
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    if token in LIMITS:
        return f'<mo movablelimits="true">{LIMITS[token]}</mo>'
    if token == "grad":
        return "<mo>∇</mo>"
    if token[0].isalpha():
        return f"<mi>{GREEK.get(token, _safe(token.replace('_', '-')))}</mi>"
    return _mo(SIGNS.get(token, token))


def _index(text: str) -> str:
    """A subscript: letters of an index stand for themselves, a longer word is one."""
    if text in GREEK or (text.isalnum() and not (len(text) == 2 and text.islower())):
        return _node(text)
    parts = re.findall(r"<=|[A-Za-z]|\d+|\S", text)
    return f"<mrow>{''.join(map(_node, parts))}</mrow>"


def _mo(sign: str) -> str:
    return f'<mo stretchy="false">{_safe(sign)}</mo>'


def _safe(text: str) -> str:
    """As entities: neither HTML nor Markdown may read anything into a sign."""
    return "".join(c if c.isalnum() else f"&#{ord(c)};" for c in text)


SPAN = re.compile(r"``(.+?)``", re.DOTALL)
ROLE = re.compile(r":(?:func|class|mod|meth):`~?([\w.]+)`")


def to_markdown(docstring: str, options: Collection[str] = ()) -> str:
    """A docstring as Markdown: equations drawn, indented lines on lines of their own, examples as code.

    >>> print(to_markdown("Steps of ``lr = 0.1``.\\n\\n    w_k"))
    Steps of `lr = 0.1`.
    <BLANKLINE>
    <span class="equation"><math display="block"><msub><mi>w</mi><mi>k</mi></msub></math></span>
    """
    return "\n\n".join(_paragraph(part, options) for part in re.split(r"\n\s*\n", docstring.strip("\n")))


def _paragraph(text: str, options: Collection[str]) -> str:
    if text.lstrip().startswith(">>>"):
        return f"```python\n{text}\n```"
    if text.startswith("    "):
        lines = SPAN.findall(text) or text.strip().split("\n")
        return "\n".join(mathml(" ".join(line.split()), options, display=True) for line in lines)

    def shown(span: str) -> str:
        return mathml(span, options) if is_equation(span, options) else f"`{span}`"

    plain = ROLE.sub(lambda found: f"`{found[1].rsplit('.', 1)[-1]}`", text)
    greek = "|".join(sorted(set(GREEK) - set(options)))
    parts = SPAN.split(plain)  # text and spans in turn
    symbol = rf"(?<![\w`-])(?:(?:{greek})~?|[A-Za-z]_(?:[a-z]{{1,4}}|\d))(?![\w`-])"  # psi~ and F_base in a sentence
    prose = [re.sub(symbol, lambda found: mathml(found[0]), part) for part in parts[::2]]
    spans = [shown(" ".join(part.split())) for part in parts[1::2]]
    return "".join(part for pair in zip(prose, [*spans, ""], strict=True) for part in pair)

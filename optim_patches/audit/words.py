"""Words of a shell command: what a variable holds, the pieces a word is made of, and word splitting."""

from __future__ import annotations

from dataclasses import dataclass

MAX_VALUE = 16_384
MAX_ITEMS = 10_000


@dataclass(frozen=True)
class Word:
    """One argument of a command after expansion.

    Attributes:
        text: the argument as the program would receive it; opaque parts stay as typed.
        start, end: span of the source text.
        opaque: some part is known to the shell only.
        derived: came out of a variable or array, so the span is that of the reference.
    """

    text: str
    start: int
    end: int
    opaque: bool = False
    derived: bool = False


@dataclass(frozen=True)
class Value:
    """What a variable holds: one string, or the items of an array."""

    items: tuple[str, ...]
    opaque: bool = False
    array: bool = False

    @property
    def text(self) -> str:
        return " ".join(self.items)


@dataclass
class Piece:
    text: str
    kind: str = "literal"  # literal | split (unquoted expansion) | array
    items: tuple[str, ...] = ()
    opaque: bool = False


def bounded(items: tuple[str, ...]) -> tuple[str, ...]:
    """Items cut to the size limit; a variable that doubles itself line after line must not fill the memory."""
    kept: list[str] = []
    left = MAX_VALUE
    for item in items[:MAX_ITEMS]:
        if left <= 0:
            break
        kept.append(item[:left])
        left -= len(item)
    return tuple(kept)


def fields(pieces: list[Piece], start: int, end: int) -> list[Word]:
    """Word splitting: unquoted expansions break at blanks, arrays at their items, everything else sticks together."""
    derived = any(piece.kind != "literal" for piece in pieces)
    words: list[Word] = []
    current: list[str] | None = None  # None: no word has begun
    opaque = False

    def flush() -> None:
        nonlocal current, opaque
        if current is not None:
            words.append(Word("".join(current), start, end, opaque, derived))
        current, opaque = None, False

    def add(part: str, hidden: bool) -> None:
        nonlocal current, opaque
        current = [] if current is None else current
        current.append(part)
        opaque = opaque or hidden

    for piece in pieces:
        if piece.kind == "literal":
            add(piece.text, piece.opaque)
            continue
        parts = piece.items if piece.kind == "array" else tuple(piece.text.split())
        blanks = piece.kind == "split" and piece.text
        if blanks and piece.text[0].isspace():
            flush()
        for number, part in enumerate(parts):
            if number:
                flush()
            add(part, piece.opaque)
        if blanks and piece.text[-1].isspace():
            flush()
    flush()
    return words

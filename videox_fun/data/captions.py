"""What is wrong with captions: the same one on many clips, next to nothing in them, more than the tokenizer reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_FEW_WORDS = 2
_FEW_LETTERS = 4

#: Counts the tokens of a text.
Count = Callable[[str], int]


def caption_findings(
    captions: Mapping[int, str], *, count_tokens: Count | None = None, max_tokens: int = 512
) -> Iterator[tuple[str, int, str, str]]:
    """``(code, row, what, fix)``. Without ``count_tokens`` a caption counts as cut when it has more words than
    ``max_tokens``: every word is at least one token.
    """
    alike: dict[str, list[int]] = defaultdict(list)
    for row, text in captions.items():
        plain = " ".join(text.split()).lower()
        alike[plain].append(row)
        if not plain:
            yield "empty-caption", row, "the caption is empty", "write one; text dropout makes empty prompts by itself"
        elif len(plain.split()) < _FEW_WORDS and len(plain) < _FEW_LETTERS:
            yield "short-caption", row, f"the caption is only {text!r}", "describe what is seen"
        size = count_tokens(text) if count_tokens is not None else len(plain.split())
        if size > max_tokens:
            unit = "tokens" if count_tokens is not None else "words"
            yield ("long-caption", row, f"the caption has {size} {unit}, {max_tokens} tokens are read",
                   "shorten it, or raise --tokenizer_max_length if the model allows")  # fmt: skip
    for plain, rows in alike.items():
        if plain and len(rows) > 1:
            others = ", ".join(str(row + 1) for row in rows[1:4]) + (" ..." if len(rows) > 4 else "")
            yield ("same-caption", rows[0], f"the same caption as row {others}",
                   "tell them apart, unless one phrase for all is meant")  # fmt: skip


def caption_warnings(rows: Mapping[int, dict[str, Any]]) -> list[str]:
    """One line per kind of finding, for the summary at the start of a run."""
    captions = {number: row["text"] for number, row in rows.items() if isinstance(row.get("text"), str)}
    by_code: dict[str, list[str]] = defaultdict(list)
    for code, row, what, _ in caption_findings(captions):
        by_code[code].append(f"row {row + 1}: {what}")
    return [f"{len(found)} caption(s) to look at ({code.replace('-', ' ')}), e.g. {found[0]}"
            for code, found in by_code.items()]

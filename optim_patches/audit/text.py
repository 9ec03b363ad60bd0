"""Texts in both languages of the audit. A text that lacks one language cannot be written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Text:
    """One text in English and Chinese."""

    en: str
    zh: str

    def __getitem__(self, lang: str) -> str:
        return self.zh if lang == "zh" else self.en

    def format(self, *args: object, **kwargs: object) -> Text:
        """Both languages formatted with the same values; ``Text`` values are taken in the right language."""
        texts = {}
        for lang in LANGUAGES:
            positional = [value[lang] if isinstance(value, Text) else value for value in args]
            named = {key: value[lang] if isinstance(value, Text) else value for key, value in kwargs.items()}
            texts[lang] = self[lang].format(*positional, **named)
        return Text(**texts)

    def __add__(self, other: Text) -> Text:
        return Text(self.en + other.en, self.zh + other.zh)

    def as_dict(self) -> dict[str, str]:
        return {"en": self.en, "zh": self.zh}


def same(value: object) -> Text:
    """A text that reads the same in both languages: a number, a flag, a file name."""
    return Text(str(value), str(value))


def join(texts: Iterable[Text], *, separator: str = ", ") -> Text:
    """Texts joined; Chinese uses the enumeration comma where English uses a comma."""
    items = list(texts)
    zh_separator = "、" if separator == ", " else separator
    return Text(separator.join(t.en for t in items), zh_separator.join(t.zh for t in items))


def size(number: float) -> str:
    """Bytes as text."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return ""

"""Reads shell text without running it.

The reader walks the text once. It knows what launch scripts use: quoting, line continuations, comments, assignments
and ``export``, ``${X}`` and ``${X:-default}``, arrays, word splitting, here-documents, redirections, several commands
in one file, ``source`` of a file within reach. Whatever only a shell could compute (``$(...)``, backticks, arithmetic,
pattern substitution, unset variables) stays in the word as typed, and the word is marked opaque.

Every word keeps the span of the text it came from, so that an edit can be made in place. Words that came out of a
variable carry the span of the reference and are marked derived.

All scans are linear: once one search for a closing quote or parenthesis ran into the end of the text, later openings of
the same kind are literal characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from optim_patches.audit.text import Text
from optim_patches.audit.words import MAX_VALUE, Piece, Value, Word, bounded, fields

_MAX_DEPTH = 8
_PLAIN = re.compile(r"""[^\s'"\\$`;&|<>()^]+""")
_QUOTED = re.compile(r"""[^"\\$`]+""")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]\s]*\])?(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"([A-Za-z_]\w*)(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_CONTINUED = re.compile(r"([ \t]*)\r?\n")
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1")
_DECLARE = frozenset({"export", "declare", "typeset", "local", "readonly", "env"})
KEYWORDS = frozenset({"then", "do", "else", "elif", "if", "while", "until", "{", "}", "!", "time", "exec", "nohup",
                      "sudo", "env", "fi", "done"})  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One simple command: its words, the assignments in force and the environment it would see."""

    words: tuple[Word, ...]
    line: int
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShellProblem:
    """Something a shell would stumble over."""

    line: int
    text: Text


@dataclass
class ShellScript:
    """What was read."""

    text: str
    commands: list[Command] = field(default_factory=list)
    problems: list[ShellProblem] = field(default_factory=list)
    unset: dict[str, int] = field(default_factory=dict)


def parse_shell(
    text: str,
    *,
    wanted: Callable[[list[str]], bool] = bool,
    source: Callable[[str], str | None] | None = None,
) -> ShellScript:
    """Read shell text.

    Args:
        text: the script.
        wanted: which commands to keep, by their words; the others only contribute their assignments.
        source: returns the text of a file named by ``source FILE``, or None where it cannot be read.
    """
    reader = _Reader(text, wanted, source)
    reader.run()
    script = reader.script
    if "\r\n" in text:
        script.problems.append(ShellProblem(text.count("\n", 0, text.index("\r\n")) + 1, CRLF))
    return script


CRLF = Text(
    "the file has Windows line ends (CRLF): bash on Linux reads the carriage return as part of the last word. "
    "Convert it with: sed -i 's/\\r$//' FILE",
    "文件使用 Windows 换行符 (CRLF)：Linux 上的 bash 会把回车当作最后一个词的一部分。请先转换：sed -i 's/\\r$//' 文件",
)
UNCLOSED = Text(
    "a {0} is opened here and never closed: a shell refuses the whole file. The rest was read as plain text.",
    "此处的 {0} 没有闭合：shell 会拒绝执行整个文件。其余部分按普通文本读取。",
)
DANGLING = Text(
    "blanks follow the backslash at the end of this line, so a shell ends the command here and never sees the "
    "arguments below. Remove the blanks.",
    "本行末尾的反斜杠后面有空格：shell 会在此结束命令，下面的参数不会生效。请删除这些空格。",
)


class _Reader:
    def __init__(
        self,
        text: str,
        wanted: Callable[[list[str]], bool],
        source: Callable[[str], str | None] | None,
        parent: _Reader | None = None,
    ) -> None:
        self.text, self.wanted, self.source = text, wanted, source
        self.at, self.depth = 0, 0 if parent is None else parent.depth + 1
        self.script = ShellScript(text)
        self.values: dict[str, Value] = {} if parent is None else parent.values
        self.exported: set[str] = set() if parent is None else parent.exported
        self.dead: set[str] = set()  # openings whose closing was searched for in vain
        self.words: list[Word] = []
        self.prefix: dict[str, str] = {}
        self.heredocs: list[str] = []
        self.dangling: set[int] = set()
        self.drop_next = False
        self.first_at = 0
        self._line_cache = (0, 1)

    # -- the walk ---------------------------------------------------------------------------------------------------
    def run(self) -> None:
        text, size = self.text, len(self.text)
        while self.at < size:
            char = text[self.at]
            if char == "\n":
                self.end_command()
                self.at += 1
                self.skip_heredocs()
            elif char in " \t\r\f\v":
                self.at += 1
            elif self.continuation(self.at):
                self.at = self.continuation(self.at)
            elif char == "#":
                newline = text.find("\n", self.at)
                self.at = size if newline < 0 else newline
            elif char in ";|)(":
                self.end_command()
                self.at += 1
            elif char == "&" and not text.startswith("&>", self.at):
                self.end_command()
                self.at += 1
            elif char in "<>&":
                self.redirect()
            else:
                self.word()
        self.end_command()

    def continuation(self, at: int) -> int:
        """Position after a line continuation at ``at`` (bash, and the caret or backtick of Windows shells), else 0."""
        mark = self.text[at]
        if mark not in "\\^`":
            return 0
        match = _CONTINUED.match(self.text, at + 1)
        if match is None or (match.group(1) and mark != "\\"):
            return 0
        if match.group(1) and at not in self.dangling:
            self.dangling.add(at)
            self.problem(at, DANGLING)
        return match.end()

    def redirect(self) -> None:
        text = self.text
        here = _HEREDOC.match(text, self.at)
        if here and not text.startswith("<<<", self.at):
            self.heredocs.append(here.group(2))
            self.at = here.end()
            return
        while self.at < len(text) and text[self.at] in "<>&|":
            self.at += 1
        if text.startswith("(", self.at):  # process substitution
            self.at = self.closing("(", ")", self.at) or self.at + 1
            return
        self.drop_next = True

    def skip_heredocs(self) -> None:
        for mark in self.heredocs:
            if "<<" + mark in self.dead:
                continue
            found = re.compile(rf"^[\t ]*{re.escape(mark)}\r?$", re.MULTILINE).search(self.text, self.at)
            if found:
                self.at = found.end()
            else:
                self.dead.add("<<" + mark)
        self.heredocs = []

    def line(self, at: int) -> int:
        last_at, last_line = self._line_cache
        if at >= last_at:
            line = last_line + self.text.count("\n", last_at, at)
            self._line_cache = (at, line)
            return line
        return self.text.count("\n", 0, at) + 1

    def problem(self, at: int, text: Text) -> None:
        self.script.problems.append(ShellProblem(self.line(at), text))

    # -- words ------------------------------------------------------------------------------------------------------
    def word(self) -> None:
        start = self.at
        declared = bool(self.words) and self.words[0].text in _DECLARE
        assign = _ASSIGN.match(self.text, self.at) if (not self.words or declared) and not self.drop_next else None
        if assign:
            self.at = assign.end()
            self.assignment(assign.group(1), bool(assign.group(2)), exported=declared)
            return
        pieces = self.pieces()
        if self.at == start:  # a character no rule takes: keep it as text
            pieces, self.at = [Piece(self.text[start])], start + 1
        if self.drop_next:
            self.drop_next = False
            return
        if self.at < len(self.text) and self.text[self.at] in "<>" and self.text[start : self.at].isdigit():
            return  # a file descriptor: 2>file
        if not self.words:
            self.first_at = start
        self.words.extend(fields(pieces, start, self.at))

    def assignment(self, name: str, append: bool, *, exported: bool) -> None:
        if self.text.startswith("(", self.at):
            value = self.array()
        else:
            pieces = self.pieces()
            joined = "".join(piece.text for piece in pieces)[:MAX_VALUE]
            value = Value((joined,), opaque=any(piece.opaque for piece in pieces))
        old = self.values.get(name)
        if append and old is not None:
            items = old.items + value.items if old.array or value.array else (old.text + value.text,)
            value = Value(bounded(items), old.opaque or value.opaque, old.array or value.array)
        self.values[name] = value
        if exported:
            self.exported.add(name)
        elif not self.words:
            self.prefix[name] = value.text

    def array(self) -> Value:
        self.at += 1
        items: list[Word] = []
        text, size = self.text, len(self.text)
        while self.at < size and text[self.at] != ")":
            char = text[self.at]
            if char.isspace():
                self.at += 1
            elif self.continuation(self.at):
                self.at = self.continuation(self.at)
            elif char == "#":
                newline = text.find("\n", self.at)
                self.at = size if newline < 0 else newline
            else:
                start = self.at
                pieces = self.pieces()
                if self.at == start:
                    pieces, self.at = [Piece(char)], start + 1
                items.extend(fields(pieces, start, self.at))
        self.at += 1
        return Value(bounded(tuple(word.text for word in items)), any(word.opaque for word in items), array=True)

    def pieces(self) -> list[Piece]:
        """The parts of one word, up to the next unquoted blank or operator."""
        pieces: list[Piece] = []
        text, size = self.text, len(self.text)
        while self.at < size:
            char = text[self.at]
            plain = _PLAIN.match(text, self.at)
            if plain:
                pieces.append(Piece(plain.group()))
                self.at = plain.end()
            elif char.isspace() or char in ";&|<>()" or self.continuation(self.at):
                break
            elif char == "\\":
                pieces.append(Piece(text[self.at + 1 : self.at + 2] or char))
                self.at = min(self.at + 2, size)
            elif char == "'":
                pieces.append(self.single())
            elif char == '"':
                pieces.extend(self.double())
            elif char == "$":
                pieces.extend(self.dollar(quoted=False))
            elif char == "`":
                pieces.append(self.backtick())
            else:
                pieces.append(Piece(char))
                self.at += 1
        return pieces

    def single(self) -> Piece:
        end = -1 if "'" in self.dead else self.text.find("'", self.at + 1)
        if end < 0:
            return self.unclosed("'")
        piece = Piece(self.text[self.at + 1 : end])
        self.at = end + 1
        return piece

    def double(self) -> list[Piece]:
        start, text, size = self.at, self.text, len(self.text)
        if '"' in self.dead:
            return [self.unclosed('"')]
        self.at += 1
        pieces = [Piece("")]
        while self.at < size and text[self.at] != '"':
            char = text[self.at]
            run = _QUOTED.match(text, self.at)
            if run:
                pieces.append(Piece(run.group()))
                self.at = run.end()
            elif char == "\\":
                after = text[self.at + 1 : self.at + 2]
                pieces.append(Piece(after if after in '"\\$`' else "" if after == "\n" else char + after))
                self.at += 2
            elif char == "$":
                pieces.extend(self.dollar(quoted=True))
            else:
                pieces.append(self.backtick())
        if self.at >= size:
            self.at = start
            return [self.unclosed('"')]
        self.at += 1
        return pieces

    def unclosed(self, mark: str) -> Piece:
        if mark not in self.dead:
            self.dead.add(mark)
            self.problem(self.at, UNCLOSED.format(mark))
        self.at += len(mark)
        return Piece(mark)

    # -- expansion --------------------------------------------------------------------------------------------------
    def backtick(self) -> Piece:
        end = -1 if "`" in self.dead else self.text.find("`", self.at + 1)
        if end < 0:
            return self.unclosed("`")
        piece = Piece(self.text[self.at : end + 1], opaque=True)
        self.at = end + 1
        return piece

    def closing(self, opening: str, close: str, at: int) -> int:
        """Position after the bracket that closes the one at ``at``, or 0."""
        if opening in self.dead:
            return 0
        level = 0
        pattern = re.compile(rf"""\\.|'[^']*'|[{re.escape(opening + close)}]""", re.DOTALL)
        for match in pattern.finditer(self.text, at):
            mark = match.group()
            level += (mark == opening) - (mark == close)
            if mark == close and level == 0:
                return match.end()
        self.dead.add(opening)
        self.problem(at, UNCLOSED.format(opening))
        return 0

    def dollar(self, *, quoted: bool) -> list[Piece]:
        start, text = self.at, self.text
        after = text[start + 1 : start + 2]
        if after == "(":
            self.at = self.closing("(", ")", start + 1) or start + 2
            return [Piece(text[start : self.at], opaque=True)]
        if after == "{":
            end = self.closing("{", "}", start + 1)
            if end:
                self.at = end
                return self.braced(text[start + 2 : end - 1], text[start:end], quoted)
            self.at = start + 2
            return [Piece("${")]
        name = _NAME.match(text, start + 1)
        if name:
            self.at = name.end()
            return [self.lookup(name.group(), text[start : self.at], quoted)]
        if after and after in "@*#?!$-0123456789":
            self.at = start + 2
            return [Piece(text[start : self.at], opaque=True)]
        self.at = start + 1
        return [] if after in ("'", '"') and not quoted else [Piece("$")]

    def braced(self, inner: str, raw: str, quoted: bool) -> list[Piece]:
        match = _BRACED.fullmatch(inner)
        if match is None:
            return [Piece(raw, opaque=True)]
        name, subscript, operator, word = match.groups()
        value = self.values.get(name)
        if operator is None:
            return [self.lookup(name, raw, quoted, whole=bool(subscript))]
        filled = value is not None and (":" not in operator or value.text != "")
        if operator.endswith("+"):
            return self.nested(word, quoted) if filled else [Piece("")]
        if filled:
            return [self.lookup(name, raw, quoted)]
        if operator.endswith("?"):
            self.script.unset.setdefault(name, self.line(self.at))
            return [Piece(raw, opaque=True)]
        pieces = self.nested(word, quoted)
        if operator.endswith("="):
            self.values[name] = Value(("".join(p.text for p in pieces),), any(p.opaque for p in pieces))
        return pieces

    def nested(self, word: str, quoted: bool) -> list[Piece]:
        """The pieces of a default value, which may itself hold quotes and references."""
        if self.depth >= _MAX_DEPTH:
            return [Piece(word, opaque=True)]
        inner = _Reader(word, self.wanted, None, parent=self)
        pieces: list[Piece] = []
        while inner.at < len(word):
            found = inner.pieces()
            if not found:
                found = [Piece(word[inner.at], kind="literal" if quoted else "split")]
                inner.at += 1
            pieces.extend(found)
        for name in inner.script.unset:
            self.script.unset.setdefault(name, self.line(self.at))
        return pieces

    def lookup(self, name: str, raw: str, quoted: bool, whole: bool = False) -> Piece:
        value = self.values.get(name)
        if value is None:
            self.script.unset.setdefault(name, self.line(self.at))
            return Piece(raw, opaque=True)
        if value.array and (whole or not quoted):
            items = value.items if whole else value.items[:1]
            return Piece(" ".join(items), kind="array", items=items, opaque=value.opaque)
        text = value.items[0] if value.array and value.items else value.text
        return Piece(text, kind="literal" if quoted else "split", opaque=value.opaque)

    # -- commands ---------------------------------------------------------------------------------------------------
    def end_command(self) -> None:
        words, prefix = self.words, self.prefix
        self.words, self.prefix, self.drop_next = [], {}, False
        while words and words[0].text in KEYWORDS:
            words = words[1:]
        if not words:
            return
        texts = [word.text for word in words]
        if texts[0] in ("source", ".") and len(texts) > 1:
            self.include(words[1])
        elif texts[0] == "export":
            self.exported.update(texts[1:])
        elif texts[0] in ("for", "select") and len(texts) > 3 and texts[2] == "in":
            self.values[texts[1]] = Value((texts[3],), opaque=words[3].opaque)
        elif self.wanted(texts):
            environment = {name: self.values[name].text for name in self.exported if name in self.values}
            environment.update(prefix)
            line = self.line(self.first_at)
            self.script.commands.append(Command(tuple(words), line, environment))

    def include(self, word: Word) -> None:
        if self.source is None or word.opaque or self.depth >= _MAX_DEPTH:
            return
        text = self.source(word.text)
        if text is None:
            return
        inner = _Reader(text, lambda words: False, self.source, parent=self)
        inner.run()
